"""Task datasets: our offline tasks, folders of Harbor tasks, files of rows (parquet, JSON, JSONL) and hub ids."""

import difflib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog

from agent_r3.config import TasksConfig
from agent_r3.envs.harbor import harbor_tasks
from agent_r3.envs.offline import built_rows, is_offline_spec, offline_spec_path, read_spec
from agent_r3.envs.rows import COLUMNS, Origin, tasks_from_rows
from agent_r3.envs.verify import known_verifications
from agent_r3.errors import DataError, boundary
from agent_r3.types import Task

log = structlog.get_logger(__name__)

_HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$")
_SUFFIXES = (".parquet", ".json", ".jsonl")


def load_tasks(config: TasksConfig) -> list[Task]:
    """The dataset's tasks in its order, after include and exclude.

    Raises DataError for a file that is not there, a row that is malformed, a duplicate or an unknown id.
    """
    tasks = _tasks(config)
    known: dict[str, Task] = {}
    for task in tasks:
        if task.id in known:
            raise DataError(f"{config.dataset}: task id {task.id} stands in it twice")
        known[task.id] = task
    _require_known(config.include, known, "tasks.include", config.dataset)
    _require_known(config.exclude, known, "tasks.exclude", config.dataset)
    chosen = [
        task for task in tasks if (not config.include or task.id in config.include) and task.id not in config.exclude
    ]
    if not chosen:
        raise DataError(f"{config.dataset}: no task is left after tasks.include and tasks.exclude")
    return chosen if config.verified is None else _only_sound(chosen, config.verified)


def join_tasks(tasks: Sequence[Task], held: Sequence[Task]) -> list[Task]:
    """`tasks`, then those of `held` that are not among them. Raises DataError where one id stands for two tasks."""
    known = {task.id: task for task in tasks}
    for task in held:
        if replace(known.setdefault(task.id, task), dataset=task.dataset) != task:
            raise DataError(
                f"task id {task.id} stands for one task in {known[task.id].dataset} (tasks) "
                f"and for another in {task.dataset} (eval.tasks); leave one of them out"
            )
    return list(known.values())


def _only_sound(tasks: list[Task], path: Path) -> list[Task]:
    """The tasks that `agent-r3 tasks verify --out` called sound; how many are left out is logged."""
    known = known_verifications(tasks, path)
    sound = [task for task in tasks if task.id in known and known[task.id].verdict == "sound"]
    left_out = Counter(known[task.id].verdict if task.id in known else "not verified" for task in tasks)
    del left_out["sound"]
    if left_out:
        log.warning("unsound tasks left out", file=str(path), **{k.replace(" ", "_"): n for k, n in left_out.items()})
    if not sound:
        raise DataError(f"tasks.verified: {path} calls none of the {len(tasks)} chosen tasks sound")
    return sound


def _tasks(config: TasksConfig) -> list[Task]:
    """Every task of the dataset."""
    folder = Path(config.dataset)
    if folder.is_dir() and config.dataset != "offline":
        return harbor_tasks(folder)
    spec = _task_file(config.dataset)
    if spec:
        _require_built(spec, config)
    return list(tasks_from_rows(_file_rows(built_rows(spec), "offline") if spec else _rows(config)))


def _require_known(ids: Iterable[str], known: Mapping[str, Task], key: str, dataset: str) -> None:
    for task_id in ids:
        if task_id not in known:
            near = difflib.get_close_matches(task_id, known, n=1, cutoff=0.4)
            hint = f"did you mean `{near[0]}`?" if near else f"it has {len(known)} others"
            raise DataError(f"{key}: {dataset} has no task `{task_id}`; {hint}")


def _task_file(dataset: str) -> Path | None:
    """The task file whose built rows are the dataset; None for a dataset that holds rows itself."""
    path = offline_spec_path(dataset)
    return path if dataset == "offline" or (path.is_file() and is_offline_spec(path)) else None


def _require_built(spec: Path, config: TasksConfig) -> None:
    """Raises DataError when a wanted task of a task file was not built: a smaller dataset must be asked for."""
    with built_rows(spec).open(encoding="utf-8") as lines:
        built = {json.loads(line)["instance_id"] for line in lines if line.strip()}
    known = [task.task_id for task in read_spec(spec)]
    wanted = [task_id for task_id in config.include or known if task_id not in config.exclude]
    missing = [task_id for task_id in wanted if task_id in known and task_id not in built]
    if missing:
        raise DataError(
            f"{len(missing)} of {len(wanted)} tasks of {config.dataset} are not built here "
            f"({', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}); "
            f"run `agent-r3 tasks build {config.dataset}`, or name others in tasks.include"
        )


def _rows(config: TasksConfig) -> Iterator[tuple[Mapping[str, Any], Origin]]:
    path = Path(config.dataset)
    if config.dataset.endswith(_SUFFIXES):
        if not path.is_file():
            raise DataError(f"dataset file {path} is not there")
        yield from _file_rows(path, path.name)
    elif _HUB_ID.match(config.dataset):
        yield from _hub_rows(config.dataset, config.split)
    else:
        raise DataError(
            f"tasks.dataset {config.dataset!r} is neither `offline`, a {'/'.join(_SUFFIXES)} file, "
            "a folder of Harbor tasks nor a hub id (owner/name)"
        )


def _file_rows(path: Path, dataset: str) -> Iterator[tuple[Mapping[str, Any], Origin]]:
    readers = {".parquet": _parquet, ".json": _json, ".jsonl": _jsonl}
    for number, row in readers[path.suffix](path):
        if not isinstance(row, Mapping):
            raise DataError(f"{path}: row {number}: must be an object, found {type(row).__name__}")
        yield row, Origin(str(path), number, path.parent.resolve(), dataset)


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with boundary(DataError, f"read {path} as parquet", pa.ArrowException, OSError), pq.ParquetFile(path) as file:
        columns = [name for name in file.schema_arrow.names if name in COLUMNS]
        number = 0
        for batch in file.iter_batches(batch_size=64, columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield number, row


def _json(path: Path) -> Iterator[tuple[int, Any]]:
    with boundary(DataError, f"read {path} as JSON", json.JSONDecodeError, UnicodeDecodeError, OSError):
        rows = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(rows, list):
        raise DataError(
            f"{path}: must hold a list of rows, or offline tasks under `tasks`; found {type(rows).__name__}"
        )
    yield from enumerate(rows, start=1)


def _jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    number = 0
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                number += 1
                with boundary(DataError, f"{path}: row {number} is not JSON", json.JSONDecodeError, UnicodeDecodeError):
                    row = json.loads(line)
                yield number, row


def _hub_rows(name: str, split: str) -> Iterator[tuple[Mapping[str, Any], Origin]]:
    try:
        import datasets
        import httpx
    except ImportError as exc:
        raise DataError(f"hub dataset {name} needs the `datasets` package: pip install datasets") from exc

    # Hub errors are OSErrors (no network, no such dataset), ValueErrors (no such split) or httpx's own.
    with boundary(DataError, f"load {name} ({split}) from the hub", OSError, ValueError, RuntimeError, httpx.HTTPError):
        rows = datasets.load_dataset(name, split=split)
    rows = rows.select_columns([column for column in rows.column_names if column in COLUMNS])
    for number, row in enumerate(rows, start=1):
        yield row, Origin(f"{name} ({split})", number)
