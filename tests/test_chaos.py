"""The chaos run's judges: what they must find is put before them."""

import subprocess
import time
import uuid
from pathlib import Path

import pytest

from agent_r3.archive import EpisodeInfo, TurnText
from agent_r3.tools.parsers import parse
from agent_r3.types import Ending, Observation, TrajectoryGroup
from tests.chaos import leaks
from tests.chaos.account import Claims, account, wrongs
from tests.chaos.agents import Agent, agent_of, agents
from tests.support.docker import make_task

SAMPLES, RETRIES = 2, 1
TASK = make_task("image")


def group(index: int, ids: tuple[str, ...], failures: dict[str, int] | None = None) -> TrajectoryGroup:
    rewards = tuple(0.0 for _ in ids)
    return TrajectoryGroup(f"g{index:06d}", index, TASK.id, 0, ids, rewards, failures or {})


def problems(groups: list[TrajectoryGroup], notes: list[dict[str, object]], killed: tuple[int, ...] = ()) -> list[str]:
    return account(groups, len(groups), SAMPLES, RETRIES, Claims(notes, killed)).problems


def note(what: str, index: int, pid: int) -> dict[str, object]:
    return {"what": what, "group": index, "pid": pid}


DONE = [note("claimed", 0, 1), note("published", 0, 1)]


def test_finished_retried_and_left_out_episodes_are_all_accounted_for() -> None:
    first = group(0, ("g000000-00", "g000000-01-retry1"), {"sandbox_dead": 1})
    second = group(1, ("g000001-01",), {"docker": 1, "grading": 1})
    notes = [*DONE, note("claimed", 1, 1), note("claimed", 1, 2), note("published", 1, 2)]
    result = account([first, second], 2, SAMPLES, RETRIES, Claims(notes, [1]))
    assert result.problems == []
    assert (result.finished, result.finished_after_retries, result.left_out, result.groups_run_again) == (3, 1, 1, 1)
    assert result.failures == {"sandbox_dead": 1, "docker": 1, "grading": 1}


@pytest.mark.parametrize(
    ("ids", "failures"),
    [
        (("g000000-00",), {}),  # left out, and no failure is counted
        (("g000000-00", "g000000-01-retry1"), {}),  # retried, and no failure is counted
        (("g000000-00", "g000000-01"), {"docker": 1}),  # a failure of no attempt
        (("g000000-00", "g000000-00-retry1"), {"docker": 1}),  # one episode twice
        (("g000000-00", "g000001-01"), {}),  # another group's
    ],
)
def test_an_episode_without_its_failures_is_unaccounted(ids: tuple[str, ...], failures: dict[str, int]) -> None:
    assert problems([group(0, ids, failures)], DONE)


def test_a_group_that_is_missing_or_delivered_twice_is_unaccounted() -> None:
    whole = group(0, ("g000000-00", "g000000-01"))
    assert account([], 1, SAMPLES, RETRIES, Claims(DONE, [])).problems == ["group 0 was delivered 0 times"]
    assert account([whole, whole], 1, SAMPLES, RETRIES, Claims(DONE, [])).problems == ["group 0 was delivered 2 times"]


def test_a_claim_ends_in_its_group_or_with_a_killed_process() -> None:
    whole = [group(0, ("g000000-00", "g000000-01"))]
    again = [note("claimed", 0, 7), *DONE]
    assert problems(whole, again, killed=(7,)) == []
    assert problems(whole, again) == ["group 0 was claimed by 7, which neither published it nor died"]


def played(agent: Agent, *, reward: float | None = None, observed: dict[int, str] | None = None) -> EpisodeInfo:
    """An episode in which `agent` saw nothing but what `observed` says."""
    turns = tuple(
        TurnText(
            index=i,
            start=i,
            prompt=0,
            sampled=1,
            policy_version=0,
            cached_tokens=0,
            text=step.text,
            calls=(),
            observations=(Observation((observed or {}).get(i, "")),),
            seconds={},
        )
        for i, step in enumerate(agent.steps)
    )
    return EpisodeInfo(
        id="g000000-00",
        group_id="g000000",
        task_id=TASK.id,
        reward=agent.reward if reward is None else reward,
        reason="why",
        ending=Ending.FINISH,
        patch="",
        turns=turns,
        prompt_tokens=0,
        cached_tokens=0,
        reprefilled_tokens=0,
        outcome="failed",
        left_out=(),
        flaky=False,
    )


NOTHING = agents(TASK)["nothing"]
SEEN = {0: "Exit code 0.\nagent=nothing", 1: "Exit code 0.\n/testbed"}


def test_every_agent_is_known_by_its_first_turn() -> None:
    for agent in agents(TASK).values():
        assert agent_of(TASK, agent.steps[0].text) == agent
        assert all(isinstance(parse(step.text, "r2e_xml"), list) for step in agent.steps)


def test_an_episode_as_it_must_be_is_not_wrong() -> None:
    assert wrongs(played(NOTHING, observed=SEEN), {TASK.id: TASK}, 0.0) == []


@pytest.mark.parametrize(
    ("episode", "group_reward"),
    [
        (played(NOTHING, observed=SEEN, reward=1.0), None),
        (played(NOTHING, observed=SEEN), 1.0),
        (played(NOTHING, observed=SEEN | {1: "Exit code 126. OCI runtime exec failed: exec failed"}), 0.0),
        (played(NOTHING, observed=SEEN | {2: "container x of image has died"}), 0.0),
        (played(NOTHING, observed=SEEN | {1: "Exit code 137. No output."}), 0.0),
    ],
)
def test_an_infrastructure_failure_in_a_reward_or_an_observation_is_found(
    episode: EpisodeInfo, group_reward: float | None
) -> None:
    assert len(wrongs(episode, {TASK.id: TASK}, group_reward)) == 1


class Marked:
    """A process that carries a run's mark, as all of its processes do."""

    def __init__(self, *command: str) -> None:
        self.mark = uuid.uuid4().hex
        self._process = subprocess.Popen(command, env={leaks.MARK: self.mark}, stdin=subprocess.PIPE)
        self.pid = self._process.pid

    def __enter__(self) -> "Marked":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.communicate()  # the end of its input ends it

    def await_name(self, name: str) -> None:
        deadline = time.monotonic() + 10
        while not Path(f"/proc/{self.pid}/cmdline").read_bytes().startswith(name.encode()):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_processes_and_scratch_of_a_run_that_are_left_are_named(tmp_path: Path) -> None:
    (tmp_path / "tmp" / "agent-r3-left").mkdir(parents=True)
    with Marked("cat") as process:
        process.await_name("cat")
        found = leaks.on_host(process.mark, "chaos-x", tmp_path, set())
        assert found["processes"] == [f"{process.pid} cat "]
        assert found["scratch"] == [str(tmp_path / "tmp" / "agent-r3-left")]
        assert not leaks.on_host("another mark", "chaos-x", tmp_path, set())["processes"]
        assert not leaks.on_host(process.mark, "chaos-x", tmp_path, {process.pid})["processes"]


def test_only_a_shim_that_is_older_than_the_killed_engine_is_its_orphan(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    shim = "/usr/bin/containerd-shim-runc-v2"
    with Marked("bash", "-c", f"exec -a {shim} sh -c 'read line' -id abc") as process:
        process.await_name(shim)
        for killed_at, kind in [(None, "processes"), (time.time() - 60, "processes"), (time.time(), "engine_orphans")]:
            found = leaks.on_host(process.mark, "chaos-x", tmp_path, set(), killed_at)
            assert {kind: len(names) for kind, names in found.items() if names} == {kind: 1}
