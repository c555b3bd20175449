"""`dataset.json` of an evaluation: which instances there are to solve, and where each comes from, for the report."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from agent_r3.config import TasksConfig
from agent_r3.errors import DataError, boundary
from agent_r3.journal import write_whole
from agent_r3.types import Task

_FILE = "dataset.json"


@dataclass(frozen=True, slots=True)
class InstanceInfo:
    """What the report tells instances apart by. `difficulty` is empty where the dataset says none."""

    id: str
    repo: str
    difficulty: str = ""


@dataclass(frozen=True, slots=True)
class _Dataset:
    dataset: str
    split: str
    instances: tuple[InstanceInfo, ...]


_DATASET = TypeAdapter(_Dataset)


def write_dataset(folder: Path, tasks: Iterable[Task], config: TasksConfig) -> None:
    """Write down the instances of this evaluation; those of an earlier call into the same folder stay."""
    instances = dict(read_dataset(folder))
    instances.update((task.id, InstanceInfo(task.id, task.repo, task.difficulty)) for task in tasks)
    content = _Dataset(config.dataset, config.split, tuple(instances.values()))
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / _FILE, json.dumps(asdict(content), indent=1) + "\n")


def read_dataset(folder: Path) -> Mapping[str, InstanceInfo]:
    """{instance id: its facts}, in the dataset's order; empty where the folder has no `dataset.json`.

    Raises DataError for a file that is not ours.
    """
    path = folder / _FILE
    if not path.exists():
        return {}
    with boundary(DataError, f"read {path}", OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
    try:
        instances = _DATASET.validate_python(found).instances
    except ValidationError as exc:
        raise DataError(f"{path} is not of `agent-r3 eval`: {exc.errors()[0]['msg']}") from exc
    return {instance.id: instance for instance in instances}
