"""What swebench must find in a row, and what it reads in a log; no containers."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from swebench.task.checks import expected_image

from agent_r3.envs.grading import require_gradable
from agent_r3.envs.rows import Origin, task_from_row
from agent_r3.envs.swe_harness import UnreadableError, report_of, spec_of, why_unread
from agent_r3.errors import DataError
from tests.support.swe_rows import bench_row, row_of_5x

ORIGIN = Origin("rows.jsonl", 1)


def test_a_row_of_5x_can_be_graded() -> None:
    require_gradable(task_from_row(row_of_5x(), ORIGIN))


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (
            bench_row(),
            "its row has no `log_parser`, no `eval_script`, so that swebench 5 cannot grade it; "
            "use a dataset in the 5.x format, such as SWE-bench/SWE-bench_Verified",
        ),
        (row_of_5x(version=None), "its row has no `version`, so that"),
        (row_of_5x(log_parser="parse_log_djago"), "swebench knows no log_parser `parse_log_djago`; did you mean "),
        (row_of_5x(eval_type="fail_olny"), "swebench knows no eval_type `fail_olny`; did you mean `fail_only`?"),
        (row_of_5x(eval_script="pytest"), "its `eval_script` never prints `>>>>> Start Test Output`"),
        (row_of_5x(image_assets='{"test_patch": [{"path": "a.png"}]}'), r"its tests need pictures (`image_assets`)"),
    ],
)
def test_a_row_that_cannot_be_graded_is_refused_in_one_line(row: dict[str, Any], complaint: str) -> None:
    with pytest.raises(DataError, match=re.escape(f"task django__django-11099: {complaint}")) as caught:
        require_gradable(task_from_row(row, ORIGIN))
    assert "\n" not in str(caught.value)


def test_a_row_without_image_and_eval_type_gets_those_that_swebench_s_own_rules_give() -> None:
    for repo, kind in (("django/django", "pass_and_fail"), ("markedjs/marked", "fail_only")):
        spec = spec_of(task_from_row(row_of_5x(repo=repo, image=None, eval_type=None), ORIGIN))
        assert (spec.eval_type, spec.image) == (kind, expected_image("django__django-11099"))


_LOG = ">>>>> Start Test Output\n{results}\n>>>>> End Test Output\n>>>>> Test Exit Code: {code}\n"
_ROW = row_of_5x(log_parser="parse_log_pytest", FAIL_TO_PASS=["a"], PASS_TO_PASS=["b"])


@pytest.mark.parametrize(
    ("results", "code", "statuses"),
    [
        ("PASSED a\nPASSED b", 0, {"a": "PASSED", "b": "PASSED"}),
        ("PASSED a\nFAILED b - why", 1, {"a": "PASSED", "b": "FAILED"}),
        ("PASSED a", 0, {"a": "PASSED", "b": "FAILED"}),
        ("SKIPPED a\nSKIPPED b", 0, {"a": "FAILED", "b": "PASSED"}),
        ("PASSED a\r\nPASSED b\r\n\ufffd", 0, {"a": "PASSED", "b": "PASSED"}),
    ],
)
def test_statuses_and_verdict_are_read_by_swebench(results: str, code: int, statuses: dict[str, str]) -> None:
    report = report_of(spec_of(task_from_row(_ROW, ORIGIN)), _LOG.format(results=results, code=code))
    assert (report.found, report.statuses) == (True, statuses)
    assert report.resolved == (set(statuses.values()) == {"PASSED"})


@pytest.mark.parametrize(
    ("log", "why"),
    [
        ("bash: /opt/miniconda3/bin/activate: No such file\n", "the eval script ended before the tests began"),
        (
            ">>>>> Start Test Output\nKilled\n",
            "the eval script ended before the tests did; swebench's guess: out_of_memory",
        ),
        (
            _LOG.format(results="PASSED a\nPASSED b", code=1),
            "the tests ended with 1, and the log names no test, or none that fails",
        ),
        (
            _LOG.format(results="no tests ran in 0.1s", code=5),
            "the tests ended with 5, and the log names no test, or none that fails; "
            "swebench's guess: no_tests_collected",
        ),
    ],
)
def test_why_no_result_can_be_read_is_told(log: str, why: str) -> None:
    report = report_of(spec_of(task_from_row(_ROW, ORIGIN)), log)
    assert (report.found, report.resolved, report.statuses) == (False, False, {})
    assert why_unread(log, report.guess) == f"no result: {why}"


def test_a_parser_that_fails_is_no_failure_of_ours() -> None:
    spec = spec_of(task_from_row(row_of_5x(log_parser="parse_log_jekyll"), ORIGIN))
    with pytest.raises(UnreadableError, match="swebench's parse_log_jekyll failed: ValueError"):
        report_of(spec, _LOG.format(results="", code=1))


def test_without_swebench_the_extra_is_named_in_one_line() -> None:
    said = _in_a_process("import sys; sys.modules['swebench'] = None", "print(repr(caught))")
    assert said.startswith("UserError") and "pip install 'agent-r3[eval]'" in said and "\\n" not in said


def test_swebench_takes_no_variables_from_a_dotenv_file(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("FROM_DOTENV=1\n")
    assert _in_a_process("", "import os; print('FROM_DOTENV' in os.environ)", cwd=tmp_path) == "False"


def _in_a_process(before: str, after: str, cwd: Path | None = None) -> str:
    lines = (
        before,
        "from agent_r3.envs.swe_harness import load_harness",
        "caught = None",
        "try: load_harness()",
        "except Exception as exc: caught = exc",
        after,
    )
    command = [sys.executable, "-c", "\n".join(lines)]
    return subprocess.check_output(command, text=True, cwd=cwd, stderr=subprocess.STDOUT).strip()
