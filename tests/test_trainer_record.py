"""`groups.jsonl`: a step that is made again counts once, as it was made last."""

from pathlib import Path

import pytest

from agent_r3.errors import DataError
from agent_r3.store import Delivery
from agent_r3.trainer.feed import StepGroups
from agent_r3.trainer.record import FILE, read_steps, record_step
from agent_r3.types import TrajectoryGroup


def groups(*indices: int, tag: str = "") -> StepGroups:
    deliveries = tuple(
        Delivery(f"{index}-0", TrajectoryGroup(f"g{index}", index, "task", 7, (f"g{index}-0{tag}",), (1.0,), {}), {})
        for index in indices
    )
    return StepGroups(deliveries, frozenset(indices[:1]), 0)


def trained(folder: Path) -> list[tuple[int, list[str]]]:
    return [
        (step.step, [name for group in step.groups for name in group.trajectory_ids]) for step in read_steps(folder)
    ]


def test_a_line_has_the_groups_of_its_step(tmp_path: Path) -> None:
    assert read_steps(tmp_path) == []
    record_step(tmp_path, 0, groups(0, 1))
    (step,) = read_steps(tmp_path)
    assert [(group.index, group.policy_version, group.trajectory_ids, group.kept) for group in step.groups] == [
        (0, 7, ("g0-0",), True),
        (1, 7, ("g1-0",), False),
    ]


def test_a_step_made_again_takes_back_itself_and_what_followed(tmp_path: Path) -> None:
    for step in range(4):
        record_step(tmp_path, step, groups(step))
    record_step(tmp_path, 2, groups(2, tag="-again"))
    assert trained(tmp_path) == [(0, ["g0-0"]), (1, ["g1-0"]), (2, ["g2-0-again"])]
    record_step(tmp_path, 3, groups(3, tag="-again"))
    assert trained(tmp_path)[3:] == [(3, ["g3-0-again"])]


def test_half_a_line_of_a_killed_trainer_does_not_count(tmp_path: Path) -> None:
    record_step(tmp_path, 0, groups(0))
    with (tmp_path / FILE).open("a") as file:
        file.write('{"step": 1, "groups": [')
    assert trained(tmp_path) == [(0, ["g0-0"])]
    record_step(tmp_path, 1, groups(1))
    assert trained(tmp_path) == [(0, ["g0-0"]), (1, ["g1-0"])]


def test_a_step_that_is_missing_is_an_error(tmp_path: Path) -> None:
    record_step(tmp_path, 0, groups(0))
    record_step(tmp_path, 2, groups(2))
    with pytest.raises(DataError, match="step 2 follows step 0"):
        read_steps(tmp_path)
