"""Predictions to their verdicts, beside the episodes that are still going on; the grader bounds how many at a time."""

import asyncio
import time
from dataclasses import replace

from agent_r3.archive import read_info, transcript_path, write_transcript
from agent_r3.envs.sandbox import Grading
from agent_r3.errors import DataError
from agent_r3.eval.folder import EvaluationFolder, episode_id
from agent_r3.eval.grading import grade_prediction
from agent_r3.eval.progress import EvaluationProgress
from agent_r3.eval.records import Failure, Graded, Prediction
from agent_r3.tracing import span
from agent_r3.types import Task

BAD_DATA = "data"  # kind of a failure that the task itself causes, such as an image that nobody has


class Verdicts:
    """Grades in the background; `running` waits for all of it."""

    def __init__(
        self, folder: EvaluationFolder, grader: Grading, progress: EvaluationProgress, running: asyncio.TaskGroup
    ) -> None:
        self._folder = folder
        self._grader = grader
        self._progress = progress
        self._running = running

    def begin(self, task: Task, prediction: Prediction) -> None:
        """Have the prediction graded; the verdict, or the failure, is written down and told."""
        self._running.create_task(self._grade(task, prediction))

    async def _grade(self, task: Task, prediction: Prediction) -> None:
        try:
            with span("grade", task=task.id):
                graded = await grade_prediction(self._folder, task, prediction, self._grader)
        except DataError as exc:
            graded = Failure(*prediction.key, "grading", BAD_DATA, str(exc), 1, time.time())
            self._folder.add_failure(graded)
        if isinstance(graded, Failure):
            self._progress.failed(graded)
            return
        # No await since the verdict was written: a killed run leaves at most the last verdict out of its transcript.
        add_verdict(self._folder, graded)
        self._progress.graded(prediction, graded)


def add_verdict(folder: EvaluationFolder, graded: Graded) -> None:
    """Write the verdict into the episode's transcript, where there is one."""
    path = transcript_path(folder.path, episode_id(graded.key))
    if not path.is_file():
        return
    info = replace(
        read_info(path),
        reward=graded.reward,
        reason=graded.reason,
        outcome=graded.outcome,
        left_out=graded.tests_touched,
        flaky=graded.flaky,
    )
    write_transcript(folder.path, info)


def mend_last(folder: EvaluationFolder) -> None:
    """Write the last verdict into its transcript, which a killed run may not have come to."""
    if folder.grades:
        add_verdict(folder, list(folder.grades.values())[-1])
