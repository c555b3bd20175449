"""Verdicts on a dataset: what makes a task sound, flaky, slow or broken, and the file that keeps them."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from agent_r3.config import TasksConfig
from agent_r3.envs.datasets import load_tasks
from agent_r3.envs.sandbox import Grading
from agent_r3.envs.verify import (
    Verification,
    append_verification,
    judge,
    known_verifications,
    read_verifications,
    verify_tasks,
)
from agent_r3.errors import DataError, GradingError
from agent_r3.types import Grade, Task
from tests.support.docker import make_task
from tests.support.r2e_rows import r2e_row


def grade(reward: float, seconds: float = 1.0, **statuses: str) -> Grade:
    return Grade(reward=reward, statuses=statuses, reason="because", seconds=seconds)


@pytest.mark.parametrize(
    ("noop", "gold", "verdict", "problem"),
    [
        ([grade(0)] * 3, [grade(1)] * 3, "sound", ""),
        ([grade(0)], [grade(1, 200.0)], "slow", "a run took 200.0 s, more than 100 s"),
        ([grade(1)], [grade(1)], "broken", "doing nothing earns the reward"),
        ([grade(0)], [grade(0)], "broken", "the gold patch does not earn it: because"),
        ([grade(0)], [], "broken", "its row has no gold patch that text can say"),
        ([grade(0), grade(0)], [grade(1), grade(0)], "flaky", "2 runs of the gold patch disagree: rewards 0, 1"),
        ([grade(0, a="PASSED"), grade(0, a="FAILED")], [grade(1)], "flaky", "2 runs of doing nothing disagree: a"),
        ([grade(0), grade(0, b="PASSED")], [grade(1)], "flaky", "2 runs of doing nothing disagree: b"),
    ],
)
def test_the_verdict_follows_from_the_grades(
    noop: Sequence[Grade], gold: Sequence[Grade], verdict: str, problem: str
) -> None:
    assert judge(noop, gold, 100.0) == (verdict, problem)


class Scripted(Grading):
    """Gives the next of its grades for nothing and for gold; None is an infrastructure failure."""

    def __init__(self, noop: Iterator[Grade | None], gold: Iterator[Grade | None]) -> None:
        self._grades = {False: noop, True: gold}

    async def grade(self, task: Task, patch: bytes) -> Grade:
        found = next(self._grades[bool(patch)])
        if found is None:
            raise GradingError("the engine is gone")
        return found


async def test_every_patch_is_run_as_often_as_asked_and_failures_of_ours_are_no_verdict() -> None:
    task = dataclasses.replace(make_task("image:1", "a"), gold_patch="diff")
    seen: list[Verification] = []
    noop = iter([grade(0)] * 3 + [grade(0), None])
    [sound] = await verify_tasks([task], Scripted(noop, iter([grade(1)] * 3)), seen.append, times=3)
    assert (sound.verdict, len(sound.noop), len(sound.gold)) == ("sound", 3, 3)
    [failed] = await verify_tasks([task], Scripted(noop, iter([grade(1)] * 3)), seen.append, times=3)
    assert (failed.verdict, failed.problem) == ("ungraded", "the engine is gone")
    assert seen == [sound, failed]


def test_the_file_keeps_the_last_verdict_and_survives_a_killed_writer(tmp_path: Path) -> None:
    path = tmp_path / "new" / "verified.jsonl"
    append_verification(path, Verification("a", "image:1", "broken", "why"))
    append_verification(path, Verification("a", "image:1", "sound", ""))
    with path.open("a") as file:
        file.write('{"task_id": "b", "ima')
    assert {name: found.verdict for name, found in read_verifications(path).items()} == {"a": "sound"}
    append_verification(path, Verification("c", "image:1", "ungraded", "gone"))
    assert list(read_verifications(path)) == ["a", "c"]
    tasks = [make_task("image:1", "a"), make_task("image:1", "b"), make_task("image:1", "c")]
    assert list(known_verifications(tasks, path)) == ["a"]
    assert list(known_verifications([make_task("image:2", "a")], path)) == []


def test_a_config_leaves_out_what_was_not_called_sound(tmp_path: Path) -> None:
    rows, path = tmp_path / "rows.jsonl", tmp_path / "verified.jsonl"
    entries = [r2e_row(instance_id=name) for name in ("a", "b", "c")]
    rows.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    image = entries[0]["docker_image"]
    append_verification(path, Verification("a", image, "flaky", "x"))
    append_verification(path, Verification("b", image, "sound", ""))
    config = TasksConfig(dataset=str(rows), verified=path)
    assert [task.id for task in load_tasks(config)] == ["b"]
    with pytest.raises(DataError, match="calls none of the 1 chosen tasks sound"):
        load_tasks(config.model_copy(update={"exclude": ("b", "c")}))


@pytest.mark.parametrize("line", ["[]", "{}", "not json", '{"task_id": "a", "image": "i", "verdict": "fine"}'])
def test_a_file_of_something_else_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "verified.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(DataError, match=r"line 1 is not of `agent-r3 tasks verify --out`") as caught:
        read_verifications(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=r"read .*nowhere"):
        read_verifications(tmp_path / "nowhere")
