"""The account of a chaos run: what counts as lost, and what as trained twice."""

from collections.abc import Iterable
from dataclasses import replace

from agent_r3.trainer.record import TrainedGroup, TrainedStep
from agent_r3.types import TrajectoryGroup
from tests.stack.account import Account, Evidence, account
from tests.stack.chaos import CUT, SERVICES, plan

SAMPLES, GROUPS = 2, 2


def ids(index: int) -> tuple[str, ...]:
    return tuple(f"g{index:06d}-{sample:02d}" for sample in range(SAMPLES))


def group(index: int, names: Iterable[str] | None = None) -> TrajectoryGroup:
    names = ids(index) if names is None else tuple(names)
    return TrajectoryGroup(f"g{index:06d}", index, "task", 0, names, (1.0,) * len(names), {})


def step(number: int, *groups: TrajectoryGroup) -> TrainedStep:
    return TrainedStep(number, tuple(TrainedGroup(g.index, number, g.trajectory_ids, True) for g in groups))


def line(number: int, episodes: int = SAMPLES * GROUPS) -> dict[str, float]:
    return {"step": number, "rollout/episodes": episodes, "train/loss": 0.1}


CLEAN = Evidence(
    steps=[step(0, group(0), group(1)), step(1, group(2), group(3))],
    metrics=[line(0), line(1), {"step": 2, "eval/pass@1": 0.5}],
    archived=[name for index in range(4) for name in ids(index)],
    deliveries={f"{index + 1}-0": group(index) for index in range(4)},
    published=range(4),
    samples=SAMPLES,
)


def counted(evidence: Evidence) -> tuple[int, int]:
    found: Account = account(evidence)
    assert bool(found.problems) == bool(found.lost or found.duplicated)
    return found.lost, found.duplicated


def test_a_clean_run_has_every_step_and_nothing_lost_or_twice() -> None:
    found = account(CLEAN)
    assert (found.lost, found.duplicated, found.problems) == (0, 0, [])
    assert (found.steps_done, found.groups, found.trajectories) == (2, 4, 8)


def test_what_was_published_or_archived_and_is_in_no_step_is_lost() -> None:
    one_step = replace(CLEAN, steps=CLEAN.steps[:1], metrics=CLEAN.metrics[:1])
    assert counted(one_step) == (4, 0)
    assert counted(replace(one_step, archived=[*ids(0), *ids(1)])) == (4, 0)
    assert counted(replace(one_step, deliveries={"1-0": group(0), "2-0": group(1)})) == (4, 0)
    # Not even seen, but the store remembers that it was published.
    unseen = replace(one_step, archived=[*ids(0), *ids(1)], deliveries={}, published=range(3))
    assert counted(unseen) == (2, 0)


def test_an_episode_that_finished_and_is_not_in_its_group_is_lost() -> None:
    short = group(0, ids(0)[:1])
    evidence = replace(
        CLEAN,
        steps=[step(0, short, group(1)), CLEAN.steps[1]],
        metrics=[line(0, 3), line(1)],
        deliveries={**CLEAN.deliveries, "1-0": short},
    )
    assert counted(evidence) == (1, 0)


def test_an_episode_that_was_tried_again_counts_as_its_last_attempt() -> None:
    again = group(0, (f"{ids(0)[0]}-retry1", ids(0)[1]))
    evidence = replace(
        CLEAN,
        steps=[step(0, again, group(1)), CLEAN.steps[1]],
        deliveries={**CLEAN.deliveries, "1-0": again},
        archived=[*CLEAN.archived, *again.trajectory_ids],
    )
    assert counted(evidence) == (0, 0)


def test_what_was_trained_and_is_not_archived_is_lost() -> None:
    assert counted(replace(CLEAN, archived=list(CLEAN.archived)[1:])) == (1, 0)


def test_a_group_in_two_steps_or_published_again_is_duplicated() -> None:
    twice = replace(CLEAN, steps=[CLEAN.steps[0], step(1, group(1), group(2), group(3))], metrics=[line(0), line(1, 6)])
    assert counted(twice) == (0, 2)
    assert counted(replace(CLEAN, deliveries={**CLEAN.deliveries, "9-0": group(2)})) == (0, 2)


def test_metrics_of_other_episodes_than_the_record_count_as_well() -> None:
    assert counted(replace(CLEAN, metrics=[line(0, 3), line(1)])) == (1, 0)
    assert counted(replace(CLEAN, metrics=[line(0), line(1, 5)])) == (0, 1)


def test_a_step_without_its_line_of_metrics_is_not_done() -> None:
    found = account(replace(CLEAN, metrics=[line(0)]))
    assert found.steps_done == 1 and found.problems == ["step 1 has 0 lines of metrics"]


def test_each_fault_comes_once_in_the_order_of_the_seed_and_before_the_end() -> None:
    faults = plan(3, 8)
    assert sorted(fault.kind for fault in faults) == sorted([*SERVICES, CUT])
    assert faults == plan(3, 8) and faults != plan(4, 8)
    assert [fault.step for fault in faults] == [0, 0, 1, 2, 3, 4, 5]
