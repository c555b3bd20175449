"""R2E-Gym `DatasetRow` -> Task. Pure.

Beyond R2E's columns four optional ones are read, which our offline tasks carry: `instance_id`, `test_command`,
`hidden_tests_dir` (a folder, relative to the file that holds the row) and `test_timeout_s`.
"""

import math
import re
from pathlib import Path

from agent_r3.envs.columns import Origin, Row, optional_text, parsed, short, text
from agent_r3.envs.commits import UnpatchableError, patch_of
from agent_r3.envs.summary import clean_name
from agent_r3.types import Source, Task

REQUIRED = ("repo_name", "docker_image", "commit_hash", "parsed_commit_content", "expected_output_json")
COLUMNS = (
    *REQUIRED,
    "problem_statement",
    "prompt",
    "instance_id",
    "test_command",
    "hidden_tests_dir",
    "test_timeout_s",
)

_ISSUE = re.compile(r"\[ISSUE\](.*)\[/ISSUE\]", re.DOTALL)
_STATUSES = frozenset({"PASSED", "FAILED", "ERROR"})
_PYTEST = (
    "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' {display}"
    ".venv/bin/python -W ignore -m pytest -rA r2e_tests"
)


def r2e_task(row: Row, origin: Origin) -> Task:
    """Raises DataError for a missing or malformed column. A commit that has no text diff gives an empty gold patch."""
    texts = {column: text(row, column, origin) for column in REQUIRED}
    repo = texts["repo_name"]
    hidden = row.get("hidden_tests_dir")
    return Task(
        id=optional_text(row, "instance_id", origin) or f"{repo}__{texts['commit_hash'][:12]}",
        dataset=origin.dataset,
        repo=repo,
        image=texts["docker_image"],
        problem_statement=_problem_statement(row, origin),
        expected=_expected(texts["expected_output_json"], origin),
        test_command=optional_text(row, "test_command", origin) or r2e_test_command(repo),
        gold_patch=_gold_patch(texts["parsed_commit_content"], origin),
        hidden_tests_dir=_hidden_tests_dir(hidden, origin) if hidden else None,
        source=Source.OFFLINE if hidden else Source.R2E,
        test_timeout_s=_test_timeout_s(row.get("test_timeout_s"), origin),
    )


def r2e_test_command(repo: str) -> str:
    """The command of R2E-Gym's `run_tests.sh`; orange3 is a desktop application and needs a display."""
    return _PYTEST.format(display="QT_QPA_PLATFORM=minimal xvfb-run --auto-servernum " if repo == "orange3" else "")


def _problem_statement(row: Row, origin: Origin) -> str:
    column = "problem_statement" if row.get("problem_statement") or not row.get("prompt") else "prompt"
    whole = text(row, column, origin)
    marked = _ISSUE.search(whole) or (_ISSUE.search(row["prompt"]) if isinstance(row.get("prompt"), str) else None)
    statement = (marked.group(1) if marked else whole).strip()
    if not statement:
        raise origin.error(column, "has nothing between [ISSUE] and [/ISSUE]")
    return statement


def _expected(raw: str, origin: Origin) -> dict[str, str]:
    table = parsed(raw, "expected_output_json", origin)
    if not isinstance(table, dict) or not table:
        raise origin.error("expected_output_json", f"must be a non-empty JSON object, found {short(raw)}")
    for name, status in table.items():
        if status not in _STATUSES:
            raise origin.error(
                "expected_output_json", f"gives {name!r} the status {status!r}, not PASSED, FAILED or ERROR"
            )
    return {clean_name(name): status for name, status in table.items()}


def _gold_patch(raw: str, origin: Origin) -> str:
    commit = parsed(raw, "parsed_commit_content", origin)
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
        raise origin.error("hidden_tests_dir", f"must be a string, found {short(value)}")
    folder = (origin.folder or Path.cwd()) / value
    if not folder.is_dir():
        raise origin.error("hidden_tests_dir", f"names {folder}, which is not there; build the tasks again")
    return folder.resolve()


def _test_timeout_s(value: object, origin: Origin) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise origin.error("test_timeout_s", f"must be a number of seconds above 0, found {short(value)}")
    return float(value)
