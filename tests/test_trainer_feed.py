"""A step takes groups in data order, filters and refills as configured, and refuses what is stale."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from agent_r3.config import Config
from agent_r3.errors import ContractError
from agent_r3.store import EmbeddedServer, GroupReader, TrajectoryWriter
from agent_r3.trainer.feed import GroupFeed, StepGroups, Stopped, collect
from agent_r3.trainer.rollout_metrics import rollout_metrics
from tests.support.rollout import Rewards, ScriptedRollout, publish_group
from tests.support.trajectories import SHAPE

RUN = "feed"
MIXED, EQUAL = [0.0, 1.0], [1.0, 1.0]


@pytest.fixture(scope="module")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedServer(tmp_path_factory.mktemp("store")) as server:
        yield server.url


@pytest.fixture
def store(server_url: str) -> Iterator[GroupReader]:
    with GroupReader.connect(server_url, RUN) as reader:
        reader.reset_position(0)
        reader.set_policy(0, "")
        yield reader


def _config(mode: str, groups: int = 3, refills: int = 3) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "tiny"},
            "tasks": {"dataset": "offline"},
            "rollout": {"groups_per_step": groups},
            "train": {"dynamic_sampling": mode, "max_refills": refills},
        }
    )


def _patience() -> None:
    """Called while waiting."""


def _collect(server_url: str, store: GroupReader, config: Config, rewards: Rewards) -> StepGroups:
    with ScriptedRollout(server_url, RUN, SHAPE, rewards):
        return collect(GroupFeed(store, 0, _patience), config, version=0)


def _first_equal(index: int) -> list[float]:
    return EQUAL if index in (0, 2, 3) else MIXED


def test_off_keeps_groups_of_equal_rewards(server_url: str, store: GroupReader) -> None:
    groups = _collect(server_url, store, _config("off"), _first_equal)
    assert (len(groups.deliveries), groups.kept, groups.refills) == (3, {0, 1, 2}, 0)
    assert (groups.mixed, groups.stop) == (1, 3)


def test_filter_leaves_groups_of_equal_rewards_out(server_url: str, store: GroupReader) -> None:
    groups = _collect(server_url, store, _config("filter"), _first_equal)
    assert (len(groups.deliveries), groups.kept, groups.refills) == (3, {1}, 0)


def test_refill_asks_for_as_many_groups_as_are_missing_until_the_step_is_full(
    server_url: str, store: GroupReader
) -> None:
    # 0 1 2 -> one mixed, two more: 3 4 -> one of them, one more: 5
    groups = _collect(server_url, store, _config("refill"), _first_equal)
    assert [d.group.index for d in groups.deliveries] == [0, 1, 2, 3, 4, 5]
    assert (groups.kept, groups.refills, groups.stop) == ({1, 4, 5}, 2, 6)


def test_refill_gives_up_after_its_rounds(server_url: str, store: GroupReader) -> None:
    groups = _collect(server_url, store, _config("refill", refills=2), lambda index: EQUAL)
    assert (len(groups.deliveries), groups.kept, groups.refills) == (9, set(), 2)


def test_a_group_whose_episodes_all_failed_is_left_out(server_url: str, store: GroupReader) -> None:
    groups = _collect(server_url, store, _config("filter"), lambda index: [] if index == 1 else MIXED)
    assert groups.kept == {0, 2}
    assert rollout_metrics([], groups.deliveries)["rollout/infra/engine"] == 3.0


def test_groups_are_taken_by_index_though_they_arrive_in_another_order(server_url: str, store: GroupReader) -> None:
    async def publish_backwards() -> None:
        async with TrajectoryWriter.connect(server_url, RUN) as writer:
            for _ in range(4):
                await writer.claim_group("worker-0")
            for index in (3, 2, 1, 0):
                await publish_group(writer, "worker-0", index, MIXED, 0, SHAPE)

    store.set_demand(4)
    asyncio.run(publish_backwards())
    feed = GroupFeed(store, 0, _patience)
    assert [d.group.index for d in feed.take(2)] == [0, 1]
    assert [d.group.index for d in feed.take(2)] == [2, 3]


def test_a_group_trained_before_the_crash_is_acknowledged_and_not_given_again(
    server_url: str, store: GroupReader
) -> None:
    with ScriptedRollout(server_url, RUN, SHAPE, lambda index: MIXED):
        taken = GroupFeed(store, 0, _patience).take(2)
        with GroupReader.connect(server_url, RUN) as resumed:
            (delivery,) = GroupFeed(resumed, 1, _patience).take(1)
    assert delivery.group.index == 1
    with pytest.raises(ContractError, match="is not there"):
        store.load(taken[0].group.trajectory_ids[0])
    assert len(store.load(taken[1].group.trajectory_ids[0]).tokens) > 2


def test_a_group_of_another_policy_version_is_refused(server_url: str, store: GroupReader) -> None:
    with (
        ScriptedRollout(server_url, RUN, SHAPE, lambda index: MIXED),
        pytest.raises(ContractError, match=r"policy version 0, the trainer is at 1"),
    ):
        collect(GroupFeed(store, 0, _patience), _config("off"), version=1)


def test_waiting_ends_when_the_run_is_asked_to_stop(store: GroupReader) -> None:
    asked = threading.Event()

    def idle() -> None:
        if asked.is_set():
            raise Stopped
        asked.set()

    with pytest.raises(Stopped):
        GroupFeed(store, 0, idle).take(1)


def test_rollout_metrics_have_the_wall_time_and_the_seconds_of_stages(server_url: str, store: GroupReader) -> None:
    groups = _collect(server_url, store, _config("off"), lambda index: MIXED)
    metrics = rollout_metrics([], groups.deliveries)
    assert metrics["train/reward_mean"] == 0.5
    assert metrics["perf/rollout_s"] == 5.0  # groups began at 100, 101, 102 and took 3 s each
    assert metrics["rollout/seconds/generate"] == 6.0
