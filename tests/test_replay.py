"""Replay: gradients against Hugging Face, under recomputation, beside other models, and rows that must be refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agent_r3.config import TrainConfig
from agent_r3.errors import ContractError, RoutingError
from agent_r3.trainer.device import megatron_device
from agent_r3.trainer.megatron import Policy
from agent_r3.trainer.replay import ReplayController
from tests.support.hf import EXPERTS, LAYERS, TOP_K, HfReference, random_pack

pytestmark = pytest.mark.megatron

LENGTHS = (7, 20, 13)
TRAIN = TrainConfig(dtype="float32", lr=1e-3, clip_grad=1e9)  # clipping scales the gradients in place


def neg_logprob(
    index: int, pack: Any, logprobs: torch.Tensor, entropy: torch.Tensor
) -> tuple[torch.Tensor, dict[str, float]]:
    return -logprobs.sum(), {}


def routers(policy: Policy) -> list[Any]:
    return [layer.mlp.router for layer in policy.model.decoder.layers]


@pytest.mark.parametrize("recompute", [False, True])
def test_router_gradient_under_replay_equals_hugging_face(moe_folder: Path, recompute: bool) -> None:
    policy = Policy.from_pretrained(moe_folder, TRAIN.model_copy(update={"recompute": recompute}))
    packs = [random_pack(LENGTHS, policy.shape, seed=seed) for seed in (1, 2, 3)]
    policy.update(packs, neg_logprob)
    reference = HfReference(moe_folder)
    for pack in packs:
        torch.autograd.backward(-reference.logprobs(pack, pack.routing).sum())
    for layer, (router, gate) in enumerate(zip(routers(policy), reference.gates, strict=True)):
        error = (router.weight.main_grad - gate.weight.grad).norm() / gate.weight.grad.norm()
        assert error <= 1e-5, f"layer {layer}: {error:.2e}"


def test_recomputation_replays_the_rows_of_its_own_micro_batch(moe_folder: Path) -> None:
    """A pipeline's order, by hand: all forward passes first, so the targets are the last pack's in each backward."""
    policy = Policy.from_pretrained(moe_folder, TRAIN.model_copy(update={"recompute": True}))
    packs = [random_pack(LENGTHS, policy.shape, seed=seed) for seed in (1, 2, 3)]
    assert policy._replay is not None
    policy.model.train()
    with megatron_device(), policy._replay.step(replay=True, natural=False):
        pending = iter(enumerate(packs))
        steps = [policy._forward_step(pending, policy._ddp, replay=True, loss=neg_logprob) for _ in packs]
        for output, loss in steps:
            torch.autograd.backward(loss(output)[0])
        assert all(router.router_replay.replay_backward_list == [] for router in routers(policy))
    reference = HfReference(moe_folder)
    for pack in packs:
        torch.autograd.backward(-reference.logprobs(pack, pack.routing).sum())
    for router, gate in zip(routers(policy), reference.gates, strict=True):
        assert (router.weight.main_grad - gate.weight.grad).norm() <= 1e-5 * gate.weight.grad.norm()


@pytest.mark.parametrize("recompute", [False, True])
def test_recomputed_and_updated_logprobs_are_bit_equal(moe_folder: Path, recompute: bool) -> None:
    policy = Policy.from_pretrained(moe_folder, TRAIN.model_copy(update={"recompute": recompute}))
    packs = [random_pack(LENGTHS, policy.shape, seed=seed) for seed in (1, 2)]
    old = policy.logprobs(packs, replay=True)

    def loss(
        index: int, pack: Any, logprobs: torch.Tensor, entropy: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, float]]:
        assert torch.equal(logprobs.detach(), old[index].logprobs)  # so the ratio of a first step is exactly 1
        return -logprobs.sum(), {}

    assert len(policy.update(packs, loss).losses) == 2


def test_gradient_without_replay_differs(moe_folder: Path) -> None:
    gradients = []
    for replay in (True, False):
        policy = Policy.from_pretrained(moe_folder, TRAIN)
        pack = random_pack(LENGTHS, policy.shape)
        policy.update([pack if replay else replace(pack, routing=None)], neg_logprob)
        gradients.append(routers(policy)[0].weight.main_grad.clone())
    assert (gradients[0] - gradients[1]).norm() > 0.1 * gradients[0].norm()


def test_router_gradient_equals_a_finite_difference(moe_folder: Path) -> None:
    policy = Policy.from_pretrained(moe_folder, TRAIN.model_copy(update={"lr": 1e-12}))
    pack = random_pack(LENGTHS, policy.shape)
    policy.update([pack], neg_logprob)
    for router in routers(policy):
        gradient = router.weight.main_grad.flatten()
        entry, step = int(gradient.abs().argmax()), 1e-2
        losses = []
        for sign in (1, -1):
            with torch.no_grad():
                router.weight.view(-1)[entry] += sign * step
            losses.append(-policy.logprobs([pack], replay=True)[0].logprobs.double().sum().item())
            with torch.no_grad():
                router.weight.view(-1)[entry] -= sign * step
        assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(gradient[entry].item(), rel=1e-2)


def test_a_second_model_in_the_process_changes_nothing(moe_folder: Path) -> None:
    alone = Policy.from_pretrained(moe_folder, TRAIN)
    pack = random_pack(LENGTHS, alone.shape, seed=1)
    other_pack = random_pack(LENGTHS, alone.shape, seed=2)
    expected = alone.logprobs([pack], replay=True)[0].logprobs
    other = Policy.from_pretrained(moe_folder, TRAIN)
    seen = []

    def loss(
        index: int, pack: Any, logprobs: torch.Tensor, entropy: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, float]]:
        seen.append(other.logprobs([other_pack], replay=True)[0].logprobs)  # in the middle of the first one's step
        return -logprobs.sum(), {}

    update = alone.update([pack], loss)
    assert -expected.sum().item() == pytest.approx(update.losses[0], rel=1e-6)
    assert torch.equal(seen[0], other.logprobs([other_pack], replay=True)[0].logprobs)
    fresh = Policy.from_pretrained(moe_folder, TRAIN)
    fresh.update([pack], neg_logprob)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(alone.export(), fresh.export(), strict=True))


@pytest.mark.parametrize("recompute", [False, True])
def test_no_target_outlives_its_step(moe_folder: Path, recompute: bool) -> None:
    policy = Policy.from_pretrained(moe_folder, TRAIN.model_copy(update={"recompute": recompute}))
    pack = random_pack(LENGTHS, policy.shape)
    before = policy.logprobs([pack], replay=False)[0].logprobs
    policy.logprobs([pack, pack], replay=True)
    with pytest.raises(ContractError):
        policy.update([pack], lambda i, p, logps, e: (logps.sum() * float("inf"), {}))
    for router in routers(policy):
        replay = router.router_replay
        assert replay.replay_backward_list == [] and replay.target_topk_idx is None
        assert replay.router_replay_action is None
    assert torch.equal(policy.logprobs([pack], replay=False)[0].logprobs, before)


def put(layer: int, token: int, experts: list[int]) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(rows: torch.Tensor) -> torch.Tensor:
        rows = rows.clone()
        rows[layer, token] = torch.tensor(experts, dtype=rows.dtype)
        return rows

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows[:, :-1], rf"shape \({LAYERS}, 39, {TOP_K}\).*wanted \({LAYERS}, 40, {TOP_K}\)"),
        (lambda rows: rows[:-1], rf"shape \({LAYERS - 1}, 40, {TOP_K}\)"),
        (lambda rows: rows[..., :-1], rf"shape \({LAYERS}, 40, {TOP_K - 1}\)"),
        (
            put(2, 11, [0, 1, 2, EXPERTS]),
            rf"experts from 0 to {EXPERTS}, wanted 0 to {EXPERTS - 1}.*layer 2, position 11",
        ),
        (put(0, 3, [4, -1, 2, 3]), r"experts from -1 to .*position 3: \[4, -1, 2, 3\]"),
        (put(3, 39, [5, 6, 7, 5]), r"1 of 160 rows name an expert twice.*layer 3, position 39: \[5, 6, 7, 5\]"),
    ],
    ids=["row-missing", "layer-missing", "expert-missing", "out-of-range", "minus-one", "duplicate"],
)
def test_bad_rows_are_refused_with_numbers(
    moe_folder: Path, change: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    policy = Policy.from_pretrained(moe_folder, TRAIN)
    pack = random_pack(LENGTHS, policy.shape)
    assert pack.routing is not None
    bad = replace(pack, routing=change(pack.routing))
    with pytest.raises(RoutingError, match=message):
        policy.logprobs([pack, bad], replay=True)
    with pytest.raises(RoutingError, match=message):
        policy.update([bad], neg_logprob)
    assert policy.steps == 0


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [("moe_router_fusion", True, "fusion"), ("moe_router_load_balancing_type", "aux_loss", "aux_loss")],
)
def test_settings_that_bypass_the_replay_are_refused(
    moe_folder: Path, setting: str, value: object, message: str
) -> None:
    policy = Policy.from_pretrained(moe_folder, TRAIN)
    assert policy.shape is not None
    for router in routers(policy):
        setattr(router.config, setting, value)
        router.routing_type = router.config.moe_router_load_balancing_type
    with pytest.raises(ContractError, match=message):
        ReplayController(policy.model, policy.shape, range(LAYERS))
