"""`agent-r3 eval gold`: the gold patches of a dataset, graded as predictions."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from agent_r3.config import Config
from agent_r3.envs.datasets import load_tasks
from agent_r3.envs.harbor_grading import gold_patch
from agent_r3.envs.sandbox import SandboxProvider
from agent_r3.errors import DataError, InfraError
from agent_r3.eval.folder import EvaluationFolder, digest
from agent_r3.eval.gold import MODEL, gold_failures, gold_unknown
from agent_r3.eval.grade_all import INTERRUPTED, interrupted, open_grading, require_grading
from agent_r3.eval.grade_file import grade_predictions, make_folder, require_agent
from agent_r3.eval.records import Failure, Graded, Prediction
from agent_r3.eval.wording import listed
from agent_r3.process import until_signalled
from agent_r3.types import Task


async def grade_gold(config: Config, out: Path, *, at_once: int) -> int:
    """Grade the gold patch of every task that has no verdict in `out` yet. Returns the exit code, as `grade_file`.

    A gold patch that fails is a finding, told in a line, and no failure of the command.
    """
    tasks = {task.id: task for task in load_tasks(config.tasks)}
    there = EvaluationFolder(out)
    require_agent(there, {MODEL})
    unsolved = [
        task for task in tasks.values() if task.solution_dir is not None and (task.id, 0) not in there.predictions
    ]
    if unsolved and not await _solve(unsolved, config, out, at_once=at_once):
        return INTERRUPTED
    predictions = _predictions(tasks, EvaluationFolder(out))
    if not predictions:
        print(f"no solution of {config.tasks.dataset} could be run: the infrastructure failed; {out} says how")
        return 1
    code = await grade_predictions(predictions, tasks, config, out, at_once=at_once, then=lambda: _say(out, len(tasks)))
    return code or int(len(predictions) < len(tasks))


def _say(out: Path, total: int) -> None:
    """Which gold patches fail, and which have no verdict."""
    failed, unknown = gold_failures(out), gold_unknown(out)
    print(f"{len(failed)} of {total} gold patches do not resolve their instance here" + ":" * bool(failed))
    for instance_id, reason in failed.items():
        print(f"  {instance_id}: {reason}")
    if unknown:
        print(f"{len(unknown)} have no verdict yet: {listed(unknown)}", flush=True)


def _predictions(tasks: Mapping[str, Task], there: EvaluationFolder) -> list[Prediction]:
    """Gold patches of rows, and those that solutions have made."""
    rows = {
        task.id: Prediction(task.id, MODEL, task.gold_patch) for task in tasks.values() if task.solution_dir is None
    }
    made = {one.instance_id: one for one in there.predictions.values() if one.instance_id not in rows}
    return [prediction for task_id in tasks if (prediction := (rows | made).get(task_id)) is not None]


async def _solve(tasks: Sequence[Task], config: Config, out: Path, *, at_once: int) -> bool:
    """Run the solutions of Harbor tasks, each in an agent's sandbox; their changes become predictions.

    A solution that fails gets its verdict at once. False when a signal ended it.
    """
    require_grading(config, tasks)
    make_folder(out)
    with EvaluationFolder.locked(out) as folder:
        places = asyncio.Semaphore(at_once)

        async def one(task: Task, provider: SandboxProvider) -> None:
            async with places:
                await _solve_one(task, folder, provider)

        async def work() -> None:
            async with open_grading(config, at_once=at_once) as backend, asyncio.TaskGroup() as running:
                for task in tasks:
                    running.create_task(one(task, backend.provider))

        if await until_signalled(work()):
            interrupted(folder)
            return False
    return True


async def _solve_one(task: Task, folder: EvaluationFolder, provider: SandboxProvider) -> None:
    try:
        patch = await gold_patch(provider, task)
    except InfraError as exc:
        folder.add_failure(Failure(task.id, 0, "episode", exc.kind, str(exc), 1, time.time()))
        return
    except DataError as exc:
        empty = Prediction(task.id, MODEL, "")
        folder.add_prediction(empty)
        folder.add_grade(Graded(task.id, 0, digest(empty), "error", 0.0, None, str(exc), 0.0))
        return
    folder.add_prediction(Prediction(task.id, MODEL, patch.decode(errors="surrogateescape")))
