"""Settings of the loop and what it refuses, each as a short run in this process on the real store."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from agent_r3.config import Config, StoreConfig, dump_config
from agent_r3.errors import ConfigError, ContractError, RoutingError
from agent_r3.hfconfig import read_model
from agent_r3.metrics import read_metrics
from agent_r3.store import EmbeddedServer
from agent_r3.types import MoEShape
from tests.support.rollout import Rewards, ScriptedRollout, alternating

pytestmark = pytest.mark.megatron

GROUPS, SAMPLES = 2, 4


@pytest.fixture(scope="module")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedServer(tmp_path_factory.mktemp("store")) as server:
        yield server.url


@pytest.fixture(scope="module")
def shape(tiny_moe: Path) -> MoEShape:
    return read_model(tiny_moe).require_moe()


@pytest.fixture
def config(tiny_moe: Path, server_url: str, tmp_path: Path) -> Config:
    """One step of a run of its own; nothing is checkpointed on the way."""
    return Config.model_validate(
        {
            "run": {"name": tmp_path.name, "dir": tmp_path},
            "model": {"path": str(tiny_moe)},
            "tasks": {"dataset": "offline"},
            "store": {"url": server_url},
            "rollout": {"groups_per_step": GROUPS, "samples_per_task": SAMPLES},
            "train": {
                "steps": 1,
                "dtype": "float32",
                "lr": 1e-3,
                "dynamic_sampling": "filter",
                "micro_batch_tokens": 64,
                "save_every": 0,
            },
        }
    )


def changed(config: Config, **train: object) -> Config:
    return config.model_copy(update={"train": config.train.model_copy(update=train)})


def run(
    config: Config, shape: MoEShape, rewards: Rewards | None = None, *, version: int | None = None
) -> list[dict[str, float]]:
    """Train in this process; the run's metrics."""
    from agent_r3.trainer.loop import main

    assert config.store.url is not None
    rewards = rewards or alternating(SAMPLES)
    with ScriptedRollout(config.store.url, config.run.name, shape, rewards, version=version):
        main(config, config.store.url, [])
    return read_metrics(config.run.folder)


def test_mini_steps_split_the_batch_and_clip_against_the_policy_that_sampled(config: Config, shape: MoEShape) -> None:
    (line,) = run(changed(config, mini_steps=3, lr=1e-2), shape)
    assert line["train/optimizer_steps"] == 3 and line["train/policy_version"] == 1
    assert line["train/clip_fraction"] > 0  # the second and third see a changed policy
    # Every sampled token of the 8 episodes, twice 4 + sample % 3 each, is in exactly one of them.
    assert line["train/loss_tokens"] == line["rollout/sampled_tokens"] == 2 * 2 * (4 + 5 + 6 + 4)


def test_without_replay_both_policies_are_still_compared_on_the_same_tokens(config: Config, shape: MoEShape) -> None:
    (line,) = run(changed(config, routing="none"), shape)
    (replayed,) = run(config.model_copy(update={"run": config.run.model_copy(update={"name": "r3"})}), shape)
    for name in ("r3/kl_replay", "r3/kl_native", "r3/diagnosed_tokens", "r3/mismatch_routers"):
        assert line[name] == pytest.approx(replayed[name], rel=1e-4)
    assert line["train/grad_norm"] != pytest.approx(replayed["train/grad_norm"], rel=1e-2)
    assert "r3/fallback_fraction" not in line


def test_a_model_in_bfloat16_trains_through_the_same_path(config: Config, shape: MoEShape) -> None:
    (line,) = run(changed(config, dtype="bfloat16", recompute=True), shape)
    assert line["train/grad_norm"] > 0 and line["r3/kl_replay"] > 0


def test_truncated_episodes_can_be_left_out_of_the_loss_but_not_of_the_baseline(
    config: Config, shape: MoEShape
) -> None:
    # The first episode of each group was cut by turns; it alone fails, so the others' advantage comes from it.
    (line,) = run(changed(config, mask_truncated=True), shape, lambda index: [0.0, 1.0, 1.0, 1.0])
    assert line["train/loss_tokens"] == line["rollout/sampled_tokens"] - GROUPS * 2 * 4
    assert line["train/grad_norm"] > 0


def test_a_step_without_a_mixed_group_is_skipped_and_the_policy_stays(config: Config, shape: MoEShape) -> None:
    lines = run(
        changed(config, steps=3),
        shape,
        lambda index: [1.0] * SAMPLES if index in (2, 3) else alternating(SAMPLES)(index),
    )
    assert [line.get("train/skipped_steps", 0.0) for line in lines] == [0, 1, 0]
    assert [line["train/policy_version"] for line in lines] == [1, 1, 2]
    assert lines[1]["train/reward_mean"] == 1.0 and "train/loss" not in lines[1]


def test_trained_groups_are_acknowledged_and_leave_nothing_in_the_store(config: Config, shape: MoEShape) -> None:
    run(changed(config, steps=2), shape)
    client = redis.Redis.from_url(str(config.store.url))
    left = [
        key for key in client.scan_iter(f"agent_r3:{{{config.run.name}}}:*") if b":traj:" in key or b":turns:" in key
    ]
    assert left == []
    assert (config.run.folder / "checkpoints" / "step_000002" / "trainer.json").is_file()


def test_diagnostics_can_be_turned_off(config: Config, shape: MoEShape) -> None:
    (line,) = run(changed(config, diagnostics_trajectories=0), shape)
    assert "r3/kl_replay" not in line and line["r3/coverage"] == 1.0 and line["r3/diagnosed_tokens"] == 0


def test_a_group_of_another_policy_version_is_refused(config: Config, shape: MoEShape) -> None:
    with pytest.raises(ContractError, match=r"g0 \(index 0\) comes from policy version 3, the trainer is at 0"):
        run(config, shape, version=3)


def test_episodes_without_routing_rows_are_refused_under_replay(config: Config, shape: MoEShape) -> None:
    with pytest.raises(RoutingError, match=r"\(\d+, 0, 0\), wanted from 0 of shape \(\d+, 4, 4\)"):
        run(config, replace(shape, num_layers=0, top_k=0))


def test_rows_of_another_model_are_refused(config: Config, shape: MoEShape) -> None:
    with pytest.raises(RoutingError, match=r"experts out of range 0\.\.15"):
        run(config, replace(shape, num_experts=64))


@pytest.mark.parametrize(
    ("section", "message"),
    [("store", "store.url is not set"), ("engine", "engine.urls is empty")],
)
def test_the_trainer_role_says_what_its_config_lacks(
    config: Config, tmp_path: Path, section: str, message: str
) -> None:
    from agent_r3.cli.trainer import trainer

    if section == "store":
        config = config.model_copy(update={"store": StoreConfig()})
    path = tmp_path / "resolved.yaml"
    path.write_text(dump_config(config))
    with pytest.raises(ConfigError, match=message):
        trainer(path)
