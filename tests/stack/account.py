"""What became of the finished trajectories of a run: which were lost, which were trained more than once. Pure."""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from agent_r3.metrics import trained
from agent_r3.trainer.record import TrainedStep
from agent_r3.types import TrajectoryGroup

_ID = re.compile(r"g(\d{6})-(\d\d)(?:-retry\d+)?$")
Place = tuple[int, int]
"""Index of a group and number of the sample in it: the same for all attempts at an episode."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the run has left, by four witnesses."""

    steps: Sequence[TrainedStep]  # the trainer's record: the steps that its policy is made of
    metrics: Sequence[Mapping[str, float]]
    archived: Collection[str]  # ids of the episodes on disk
    deliveries: Mapping[str, TrajectoryGroup]  # every entry of the stream of finished groups that was seen, by its id
    published: Collection[int]  # indices of groups that the store remembers as published
    samples: int  # episodes of a group


@dataclass(slots=True)
class Account:
    """`problems` says in a line each what was counted."""

    lost: int = 0
    duplicated: int = 0
    steps_done: int = 0
    groups: int = 0  # trained
    trajectories: int = 0  # trained
    problems: list[str] = field(default_factory=list)


def account(evidence: Evidence) -> Account:
    """Counts as the docstring of `tests.stack.chaos` defines it."""
    names = [name for step in evidence.steps for group in step.groups for name in group.trajectory_ids]
    times = Counter(place_of(name) for name in names)
    result = Account(trajectories=len(names), groups=sum(len(step.groups) for step in evidence.steps))
    for place, seen in sorted(_finished(evidence).items()):
        if place not in times:
            _lose(result, 1, f"group {place[0]} sample {place[1]}: {seen}, and no step trained it")
    for name in sorted(set(names) - set(evidence.archived)):
        _lose(result, 1, f"{name} was trained, and the archive lacks it")
    for place, count in sorted(times.items()):
        if count > 1:
            _repeat(result, count - 1, f"group {place[0]} sample {place[1]} was trained {count} times")
    _published_twice(evidence, result)
    _metrics(evidence, result)
    return result


def place_of(trajectory_id: str) -> Place:
    match = _ID.match(trajectory_id)
    if match is None:
        raise ValueError(f"{trajectory_id!r} is not the id of an episode")
    return int(match[1]), int(match[2])


def _finished(evidence: Evidence) -> dict[Place, str]:
    """Every place at which an episode finished, and by whose word."""
    found = {place_of(name): f"{name} is archived" for name in evidence.archived}
    known = {group.index for step in evidence.steps for group in step.groups}
    for entry, group in evidence.deliveries.items():
        known.add(group.index)
        found |= {place_of(name): f"{name} was published as {entry}" for name in group.trajectory_ids}
    # Of a group that nobody has seen, its members are not known: all of them are taken to have finished.
    for index in set(evidence.published) - known:
        found |= {(index, sample): "its group was published" for sample in range(evidence.samples)}
    return found


def _published_twice(evidence: Evidence, result: Account) -> None:
    """A second delivery of a group is its trajectories handed to training once more."""
    seen: set[int] = set()
    for entry, group in sorted(evidence.deliveries.items(), key=lambda item: _order(item[0])):
        if group.index in seen:
            _repeat(result, len(group.trajectory_ids), f"group {group.index} was published again, as {entry}")
        seen.add(group.index)


def _metrics(evidence: Evidence, result: Account) -> None:
    """The figures of each step must be of as many episodes as the trainer's record says."""
    times = Counter(int(line["step"]) for line in evidence.metrics if trained(line))
    episodes = {int(line["step"]): int(line["rollout/episodes"]) for line in evidence.metrics if trained(line)}
    for step, recorded in _episodes(evidence.steps):
        if times[step] != 1:
            result.problems.append(f"step {step} has {times[step]} lines of metrics")
            continue
        result.steps_done += 1
        if (missing := recorded - episodes[step]) > 0:
            _lose(result, missing, f"step {step}: metrics of {episodes[step]} of {recorded} episodes")
        elif missing < 0:
            _repeat(result, -missing, f"step {step}: metrics of {episodes[step]} instead of {recorded} episodes")


def _episodes(steps: Sequence[TrainedStep]) -> Iterator[tuple[int, int]]:
    return ((step.step, sum(len(group.trajectory_ids) for group in step.groups)) for step in steps)


def _order(entry_id: str) -> tuple[int, ...]:
    return tuple(int(part) for part in entry_id.split("-"))


def _lose(result: Account, count: int, why: str) -> None:
    result.lost += count
    result.problems.append(f"lost: {why}")


def _repeat(result: Account, count: int, why: str) -> None:
    result.duplicated += count
    result.problems.append(f"duplicated: {why}")
