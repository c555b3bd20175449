"""A prediction to its verdict: graded once, in a fresh sandbox, its log kept."""

import asyncio
import time
from pathlib import Path

from agent_r3.envs.sandbox import Grading
from agent_r3.errors import InfraError
from agent_r3.eval.folder import EvaluationFolder, digest
from agent_r3.eval.records import Failure, Graded, Prediction, Verdict
from agent_r3.eval.touched import tests_touched
from agent_r3.types import Grade, Source, Task


async def grade_prediction(
    folder: EvaluationFolder, task: Task, prediction: Prediction, grader: Grading
) -> Graded | Failure:
    """Grade and write down. An infrastructure failure, after the grader's own retries, is written down as one.

    Raises DataError for a task that cannot be graded.
    """
    if prediction.empty and task.source is not Source.HARBOR:  # a Harbor task may ask for nothing in its repository
        graded = Graded(*prediction.key, digest(prediction), "empty_patch", 0.0, None, "the patch is empty", 0.0)
        folder.add_grade(graded)
        return graded
    try:
        grade = await grader.grade(task, _for_git(prediction.patch, task))
    except InfraError as exc:
        failure = Failure(*prediction.key, "grading", exc.kind, str(exc), 1, time.time())
        folder.add_failure(failure)
        return failure
    log = None
    if grade.log:
        path = folder.log_path(prediction.key)
        await asyncio.to_thread(_write, path, grade.log)
        log = str(path.relative_to(folder.path))
    graded = Graded(
        *prediction.key,
        digest(prediction),
        verdict_of(grade),
        grade.reward,
        grade.outcome,
        grade.reason,
        round(grade.seconds, 3),
        tests_passed=sum(grade.statuses.get(name) == status for name, status in task.expected.items()),
        tests=len(task.expected),
        log=log,
        flaky=grade.flaky,
        tests_touched=tests_touched(prediction.patch, task.test_files),
    )
    folder.add_grade(graded)
    return graded


def _for_git(patch: bytes, task: Task) -> bytes:
    """The patch with the end of its last line, which many agents strip and `git apply` insists on.

    SWE-bench's own harness gets it as it is: it has other ways to apply one.
    """
    whole = task.source is Source.SWE_BENCH or not patch.strip() or patch.endswith(b"\n")
    return patch if whole else patch + b"\n"


def verdict_of(grade: Grade) -> Verdict:
    match grade.outcome:
        case "passed":
            return "resolved"
        case "failed":
            return "failed"
        case "unapplied":
            return "not_applied"
        case _:
            return "error"


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
