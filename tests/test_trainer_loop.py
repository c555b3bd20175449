"""The trainer as a process: it learns what is rewarded, survives kill -9 and SIGTERM, and ranks agree with one."""

import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from agent_r3.config import TrainConfig
from agent_r3.errors import UserError
from agent_r3.trainer.record import read_steps
from agent_r3.types import MoEShape
from tests.support.rollout import ScriptedHeldSet, ScriptedRollout
from tests.support.trainer import GROUPS, SAMPLES, STEPS, Run, make_run, rewards

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(600)]


def test_each_step_trains_its_groups_under_its_own_policy_version(straight_run: tuple[Run, ScriptedRollout]) -> None:
    run, rollout = straight_run
    assert [(group.index, group.policy_version) for group in rollout.groups] == [
        (index, index // GROUPS) for index in range(STEPS * GROUPS)
    ]
    assert [line["step"] for line in run.metrics()] == list(range(STEPS))
    assert [line["train/groups_kept"] for line in run.metrics()] == [2, 1, 2, 2, 2]


def test_the_groups_of_each_step_are_on_record(straight_run: tuple[Run, ScriptedRollout]) -> None:
    run, rollout = straight_run
    steps = read_steps(run.folder)
    assert [step.step for step in steps] == list(range(STEPS))
    published = {group.index: group for group in rollout.groups}
    for step in steps:
        assert [group.index for group in step.groups] == [step.step * GROUPS + place for place in range(GROUPS)]
        for group in step.groups:
            assert group.trajectory_ids == published[group.index].trajectory_ids
            assert group.policy_version == step.step
            assert group.kept == (group.index != 3)  # its rewards are equal


def test_metrics_cover_rollout_replay_and_time(straight_run: tuple[Run, ScriptedRollout]) -> None:
    for line in straight_run[0].metrics():
        assert line["rollout/episodes"] == GROUPS * SAMPLES and line["rollout/turns_mean"] == 2
        assert line["rollout/ending/max_turns"] == GROUPS and line["rollout/infra/engine"] == GROUPS
        assert line["rollout/reprefilled_tokens"] == 0 and line["rollout/cached_tokens"] == 16 * GROUPS * SAMPLES
        assert line["r3/coverage"] == 1 and line["r3/rows_missing"] == 0 and line["r3/fallback_fraction"] == 0
        assert line["r3/mixed_version_fraction"] == 0 and line["r3/bytes_per_token"] > 0
        assert line["r3/mismatch_routers"] > 0.5  # rows of random experts
        assert line["r3/kl_replay"] > 0 and line["r3/kl_native"] > 0 and line["r3/kl_replay"] != line["r3/kl_native"]
        assert line["train/entropy"] > 0 and line["train/grad_norm"] > 0 and line["train/clip_fraction"] == 0
        for stage in ("wait", "load", "logprobs", "diagnostics", "update", "push", "step", "rollout"):
            assert line[f"perf/{stage}_s"] > 0


def test_training_makes_rewarded_behaviour_likelier(straight_run: tuple[Run, ScriptedRollout], tiny_moe: Path) -> None:
    from agent_r3.trainer.batch import make_packs
    from agent_r3.trainer.megatron import Policy
    from tests.support.rollout import scripted_turns
    from tests.support.trajectories import trajectory_of

    run, _ = straight_run
    (trained,) = (run.folder / "weights").iterdir()
    means = []
    for path in (tiny_moe, trained):
        policy = Policy.from_pretrained(path, TrainConfig(dtype="float32"))
        assert policy.shape is not None
        mean = []
        for good in (False, True):
            # A prompt and rows that were not trained on.
            trajectory = trajectory_of(scripted_turns(99, int(good), good, 0, policy.shape))
            (pack,) = make_packs([(0,)], {0: trajectory}, torch.zeros(1).numpy(), policy.shape)
            (output,) = policy.logprobs([pack], replay=True)
            mean.append(float(output.logprobs[pack.loss_mask].mean()))
        means.append(mean)
    (bad_before, good_before), (bad_after, good_after) = means
    assert good_after > good_before + 0.5
    assert good_after - bad_after > good_before - bad_before + 0.5


def test_kill_9_and_sigterm_lose_no_group_and_train_none_twice(
    straight_run: tuple[Run, ScriptedRollout], tiny_moe: Path, tiny_shape: MoEShape, trainer_store: str, tmp_path: Path
) -> None:
    run = make_run("interrupted", tiny_moe, trainer_store, tmp_path)
    with ScriptedRollout(trainer_store, run.name, tiny_shape, rewards) as rollout:
        process = run.start()
        run.wait_for_step(process, 2)  # the checkpoint holds steps 0 and 1; step 3 is under way
        run.kill(process)
        process = run.start(resume=True)
        run.wait_for_step(process, 3)
        process.send_signal(signal.SIGTERM)
        run.finish(process)
        steps_before = len(run.metrics())
        if steps_before < STEPS:
            run.finish(run.start(resume=True))
    assert sorted(group.index for group in rollout.groups) == list(range(STEPS * GROUPS))
    straight, _ = straight_run
    assert [line["step"] for line in run.metrics()] == list(range(STEPS))
    # By kill and restart alike each group was trained in exactly one of the steps that the policy is made of.
    assert [[group.index for group in step.groups] for step in read_steps(run.folder)] == [
        list(range(step * GROUPS, (step + 1) * GROUPS)) for step in range(STEPS)
    ]
    for name in ("train/loss", "train/grad_norm", "r3/kl_replay", "rollout/tokens"):
        assert [line[name] for line in run.metrics()] == pytest.approx([line[name] for line in straight.metrics()])
    for name, tensor in straight.weights().items():
        torch.testing.assert_close(run.weights()[name], tensor, msg=lambda text, name=name: f"{name}: {text}")


def test_two_ranks_train_like_one_also_while_their_policy_is_evaluated(
    straight_run: tuple[Run, ScriptedRollout], tiny_moe: Path, tiny_shape: MoEShape, trainer_store: str, tmp_path: Path
) -> None:
    run = make_run("ranks", tiny_moe, trainer_store, tmp_path, held={"every": 3})
    with (
        ScriptedRollout(trainer_store, run.name, tiny_shape, rewards),
        ScriptedHeldSet(trainer_store, run.loaded(), tiny_shape, {"solved": [1.0], "not": [0.0]}),
    ):
        run.finish(run.start(ranks=2))
    assert {line["step"]: line["eval/pass@1"] for line in run.metrics() if "eval/pass@1" in line} == {
        0: 0.5,
        3: 0.5,
        5: 0.5,
    }
    straight, _ = straight_run
    same = ("train/loss", "train/grad_norm", "train/entropy", "r3/kl_replay", "r3/kl_native", "r3/mismatch_routers")
    for name in (*same, "rollout/tokens", "rollout/sampled_tokens", "r3/coverage", "r3/diagnosed_tokens"):
        expected = [line[name] for line in straight.metrics()]
        assert [line[name] for line in run.metrics()[:STEPS]] == pytest.approx(expected, rel=1e-3, abs=1e-5), name
    before = load_file(tiny_moe / "model.safetensors")
    ours, theirs = run.weights(), straight.weights()
    moved = sum(float((theirs[name] - before[name]).square().sum()) for name in theirs)
    apart = sum(float((theirs[name] - ours[name]).square().sum()) for name in theirs)
    assert apart < 1e-4 * moved


def test_a_new_run_in_the_folder_of_an_earlier_one_is_refused(straight_run: tuple[Run, ScriptedRollout]) -> None:
    from agent_r3.trainer.loop import main

    run, _ = straight_run
    with pytest.raises(UserError, match=f"checkpoint of step {STEPS}: continue that run with --resume"):
        main(run.loaded(), run.url, [])
    assert len(run.metrics()) == STEPS
