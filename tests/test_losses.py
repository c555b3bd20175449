"""verl's symbols do what we think (few-line numpy references), and packs add up to the loss of the whole batch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r3.config import TrainConfig
from agent_r3.trainer.batch import filler_pack, make_packs, plan_packs
from agent_r3.trainer.losses import DUAL_CLIP, LossSums, PolicyLoss, group_advantages, is_mixed
from tests.support.trajectories import SHAPE, make_trajectory

MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
HORIZON = 32


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=6), min_size=1, max_size=5),
    st.booleans(),
)
def test_grpo_advantage_is_reward_minus_group_mean_over_std(groups: list[list[float]], normalize: bool) -> None:
    rewards = [reward for group in groups for reward in group]
    names = [f"g{i}" for i, group in enumerate(groups) for _ in group]
    expected = []
    for group in groups:
        centred = np.array(group) - np.mean(group)
        if len(set(group)) == 1:
            expected += [0.0] * len(group)
        else:
            expected += list(centred / (np.std(group, ddof=1) + 1e-6) if normalize else centred)
    got = group_advantages(rewards, names, normalize=normalize)
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_a_group_of_one_and_a_group_of_equal_rewards_have_advantage_exactly_zero() -> None:
    got = group_advantages([1.0, 0.1, 0.1, 0.1], ["alone", "even", "even", "even"], normalize=True)
    assert got.tolist() == [0.0, 0.0, 0.0, 0.0]
    assert not is_mixed([1.0]) and not is_mixed([0.1, 0.1]) and is_mixed([0.0, 0.1])


def test_no_episodes_have_no_advantages() -> None:
    assert group_advantages([], [], normalize=True).shape == (0,)


def _reference(mode: str, per_token: list[np.ndarray], masks: list[np.ndarray]) -> float:
    sums = [float((loss * mask).sum()) for loss, mask in zip(per_token, masks, strict=True)]
    counts = [int(mask.sum()) for mask in masks]
    used = sum(count > 0 for count in counts)
    match mode:
        case "token-mean":
            return sum(sums) / sum(counts)
        case "seq-mean-token-sum":
            return sum(sums) / used
        case "seq-mean-token-mean":
            return sum(s / c for s, c in zip(sums, counts, strict=True) if c) / used
        case _:
            return sum(sums) / used / HORIZON


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [1, 3])
def test_losses_of_all_packs_and_ranks_add_up_to_the_clipped_loss_of_the_batch(mode: str, ranks: int) -> None:
    rng = np.random.default_rng(7)
    lengths = [5, 31, 2, 17, 9, 12]
    trajectories = {i: make_trajectory(rng, n, name=str(i)) for i, n in enumerate(lengths)}
    advantages = rng.standard_normal(len(lengths)).astype(np.float32)
    old = {i: -rng.random(n).astype(np.float32) for i, n in enumerate(lengths)}
    new = {i: old[i] + rng.normal(0, 0.8, n).astype(np.float32) for i, n in enumerate(lengths)}

    per_token, masks, clipped = [], [], 0
    for i, t in trajectories.items():
        ratio, advantage = np.exp(new[i] - old[i]), advantages[i]
        unclipped, bounded = -advantage * ratio, -advantage * np.clip(ratio, 1 - 0.2, 1 + 0.27)
        loss = np.maximum(unclipped, bounded)
        dual = np.minimum(loss, -advantage * DUAL_CLIP) if advantage < 0 else loss
        clipped += int(((bounded > unclipped) & t.loss_mask).sum()) + int(((dual < loss) & t.loss_mask).sum())
        per_token.append(dual)
        masks.append(t.loss_mask)

    config = TrainConfig(loss_aggregation=mode, clip_low=0.2, clip_high=0.27)
    tokens = sum(int(mask.sum()) for mask in masks)
    loss_fn = PolicyLoss(config, tokens=tokens, sequences=len(lengths), horizon=HORIZON)
    total, sums = 0.0, LossSums()
    for packs in plan_packs(lengths, ranks, 32):
        mine = {i: trajectories[i] for pack in packs for i in pack}
        for pack in make_packs(packs, mine, advantages, SHAPE):
            flat_old = np.zeros(len(pack.tokens), np.float32)
            flat_new = np.zeros(len(pack.tokens), np.float32)
            for i, start, stop in pack.spans():
                flat_old[start:stop], flat_new[start:stop] = old[i], new[i]
            loss, part = loss_fn(
                pack, torch.from_numpy(flat_new), torch.from_numpy(flat_old), torch.ones(len(flat_new))
            )
            total, sums = total + float(loss), sums + part
    assert total == pytest.approx(_reference(mode, per_token, masks), rel=1e-5)
    assert sums.loss == pytest.approx(total) and sums.tokens == tokens
    metrics = sums.metrics(optimizer_steps=1)
    assert metrics["train/clip_fraction"] == pytest.approx(clipped / tokens, rel=1e-5)
    assert metrics["train/entropy"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("advantage", "ratio", "flows"), [(1.0, 1.26, 1), (1.0, 1.28, 0), (-1.0, 0.81, 1), (-1.0, 0.79, 0)]
)
def test_the_clip_is_wider_upwards(advantage: float, ratio: float, flows: bool) -> None:
    (pack,) = make_packs(
        [(0,)], {0: make_trajectory(np.random.default_rng(0), 2)}, np.full(1, advantage, np.float32), SHAPE
    )
    logprobs = torch.tensor([0.0, float(np.log(ratio))], requires_grad=True)
    loss, _ = PolicyLoss(TrainConfig(), tokens=1, sequences=1, horizon=HORIZON)(
        pack, logprobs, torch.zeros(2), torch.zeros(2)
    )
    loss.backward()
    assert logprobs.grad is not None
    assert bool(logprobs.grad[1] != 0) == flows and logprobs.grad[0] == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_filler_pack_adds_nothing_and_keeps_the_graph(mode: str) -> None:
    loss_fn = PolicyLoss(TrainConfig(loss_aggregation=mode), tokens=4, sequences=1, horizon=HORIZON)
    logprobs = torch.full((2,), -1.0, requires_grad=True)
    loss, sums = loss_fn(filler_pack(SHAPE), logprobs, torch.zeros(2), torch.zeros(2))
    loss.backward()
    assert float(loss.detach()) == 0 and sums == LossSums()
    assert logprobs.grad is not None and logprobs.grad.tolist() == [0.0, 0.0]
