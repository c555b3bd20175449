"""Many predictions graded together: what is checked before, the progress, and what is said at the end."""

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType

from rich.console import Console

from agent_r3.config import Config
from agent_r3.envs.backend import Backend, open_backend, require_served
from agent_r3.envs.sandbox import Grading
from agent_r3.errors import DataError
from agent_r3.eval.folder import EvaluationFolder
from agent_r3.eval.grading import grade_prediction
from agent_r3.eval.records import Failure, Graded, Prediction
from agent_r3.eval.wording import counted
from agent_r3.process import until_signalled
from agent_r3.progress import ProgressLines
from agent_r3.types import Task

INTERRUPTED = 130  # exit code


class Gradings(ProgressLines):
    """What has come of the gradings of one call, shown as it comes: a bar on a terminal, and a line for each."""

    def __init__(self, total: int, console: Console | None = None) -> None:
        self.failures: list[Failure] = []
        self.unfit: list[DataError] = []  # tasks that turned out not to be gradable
        self._total = total
        self._done = 0
        super().__init__(console)
        self._task = self._bar.add_task("grading", total=total)

    def __enter__(self) -> "Gradings":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def add(self, prediction: Prediction, result: Graded | Failure | DataError) -> None:
        """One more is done."""
        match result:
            case Failure():
                self.failures.append(result)
                said = f"not graded, {result.kind}: {result.error}"
            case DataError():
                self.unfit.append(result)
                said = f"cannot be graded: {result}"
            case Graded():
                said = f"{result.verdict}: {result.reason}"
        self._done += 1
        self._bar.update(self._task, completed=self._done)
        name = prediction.instance_id + (f", sample {prediction.sample}" if prediction.sample else "")
        self.say(f"{self._done}/{self._total} {name}: {said}")


def require_grading(config: Config, tasks: Sequence[Task]) -> None:
    """Raises UserError for all that can be known before anything is started."""
    if tasks:
        require_served(config.sandbox, tasks)


@asynccontextmanager
async def open_grading(config: Config, *, at_once: int) -> AsyncIterator[Backend]:
    """Sandboxes and grades; each patch is graded on its own. Left-over sandboxes of this run are removed first."""
    grading = config.grading.model_copy(update={"concurrency": at_once, "reuse": False})
    if config.sandbox.broker is None:
        from agent_r3.envs.local import reap

        await asyncio.to_thread(reap, config.sandbox, config.run.name)
    async with open_backend(config.sandbox, grading, run=config.run.name, owner="eval") as backend:
        yield backend


async def grade_all(
    folder: EvaluationFolder,
    tasks: Mapping[str, Task],
    predictions: Sequence[Prediction],
    grader: Grading,
    gradings: Gradings,
    *,
    at_once: int,
) -> None:
    """Grade and write down, at most `at_once` together. A task that cannot be graded does not keep others from it."""
    places = asyncio.Semaphore(at_once)

    async def one(prediction: Prediction) -> None:
        async with places:
            try:
                result: Graded | Failure | DataError = await grade_prediction(
                    folder, tasks[prediction.instance_id], prediction, grader
                )
            except DataError as exc:
                result = exc
        gradings.add(prediction, result)

    running = [asyncio.create_task(one(prediction)) for prediction in predictions]
    try:
        await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def grade_into(
    folder: EvaluationFolder,
    tasks: Mapping[str, Task],
    predictions: Sequence[Prediction],
    config: Config,
    *,
    at_once: int,
    then: Callable[[], None] = lambda: None,
) -> int:
    """Grade what has no verdict yet, write the report, call `then`. Returns the exit code.

    0; 1 when the infrastructure failed for some, which the next call grades; 130 after SIGINT or SIGTERM. Raises
    DataError at the end when tasks turned out not to be gradable.
    """
    from agent_r3.eval.report import print_report, write_report

    ungraded = [prediction for prediction in predictions if folder.grade_of(prediction) is None]
    if have := len(predictions) - len(ungraded):
        print(f"{have} of {len(predictions)} predictions have a verdict in {folder.path}")
    with Gradings(len(ungraded)) as gradings:

        async def work() -> None:
            async with open_grading(config, at_once=at_once) as backend:
                await grade_all(folder, tasks, ungraded, backend.grader, gradings, at_once=at_once)

        if ungraded and await until_signalled(work()):
            return interrupted(folder)
    if folder.grades:
        print_report(write_report(folder.path), folder.path, as_json=False)
    then()
    return _left_over(gradings)


def interrupted(folder: EvaluationFolder) -> int:
    left = len(folder.ungraded())
    what = f"{counted(left, 'prediction')} in {folder.path} left to grade"
    print(f"interrupted with {what}; the same command goes on", flush=True)
    return INTERRUPTED


def _left_over(gradings: Gradings) -> int:
    """Say what got no verdict. Returns the exit code; raises DataError."""
    if gradings.failures:
        kinds = Counter(failure.kind for failure in gradings.failures)
        listed = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())
        what = f"the infrastructure failed for {counted(len(gradings.failures), 'prediction')} ({listed})"
        print(f"agent-r3: {what}; the same command tries again", file=sys.stderr)
    if gradings.unfit:
        others = f" (and {len(gradings.unfit) - 1} more)" if len(gradings.unfit) > 1 else ""
        raise DataError(f"{gradings.unfit[0]}{others}")
    return 1 if gradings.failures else 0
