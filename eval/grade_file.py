"""`agent-r3 eval grade`: anyone's predictions file, graded into a folder."""

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from agent_r3.config import Config, TasksConfig, dump_config
from agent_r3.envs.datasets import load_tasks
from agent_r3.errors import DataError, UserError, boundary
from agent_r3.eval.dataset import write_dataset
from agent_r3.eval.folder import EvaluationFolder
from agent_r3.eval.grade_all import grade_into, require_grading
from agent_r3.eval.predictions import read_predictions
from agent_r3.eval.records import Prediction
from agent_r3.journal import write_whole
from agent_r3.types import Task

_CLOSE = 0.6  # difflib's ratio from which an id is offered


async def grade_file(predictions: Path, config: Config, out: Path, *, at_once: int) -> int:
    """Grade the file's predictions that have no verdict in `out` yet, and write the report. Returns the exit code.

    Raises UserError for all that can be known before anything is written or started.
    """
    found = read_predictions(predictions)
    tasks = {task.id: task for task in load_tasks(config.tasks)}
    chosen = _chosen(found, config.tasks, predictions)
    _require_known(chosen, tasks, config.tasks, predictions)
    return await grade_predictions(chosen, tasks, config, out, at_once=at_once)


async def grade_predictions(
    predictions: Sequence[Prediction],
    tasks: Mapping[str, Task],
    config: Config,
    out: Path,
    *,
    at_once: int,
    then: Callable[[], None] = lambda: None,
) -> int:
    """As `grade_file`, for predictions of `tasks`; `then` is called after the report is written."""
    there = EvaluationFolder(out)
    _new(there, predictions)
    ungraded = [prediction for prediction in predictions if there.grade_of(prediction) is None]
    require_grading(config, [tasks[task_id] for task_id in dict.fromkeys(one.instance_id for one in ungraded)])
    make_folder(out)
    with EvaluationFolder.locked(out) as folder:
        of_a_run = any(one.episode for one in folder.predictions.values())
        if not of_a_run:  # else config.yaml says how the episodes were run
            _write_config(out, config, predictions)
        for prediction in _new(folder, predictions):
            folder.add_prediction(prediction)
        write_dataset(out, tasks.values(), config.tasks)
        return await grade_into(folder, tasks, predictions, config, at_once=at_once, then=then)


def make_folder(out: Path) -> None:
    """Raises UserError where it cannot be made."""
    with boundary(UserError, f"make the folder {out}", OSError):
        out.mkdir(parents=True, exist_ok=True)


def _write_config(out: Path, config: Config, predictions: Sequence[Prediction]) -> None:
    """config.yaml, with model and samples as the predictions say."""
    model = ", ".join(dict.fromkeys(prediction.model_name_or_path for prediction in predictions))
    samples = max(prediction.sample for prediction in predictions) + 1
    described = {
        "model": config.model.model_copy(update={"path": model}),
        "eval": config.eval.model_copy(update={"samples": samples}),
    }
    write_whole(out / "config.yaml", dump_config(config.model_copy(update=described)))


def _chosen(found: Sequence[Prediction], config: TasksConfig, path: Path) -> list[Prediction]:
    """Those that `tasks.include` and `tasks.exclude` leave in."""
    chosen = [
        one
        for one in found
        if (not config.include or one.instance_id in config.include) and one.instance_id not in config.exclude
    ]
    if not chosen:
        raise DataError(f"{path}: tasks.include and tasks.exclude leave none of its {len(found)} predictions")
    if left_out := len(found) - len(chosen):
        print(f"{left_out} of {len(found)} predictions are not graded: tasks.include and tasks.exclude leave them out")
    return chosen


def _require_known(
    predictions: Sequence[Prediction], tasks: Mapping[str, Task], config: TasksConfig, path: Path
) -> None:
    unknown = [prediction.instance_id for prediction in predictions if prediction.instance_id not in tasks]
    if unknown:
        near = difflib.get_close_matches(unknown[0], tasks, n=1, cutoff=_CLOSE)
        hint = f"did you mean `{near[0]}`?" if near else "is it of another dataset?"
        raise DataError(
            f"{path}: {len(unknown)} of {len(predictions)} predictions are of instances that {config.dataset} does "
            f"not have, first `{unknown[0]}`; {hint}"
        )


def _new(folder: EvaluationFolder, predictions: Sequence[Prediction]) -> list[Prediction]:
    """Those that the folder has not yet. Raises UserError where it holds another agent's, or another patch."""
    require_agent(folder, {prediction.model_name_or_path for prediction in predictions})
    new = []
    for prediction in predictions:
        known = folder.predictions.get(prediction.key)
        if known is None:
            new.append(prediction)
        elif known.model_patch != prediction.model_patch:
            sample = f", sample {prediction.sample}" if prediction.sample else ""
            raise UserError(
                f"{folder.path} holds another patch of `{prediction.instance_id}`{sample}; choose another --out"
            )
    return new


def require_agent(folder: EvaluationFolder, models: Collection[str]) -> None:
    """Raises UserError where the folder holds predictions, and none of them is of `models`."""
    have = {prediction.model_name_or_path for prediction in folder.predictions.values()}
    if have and have.isdisjoint(models):
        raise UserError(
            f"{folder.path} holds predictions of `{min(have)}`, these are of `{min(models)}`; choose another --out"
        )
