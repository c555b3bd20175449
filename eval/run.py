"""`agent-r3 eval CONFIG`: the training episode loop over a dataset, every patch graded, and the report."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from agent_r3.config import Config
from agent_r3.envs.datasets import load_tasks
from agent_r3.errors import DataError, first_failure
from agent_r3.eval.dataset import write_dataset
from agent_r3.eval.episodes import EpisodeRunner
from agent_r3.eval.folder import EvaluationFolder
from agent_r3.eval.gold import gold_failures
from agent_r3.eval.grade_all import INTERRUPTED, open_grading, require_grading
from agent_r3.eval.model import open_model, require_model
from agent_r3.eval.plan import plan
from agent_r3.eval.progress import EvaluationProgress
from agent_r3.eval.records import Key
from agent_r3.eval.report import print_report, write_report
from agent_r3.eval.resume import settle_config
from agent_r3.eval.verdicts import Verdicts, mend_last
from agent_r3.hfconfig import ModelInfo
from agent_r3.process import until_signalled
from agent_r3.tools.toolbox import check_tools
from agent_r3.tracing import tracing
from agent_r3.types import Task


async def evaluate(config: Config, out: Path | None) -> int:
    """Evaluate into `out`, by default `<run.dir>/eval-<run.name>`, going on from what is there. Returns the exit code.

    0 when everything has a verdict, 1 when the infrastructure left some out, 130 when it was interrupted; a further
    call does what is left. Raises UserError for all that can be known before anything is started. `model.path` is a
    folder, or the endpoint's name of the model.
    """
    path = (out or config.run.dir / f"eval-{config.run.name}").resolve()
    checked = preflight(config, path)
    with EvaluationFolder.locked(path) as folder:
        _require_known(folder, checked.tasks)
        settle_config(folder, config)
        write_dataset(path, checked.tasks, config.eval.tasks or config.tasks)
        if await until_signalled(_run(config, folder, checked)):
            print(f"interrupted: {_state(folder, checked.keys)}; the same command goes on")
            return INTERRUPTED
        left_out = missing(folder, checked.keys)
        if left_out.total() < len(checked.keys):
            print_report(write_report(path), path, as_json=False)
        if left_out:
            kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(left_out.items()))
            print(f"{_state(folder, checked.keys)} ({kinds}); the same command tries the others again")
        return 1 if left_out else 0


@dataclass(frozen=True, slots=True)
class Checked:
    """What the preflight found."""

    tasks: tuple[Task, ...]
    samples: int
    model: ModelInfo | None  # None for an endpoint
    engine_log: Path

    @property
    def keys(self) -> list[Key]:
        """Every episode there is to be."""
        return [(task.id, sample) for sample in range(self.samples) for task in self.tasks]


def preflight(config: Config, path: Path) -> Checked:
    """Check tools, tasks, gold patches, model and backend. Raises UserError in one line."""
    check_tools(config.agent)
    tasks = tuple(load_tasks(config.eval.tasks or config.tasks))
    if config.eval.gold is not None:
        gold_failures(config.eval.gold)
    engine_log = path / "logs" / "engine.log"
    model = require_model(config, tasks, engine_log)
    require_grading(config, tasks)
    return Checked(tasks, config.eval.samples, model, engine_log)


async def _run(config: Config, folder: EvaluationFolder, checked: Checked) -> None:
    tasks = {task.id: task for task in checked.tasks}
    work = plan(checked.tasks, checked.samples, config.eval.seed, folder.predictions)
    ungraded = folder.ungraded()
    mend_last(folder)
    if not work and not ungraded:
        return
    with (
        tracing(config.track, "eval", run=config.run.name),
        EvaluationProgress(folder, len(checked.keys)) as progress,
    ):
        progress.say(
            f"{_state(folder, checked.keys)}; {len(work)} to run, {len(ungraded)} more to grade: {folder.path}"
        )
        try:
            async with (
                open_grading(config, at_once=config.grading.concurrency) as (provider, grader),
                asyncio.TaskGroup() as gradings,
            ):
                verdicts = Verdicts(folder, grader, progress, gradings)
                for prediction in ungraded:
                    verdicts.begin(tasks[prediction.instance_id], prediction)
                if work:
                    async with open_model(config, checked.model, checked.engine_log) as model:
                        await EpisodeRunner(config, folder, model, provider, progress, verdicts.begin).run(work)
        except BaseExceptionGroup as failed:
            raise first_failure(failed) from None


def missing(folder: EvaluationFolder, keys: Iterable[Key]) -> Counter[str]:
    """Kind of failure -> how many of `keys` have no verdict for it. Pure."""
    last = {failure.key: failure.kind for failure in folder.failures}
    return Counter(last.get(key, "not begun") for key in keys if not _has_verdict(folder, key))


def _state(folder: EvaluationFolder, keys: Sequence[Key]) -> str:
    return f"{sum(_has_verdict(folder, key) for key in keys)} of {len(keys)} episodes have a verdict"


def _has_verdict(folder: EvaluationFolder, key: Key) -> bool:
    prediction = folder.predictions.get(key)
    return prediction is not None and folder.grade_of(prediction) is not None


def _require_known(folder: EvaluationFolder, tasks: Iterable[Task]) -> None:
    """Raises DataError for predictions of an instance that the dataset has not."""
    known = {task.id for task in tasks}
    for instance_id, _ in folder.predictions:
        if instance_id not in known:
            raise DataError(f"{folder.path} has a prediction for {instance_id}, which the dataset has not any more")
