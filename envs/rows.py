"""R2E-Gym `DatasetRow` -> Task. Pure: a row in, a task out, or a DataError that names file, row and column.

Beyond R2E's columns three optional ones are read, which our offline tasks carry: `instance_id`, `test_command` and
`hidden_tests_dir` (a folder, relative to the file that holds the row).
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_r3.envs.commits import UnpatchableError, patch_of
from agent_r3.envs.summary import clean_name
from agent_r3.errors import DataError
from agent_r3.types import Task

REQUIRED = ("repo_name", "docker_image", "commit_hash", "parsed_commit_content", "expected_output_json")
COLUMNS = (*REQUIRED, "problem_statement", "prompt", "instance_id", "test_command", "hidden_tests_dir")

_ISSUE = re.compile(r"\[ISSUE\](.*)\[/ISSUE\]", re.DOTALL)
_STATUSES = frozenset({"PASSED", "FAILED", "ERROR"})
_PYTEST = (
    "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' {display}"
    ".venv/bin/python -W ignore -m pytest -rA r2e_tests"
)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a row stands, for messages and for relative paths."""

    name: str  # file or hub id
    number: int  # from 1
    folder: Path | None = None  # of the file
    dataset: str = "r2e"

    def error(self, column: str, problem: str) -> DataError:
        return DataError(f"{self.name}: row {self.number}: column `{column}` {problem}")


def task_from_row(row: Mapping[str, Any], origin: Origin) -> Task:
    """Raises DataError for a missing or malformed column. A commit that has no text diff gives an empty gold patch."""
    texts = {column: _text(row, column, origin) for column in REQUIRED}
    repo = texts["repo_name"]
    hidden = row.get("hidden_tests_dir")
    return Task(
        id=row.get("instance_id") or f"{repo}__{texts['commit_hash'][:12]}",
        dataset=origin.dataset,
        repo=repo,
        image=texts["docker_image"],
        problem_statement=_problem_statement(row, origin),
        expected=_expected(texts["expected_output_json"], origin),
        test_command=row.get("test_command") or r2e_test_command(repo),
        gold_patch=_gold_patch(texts["parsed_commit_content"], origin),
        hidden_tests_dir=_hidden_tests_dir(hidden, origin) if hidden else None,
    )


def r2e_test_command(repo: str) -> str:
    """The command of R2E-Gym's `run_tests.sh`; orange3 is a desktop application and needs a display."""
    return _PYTEST.format(display="QT_QPA_PLATFORM=minimal xvfb-run --auto-servernum " if repo == "orange3" else "")


def _text(row: Mapping[str, Any], column: str, origin: Origin) -> str:
    if column not in row:
        raise origin.error(column, "is missing")
    value = row[column]
    if not isinstance(value, str) or not value.strip():
        raise origin.error(column, f"must be a non-empty string, found {_short(value)}")
    return value


def _problem_statement(row: Mapping[str, Any], origin: Origin) -> str:
    column = "problem_statement" if row.get("problem_statement") or not row.get("prompt") else "prompt"
    text = _text(row, column, origin)
    marked = _ISSUE.search(text) or (_ISSUE.search(row["prompt"]) if isinstance(row.get("prompt"), str) else None)
    statement = (marked.group(1) if marked else text).strip()
    if not statement:
        raise origin.error(column, "has nothing between [ISSUE] and [/ISSUE]")
    return statement


def _expected(raw: str, origin: Origin) -> dict[str, str]:
    table = _json(raw, "expected_output_json", origin)
    if not isinstance(table, dict) or not table:
        raise origin.error("expected_output_json", f"must be a non-empty JSON object, found {_short(raw)}")
    for name, status in table.items():
        if status not in _STATUSES:
            raise origin.error(
                "expected_output_json", f"gives {name!r} the status {status!r}, not PASSED, FAILED or ERROR"
            )
    return {clean_name(name): status for name, status in table.items()}


def _gold_patch(raw: str, origin: Origin) -> str:
    commit = _json(raw, "parsed_commit_content", origin)
    try:
        return patch_of(commit["file_diffs"])
    except UnpatchableError:
        return ""
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as exc:
        raise origin.error(
            "parsed_commit_content", f"is not a ParsedCommit ({type(exc).__name__}: {' '.join(str(exc).split())[:200]})"
        ) from exc


def _hidden_tests_dir(value: object, origin: Origin) -> Path:
    if not isinstance(value, str):
        raise origin.error("hidden_tests_dir", f"must be a string, found {_short(value)}")
    folder = (origin.folder or Path.cwd()) / value
    if not folder.is_dir():
        raise origin.error("hidden_tests_dir", f"names {folder}, which is not there; build the tasks again")
    return folder.resolve()


def _json(raw: str, column: str, origin: Origin) -> Any:
    try:
        return json.loads(raw)
    except json.JSONDecodeError as exc:
        raise origin.error(column, f"is not JSON ({exc.msg} at character {exc.pos})") from exc


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
