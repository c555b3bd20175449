"""Predictions files for a dataset of built offline tasks."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from agent_r3.envs.offline import offline_spec_path, rows_path
from agent_r3.types import Task
from tests.support.tasks import MISTUNE, PATHSPEC

LONG = "mistune/" * 40 + "3.1.1"  # an id that no file can be named after


@pytest.fixture
def offline_rows(tmp_path: Path, built_tasks: Mapping[str, Task]) -> Path:
    """The two built tasks as rows, and one of them once more under a long id."""
    found = rows_path(offline_spec_path("offline"))
    rows = {}
    for line in found.read_text().splitlines():
        row = json.loads(line)
        rows[row["instance_id"]] = row | {"hidden_tests_dir": str(found.parent / row["hidden_tests_dir"])}
    path = tmp_path / "rows.jsonl"
    write_lines(path, rows[PATHSPEC], rows[MISTUNE], rows[MISTUNE] | {"instance_id": LONG})
    return path


@pytest.fixture
def gold_patches(built_tasks: Mapping[str, Task]) -> dict[str, str]:
    """The gold patches of `offline_rows`."""
    return {task_id: task.gold_patch for task_id, task in built_tasks.items()} | {LONG: built_tasks[MISTUNE].gold_patch}


@pytest.fixture
def no_docker(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From then on nothing can be started."""

    def leave() -> None:
        monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
        monkeypatch.setenv("PATH", "")

    return leave


def write_lines(path: Path, *entries: Mapping[str, Any], end: str = "\n", mark: str = "") -> Path:
    path.write_bytes((mark + "".join(json.dumps(entry) + end for entry in entries)).encode())
    return path


def entry(instance_id: str, patch: str | None, sample: int = 0, model: str = "someone") -> dict[str, Any]:
    return {"instance_id": instance_id, "model_name_or_path": model, "model_patch": patch, "sample": sample}


def verdicts(out: Path) -> dict[tuple[str, int], tuple[str, int]]:
    """{(instance, sample): (verdict, tests passed)} of an evaluation's folder, each of them graded exactly once."""
    lines = [json.loads(line) for line in (out / "grades.jsonl").read_text().splitlines()]
    found = {(line["instance_id"], line["sample"]): (line["verdict"], line["tests_passed"]) for line in lines}
    assert len(found) == len(lines)
    return found
