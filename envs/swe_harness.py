"""The package swebench, as far as grading needs it: what it must find in a row, and what it reads in a log."""

import difflib
import importlib.metadata
import os
import tempfile
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from agent_r3.errors import AgentR3Error, DataError, UserError, boundary
from agent_r3.types import Task

_NEEDED = ("version", "log_parser", "eval_script")  # beside what every row has, and what `spec_of` adds
_NO_DOTENV = "PYTHON_DOTENV_DISABLED"
_MEND = "pip install 'agent-r3[eval]'"

_importing = threading.Lock()


class UnreadableError(AgentR3Error):
    """swebench's parser failed on a log."""


class Harness(NamedTuple):
    """Modules of `swebench.harness`."""

    run: ModuleType
    grading: ModuleType
    constants: ModuleType


@dataclass(frozen=True, slots=True)
class Report:
    """What swebench says of one log. `found` is False where it reads no result in it, and `guess` may say why."""

    found: bool
    resolved: bool
    statuses: Mapping[str, str]  # of FAIL_TO_PASS and PASS_TO_PASS, PASSED or FAILED
    guess: str | None


@lru_cache
def load_harness() -> Harness:
    """Takes seconds the first time: it imports `datasets` and `modal`. Raises UserError where swebench is missing."""
    with _importing:
        before = os.environ.get(_NO_DOTENV)
        os.environ[_NO_DOTENV] = "1"  # or it puts what some .env above its own folder says into our environment
        try:
            from swebench.harness import constants, grading, run_evaluation
        except ImportError as exc:
            raise UserError(f"SWE-bench tasks cannot be graded: {_installed()} ({exc}); {_MEND}") from exc
        finally:
            if before is None:
                del os.environ[_NO_DOTENV]
            else:
                os.environ[_NO_DOTENV] = before
    return Harness(run_evaluation, grading, constants)


def _installed() -> str:
    try:
        return f"swebench {importlib.metadata.version('swebench')} is not 5.0.2, or incomplete"
    except importlib.metadata.PackageNotFoundError:
        return "the package swebench is not installed"


def require_spec(task: Task) -> None:
    """Raises DataError for a row that swebench cannot grade, UserError where there is no swebench."""
    row = task.harness_row
    if missing := [column for column in _NEEDED if column not in row]:
        raise DataError(
            f"task {task.id}: its row has no {', no '.join(f'`{column}`' for column in missing)}, so that swebench 5 "
            "cannot grade it; use a dataset in the 5.x format, such as SWE-bench/SWE-bench_Verified"
        )
    assets: Any = row.get("image_assets", {})
    if assets.get("test_patch") or assets.get("patch"):
        raise DataError(
            f"task {task.id}: its tests need pictures (`image_assets`), which are not put in here; "
            "grade multimodal tasks with `swebench eval`"
        )
    harness = load_harness()
    _require_known(task, "log_parser", harness.grading.PARSER_REGISTRY)
    if "eval_type" in row:
        _require_known(task, "eval_type", [kind.value for kind in harness.constants.EvalType])
    for marker in (harness.constants.START_TEST_OUTPUT, harness.constants.END_TEST_OUTPUT):
        if marker not in str(row["eval_script"]):
            raise DataError(f"task {task.id}: its `eval_script` never prints `{marker}`, so that no run has a result")


def spec_of(task: Task) -> Any:
    """swebench's TestSpec. Raises as `require_spec`."""
    require_spec(task)
    run, _, constants = load_harness()
    kinds = constants.EvalType
    kind = kinds.FAIL_ONLY if task.repo in constants.FAIL_ONLY_REPOS else kinds.PASS_AND_FAIL
    return run.make_test_spec({"eval_type": kind.value, **task.harness_row})


def report_of(spec: Any, log: str) -> Report:
    """Judge the log of one run. Raises UnreadableError."""
    prediction = {"instance_id": spec.instance_id, "model_name_or_path": "none", "model_patch": ""}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "test_output.txt"
        path.write_text(log, encoding="utf-8", newline="")
        with boundary(UnreadableError, f"swebench's {spec.log_parser} failed", Exception):
            report = load_harness().grading.get_eval_report(spec, prediction, str(path), include_tests_status=True)
    found = report[spec.instance_id]
    statuses: dict[str, str] = {}
    for kind in ("FAIL_TO_PASS", "PASS_TO_PASS"):
        of_kind = found.get("tests_status", {}).get(kind, {})
        statuses |= dict.fromkeys(of_kind.get("success", ()), "PASSED")
        statuses |= dict.fromkeys(of_kind.get("failure", ()), "FAILED")
    return Report(
        found=found["patch_successfully_applied"],  # its name for a log that has a result
        resolved=found["resolved"],
        statuses=statuses,
        guess=found.get("infra_failure_reason"),
    )


def why_unread(log: str, guess: str | None) -> str:
    """In one line, why swebench reads no result in this log."""
    _, grading, constants = load_harness()
    if constants.START_TEST_OUTPUT not in log:
        why = "the eval script ended before the tests began"
    elif constants.END_TEST_OUTPUT not in log:
        why = "the eval script ended before the tests did"
    else:
        code = grading.parse_test_exit_code(log)
        why = f"the tests ended with {code}, and the log names no test, or none that fails"
    return f"no result: {why}" + (f"; swebench's guess: {guess}" if guess else "")


def _require_known(task: Task, column: str, known: Iterable[str]) -> None:
    value = str(task.harness_row[column])
    if value not in known:
        near = difflib.get_close_matches(value, known, n=1, cutoff=0)
        raise DataError(f"task {task.id}: swebench knows no {column} `{value}`; did you mean `{near[0]}`?")
