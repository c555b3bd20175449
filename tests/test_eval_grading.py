"""From a grade to a verdict on disk, and what is said of it."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from agent_r3.envs.sandbox import Grading
from agent_r3.errors import DataError, GradingError
from agent_r3.eval.folder import EvaluationFolder
from agent_r3.eval.grade_all import Gradings
from agent_r3.eval.grading import grade_prediction
from agent_r3.eval.records import Failure, Graded, Prediction
from agent_r3.types import Grade, Outcome, Task
from tests.support.docker import make_task
from tests.support.predictions import LONG


class Scripted(Grading):
    """Gives this grade, or raises this failure."""

    def __init__(self, grade: Grade | Exception) -> None:
        self._grade = grade

    async def grade(self, task: Task, patch: bytes) -> Grade:
        if isinstance(self._grade, Exception):
            raise self._grade
        return self._grade


@pytest.mark.parametrize("instance_id", ["a", LONG, "../../etc/passwd", "\u00e9 .."])
async def test_the_log_of_a_grading_is_kept_below_the_folder_whatever_the_id(tmp_path: Path, instance_id: str) -> None:
    folder = EvaluationFolder(tmp_path / "out")
    prediction = Prediction(instance_id, "m", "diff", 2)
    grade = Grade(1.0, {}, "all", 1.0, outcome="passed", log=b"\xff log\n")
    graded = await grade_prediction(folder, make_task("image"), prediction, Scripted(grade))
    assert isinstance(graded, Graded) and graded.log is not None and graded.verdict == "resolved"
    path = (folder.path / graded.log).resolve()
    assert path.read_bytes() == b"\xff log\n" and path.is_relative_to(folder.path.resolve())
    assert EvaluationFolder(folder.path).grade_of(prediction) == graded


@pytest.mark.parametrize(
    ("outcome", "verdict"),
    [
        ("failed", "failed"),
        ("unapplied", "not_applied"),
        ("too_large", "error"),
        ("timeout", "error"),
        ("ended_early", "error"),
        ("tampered", "error"),
    ],
)
async def test_every_outcome_has_its_verdict(tmp_path: Path, outcome: Outcome, verdict: str) -> None:
    folder, prediction = EvaluationFolder(tmp_path), Prediction("a", "m", "diff")
    graded = await grade_prediction(
        folder, make_task("i"), prediction, Scripted(Grade(0.0, {}, "r", 1.0, outcome=outcome))
    )
    assert isinstance(graded, Graded) and (graded.verdict, graded.outcome) == (verdict, outcome)


async def test_a_failed_grading_is_written_down_as_a_failure(tmp_path: Path) -> None:
    folder, prediction = EvaluationFolder(tmp_path), Prediction("a", "m", "diff")
    failure = await grade_prediction(folder, make_task("i"), prediction, Scripted(GradingError("gone")))
    assert isinstance(failure, Failure) and failure.kind == "grading"
    again = EvaluationFolder(tmp_path)
    assert again.failures == [failure] and again.grades == {} and again.predictions == {}


def test_every_grading_is_a_line_and_what_failed_is_kept() -> None:
    text = io.StringIO()
    prediction = Prediction("a[b]", "m", "diff", 1)
    failure = Failure("a[b]", 1, "grading", "docker", "gone", 1)
    unfit = DataError("no tests")
    with Gradings(3, Console(file=text, width=40)) as gradings:
        gradings.add(prediction, Graded("a[b]", 1, "", "failed", 0.0, "failed", "2 of 3 differ: " + "x" * 60, 1.0))
        gradings.add(prediction, failure)
        gradings.add(prediction, unfit)
    assert (gradings.failures, gradings.unfit) == ([failure], [unfit])
    assert [line.partition("] ")[2] for line in text.getvalue().splitlines()] == [
        f"1/3 a[b], sample 1: failed: 2 of 3 differ: {'x' * 60}",
        "2/3 a[b], sample 1: not graded, docker: gone",
        "3/3 a[b], sample 1: cannot be graded: no tests",
    ]
