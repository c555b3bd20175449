"""Datasets from files, task files and the hub; include, exclude, duplicates."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agent_r3.config import TasksConfig
from agent_r3.envs.datasets import load_tasks
from agent_r3.envs.offline import OfflineTask, offline_spec_path, read_spec, rows_path
from agent_r3.errors import DataError, UserError
from tests.support.r2e_rows import r2e_row

ROWS = [r2e_row(commit_hash=digit * 40) for digit in "abc"]
IDS = [f"tornado__{digit * 12}" for digit in "abc"]


def _write(path: Path, rows: list[dict[str, Any]]) -> str:
    match path.suffix:
        case ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        case ".json":
            path.write_text(json.dumps(rows))
        case ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("suffix", [".parquet", ".json", ".jsonl"])
def test_every_file_format_gives_the_same_tasks_in_the_files_order(tmp_path: Path, suffix: str) -> None:
    tasks = load_tasks(TasksConfig(dataset=_write(tmp_path / f"rows{suffix}", ROWS)))
    assert [task.id for task in tasks] == IDS
    assert {task.dataset for task in tasks} == {f"rows{suffix}"}
    assert tasks[0].problem_statement == "It is 1, not 2."


@pytest.mark.parametrize("suffix", [".parquet", ".json", ".jsonl"])
def test_a_missing_column_is_told_with_the_file_and_the_row(tmp_path: Path, suffix: str) -> None:
    rows = [*ROWS[:1], {key: value for key, value in ROWS[1].items() if key != "docker_image"}]
    dataset = _write(tmp_path / f"rows{suffix}", rows if suffix != ".parquet" else rows[1:])
    number = 1 if suffix == ".parquet" else 2
    with pytest.raises(DataError, match=rf"rows{suffix}: row {number}: column `docker_image` is missing"):
        load_tasks(TasksConfig(dataset=dataset))


def test_include_and_exclude_choose_by_id(tmp_path: Path) -> None:
    dataset = _write(tmp_path / "rows.jsonl", ROWS)
    assert [task.id for task in load_tasks(TasksConfig(dataset=dataset, include=(IDS[2], IDS[0])))] == [IDS[0], IDS[2]]
    assert [task.id for task in load_tasks(TasksConfig(dataset=dataset, exclude=(IDS[1],)))] == [IDS[0], IDS[2]]


@pytest.mark.parametrize("key", ["include", "exclude"])
def test_an_unknown_id_is_refused_with_the_nearest_known_one(tmp_path: Path, key: str) -> None:
    dataset = _write(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(
        DataError, match=rf"tasks.{key}: .* has no task `tornado__aaaaaaaaaaa`; did you mean `{IDS[0]}`\?"
    ):
        load_tasks(TasksConfig.model_validate({"dataset": dataset, key: ("tornado__aaaaaaaaaaa",)}))


def test_a_choice_that_leaves_nothing_is_refused(tmp_path: Path) -> None:
    dataset = _write(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(DataError, match="no task is left"):
        load_tasks(TasksConfig(dataset=dataset, exclude=tuple(IDS)))


def test_an_id_that_stands_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"task id {IDS[0]} stands in it twice"):
        load_tasks(TasksConfig(dataset=_write(tmp_path / "rows.json", [ROWS[0], ROWS[1], ROWS[0]])))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", "{\n", "row 1 is not JSON"),
        ("rows.jsonl", "7\n", "row 1: must be an object, found int"),
        ("rows.json", "{}", "must hold a list of rows"),
        ("rows.json", "nope", "as JSON: JSONDecodeError"),
        ("rows.parquet", "nope", "as parquet: ArrowInvalid"),
    ],
)
def test_a_file_that_does_not_hold_rows_is_told_in_one_line(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        load_tasks(TasksConfig(dataset=str(tmp_path / name)))
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_a_dataset_that_is_neither_file_nor_hub_id_is_refused() -> None:
    with pytest.raises(DataError, match="neither `offline`"):
        load_tasks(TasksConfig(dataset="offlin"))
    with pytest.raises(DataError, match="is not there"):
        load_tasks(TasksConfig(dataset="/nowhere/rows.parquet"))


def test_a_hub_id_without_network_is_the_users_to_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets.config
    import huggingface_hub.constants

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"load R2E-Gym/R2E-Gym-Lite \(train\) from the hub") as caught:
        load_tasks(TasksConfig(dataset="R2E-Gym/R2E-Gym-Lite"))
    assert "\n" not in str(caught.value)


def test_a_task_file_that_was_not_built_says_how_to_build_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_R3_CACHE", str(tmp_path))
    with pytest.raises(DataError, match="run `agent-r3 tasks build offline`"):
        load_tasks(TasksConfig(dataset="offline"))


def test_a_task_file_built_in_part_must_be_asked_for_what_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENT_R3_CACHE", str(tmp_path))
    spec = offline_spec_path("offline")
    rows_path(spec).write_text(json.dumps(r2e_row(instance_id="pathspec__0.12.1")) + "\n")
    known = len(read_spec(spec))
    with pytest.raises(DataError, match=rf"{known - 1} of {known} tasks of offline are not built here \(\w+__"):
        load_tasks(TasksConfig(dataset="offline"))
    chosen = load_tasks(TasksConfig(dataset="offline", include=("pathspec__0.12.1",)))
    assert [(task.id, task.dataset) for task in chosen] == [("pathspec__0.12.1", "offline")]


def test_a_malformed_task_file_is_told_with_file_task_and_key(tmp_path: Path) -> None:
    entry = json.loads(offline_spec_path("offline").read_text())["tasks"][0]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"tasks": [entry, entry | {"task_id": "b", "n_tests": "many"}]}))
    with pytest.raises(DataError, match=r"mine.json: task 2: `n_tests`"):
        read_spec(path)
    path.write_text(json.dumps({"tasks": [entry, entry]}))
    with pytest.raises(DataError, match=r"task 2: task_id humanize__4\.12\.1 stands in it twice"):
        read_spec(path)


def test_a_task_file_entry_may_hold_further_facts() -> None:
    entry = json.loads(offline_spec_path("offline").read_text())["tasks"][0]
    assert OfflineTask.model_validate(entry | {"stars": 5}).task_id == "humanize__4.12.1"
