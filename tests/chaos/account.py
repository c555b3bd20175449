"""Is every episode accounted for, and did anything of the infrastructure reach a reward or an observation? Pure."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from agent_r3.archive import EpisodeInfo
from agent_r3.types import Task, TrajectoryGroup
from tests.chaos.agents import FOREIGN, agent_of

_ID = re.compile(r"(g\d{6})-(\d\d)(?:-retry(\d+))?$")


@dataclass(slots=True)
class Account:
    """Episodes by what became of them. `problems` says in a line each what is not accounted for."""

    finished: int = 0
    finished_after_retries: int = 0
    left_out: int = 0
    failures: Counter[str] = field(default_factory=Counter)  # failed attempts, by kind of infrastructure error
    groups_run_again: int = 0  # claimed by a worker that was killed, then by another
    problems: list[str] = field(default_factory=list)


def account(
    groups: Sequence[TrajectoryGroup], expected_groups: int, samples: int, retries: int, claims: "Claims"
) -> Account:
    """Every group once; every episode finished or left out; and every failed attempt counted by kind."""
    result = Account()
    by_index = Counter(group.index for group in groups)
    for index in range(expected_groups):
        if by_index[index] != 1:
            result.problems.append(f"group {index} was delivered {by_index[index]} times")
    for group in groups:
        _add(result, group, samples, retries)
    claims.check(result, expected_groups)
    return result


def _add(result: Account, group: TrajectoryGroup, samples: int, retries: int) -> None:
    found = {}
    for trajectory_id in group.trajectory_ids:
        match = _ID.match(trajectory_id)
        if match is None or match[1] != group.id or not 0 <= int(match[2]) < samples or match[2] in found:
            result.problems.append(f"{group.id} holds {trajectory_id}")
        else:
            found[match[2]] = int(match[3] or 0)
    left_out = samples - len(found)
    attempts = sum(found.values()) + left_out * (retries + 1)
    counted = sum(group.infra_failures.values())
    if attempts != counted:
        result.problems.append(f"{group.id}: {attempts} attempts failed, {counted} are counted by kind")
    result.finished += len(found)
    result.finished_after_retries += sum(retry > 0 for retry in found.values())
    result.left_out += left_out
    result.failures.update(group.infra_failures)


class Claims:
    """What each worker process claimed and published, and which of them were killed."""

    def __init__(self, notes: Iterable[Mapping[str, object]], killed: Collection[int]) -> None:
        self._claimed: dict[int, list[int]] = {}
        self._published: set[tuple[int, int]] = set()
        self._killed = set(killed)
        for note in notes:
            group, pid = int(str(note["group"])), int(str(note["pid"]))
            if note["what"] == "claimed":
                self._claimed.setdefault(group, []).append(pid)
            else:
                self._published.add((group, pid))

    def check(self, result: Account, expected_groups: int) -> None:
        """A claim ends in its group or with its process; a group claimed again was a killed worker's."""
        for group in range(expected_groups):
            pids = self._claimed.get(group, [])
            if not pids:
                result.problems.append(f"group {group} was never claimed")
            for pid in pids:
                if (group, pid) not in self._published and pid not in self._killed:
                    result.problems.append(f"group {group} was claimed by {pid}, which neither published it nor died")
            result.groups_run_again += len(pids) > 1


def wrongs(episode: EpisodeInfo, tasks: Mapping[str, Task], group_reward: float | None) -> list[str]:
    """How a finished episode differs from what its agent deserves and must have seen, in a line each.

    `group_reward`: what its group says, None where it belongs to none that was published.
    """
    agent = agent_of(tasks[episode.task_id], episode.turns[0].text)
    found = []
    if episode.reward != agent.reward:
        found.append(f"{episode.id}: reward {episode.reward} instead of {agent.reward}: {episode.reason}")
    if group_reward is not None and group_reward != episode.reward:
        found.append(f"{episode.id}: its group says reward {group_reward}, the episode {episode.reward}")
    if len(episode.turns) != len(agent.steps):
        found.append(f"{episode.id}: {len(episode.turns)} turns instead of {len(agent.steps)}")
    for turn, step in zip(episode.turns, agent.steps, strict=False):
        text = "\n".join(observation.text for observation in turn.observations)
        if FOREIGN.search(text) or (step.observation is not None and not re.fullmatch(step.observation, text)):
            found.append(f"{episode.id} turn {turn.index} observed {text[:300]!r}")
    return found
