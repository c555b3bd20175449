"""The Megatron policy against Hugging Face, against itself in pieces, and over two ranks."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file as load_safetensors

from agent_r3.config import TrainConfig
from agent_r3.errors import ConfigError, ContractError, DataError
from agent_r3.trainer.megatron import Policy
from tests.support.hf import HfReference, make_hf_folder, random_pack
from tests.support.megatron_rank import two_steps

pytestmark = pytest.mark.megatron

LENGTHS = (7, 20, 13)
TRAIN = TrainConfig(dtype="float32", lr=1e-3)


def neg_logprob(
    index: int, pack: Any, logprobs: torch.Tensor, entropy: torch.Tensor
) -> tuple[torch.Tensor, dict[str, float]]:
    return -logprobs.sum(), {"tokens": float(pack.loss_mask.sum())}


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: parameter.main_grad.clone() for name, parameter in policy.model.named_parameters()}


def load_file(folder: Path) -> dict[str, torch.Tensor]:
    return load_safetensors(folder / "model.safetensors")


def weights(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.export()}


@pytest.mark.parametrize(
    "variant",
    [{}, {"norm_topk_prob": False}, {"tied": True}, {"moe": False}],
    ids=["moe", "gates-not-renormalised", "tied-head", "dense"],
)
def test_packed_logits_equal_hugging_face(tmp_path: Path, variant: dict[str, Any]) -> None:
    folder = make_hf_folder(tmp_path / "model", **variant)
    policy = Policy.from_pretrained(folder, TRAIN, replay=variant.get("moe", True))
    pack = random_pack(LENGTHS, None)
    seen: list[torch.Tensor] = []
    hook = policy.model.output_layer.register_forward_hook(lambda module, args, output: seen.append(output[0][:, 0]))
    output = policy.logprobs([pack], replay=False)[0]
    hook.remove()
    reference = HfReference(folder)
    with torch.no_grad():
        logits, logprobs = reference.logits(pack), reference.logprobs(pack)
    assert (seen[0] - logits[pack.loss_mask.nonzero()[:, 0] - 1]).abs().max() <= 1e-4
    assert (output.logprobs - logprobs).abs().max() <= 1e-4
    assert (output.logprobs[pack.loss_mask] < 0).all() and (output.logprobs[~pack.loss_mask] == 0).all()


def test_replayed_logprobs_and_natural_routing_equal_hugging_face(moe_folder: Path) -> None:
    policy = Policy.from_pretrained(moe_folder, TRAIN)
    pack, reference = random_pack(LENGTHS, policy.shape), HfReference(moe_folder)
    replayed = policy.logprobs([pack], replay=True, natural=True)[0]
    free = policy.logprobs([pack], replay=False, natural=True)[0]
    with torch.no_grad():
        assert (replayed.logprobs - reference.logprobs(pack, pack.routing)).abs().max() <= 1e-4
        assert (free.logprobs - reference.logprobs(pack)).abs().max() <= 1e-4
        for output, routing in ((replayed, pack.routing), (free, None)):
            assert output.natural is not None
            assert torch.equal(output.natural.sort(-1).values, reference.natural(pack, routing).int().sort(-1).values)
    assert (replayed.logprobs - free.logprobs).abs().max() > 0.1, "the folder's routing must matter"


def test_temperature_divides_the_logits_of_logprobs_and_entropy(moe_folder: Path) -> None:
    policy = Policy.from_pretrained(moe_folder, TRAIN, temperature=0.7)
    pack, reference = random_pack(LENGTHS, policy.shape), HfReference(moe_folder)
    output = policy.logprobs([pack], replay=False)[0]
    with torch.no_grad():
        full = torch.log_softmax(reference.logits(pack) / 0.7, dim=-1)
        expected = torch.where(pack.loss_mask, -(full.exp() * full).sum(-1).roll(1), torch.zeros(()))
        assert (output.logprobs - reference.logprobs(pack, temperature=0.7)).abs().max() <= 1e-4
    assert (output.entropy - expected).abs().max() <= 1e-4


def test_head_in_chunks_equals_head_at_once(moe_folder: Path) -> None:
    policy = Policy.from_pretrained(moe_folder, TRAIN.model_copy(update={"lr": 1e-9}))
    pack = random_pack(LENGTHS, policy.shape)
    largest: list[int] = []
    policy.model.output_layer.register_forward_hook(lambda module, args, output: largest.append(len(output[0])))
    whole = policy.logprobs([pack], replay=True)[0]
    policy.update([pack], neg_logprob)
    whole_gradients = gradients(policy)
    policy = Policy.from_pretrained(moe_folder, TRAIN.model_copy(update={"lr": 1e-9}))
    policy.model.head_rows = 4
    largest.clear()
    policy.model.output_layer.register_forward_hook(lambda module, args, output: largest.append(len(output[0])))
    pieces = policy.logprobs([pack], replay=True)[0]
    assert max(largest) == 4 and len(largest) > 1
    policy.update([pack], neg_logprob)
    assert torch.equal(pieces.logprobs, whole.logprobs)
    assert (pieces.entropy - whole.entropy).abs().max() <= 1e-6  # a sum over the vocabulary, outside the loss
    for name, gradient in gradients(policy).items():
        assert (gradient - whole_gradients[name]).norm() <= 1e-6 * whole_gradients[name].norm() + 1e-12, name


def test_gradient_is_the_sum_over_packs(moe_folder: Path) -> None:
    policy = Policy.from_pretrained(moe_folder, TRAIN.model_copy(update={"clip_grad": 1e9}))
    packs = [random_pack((9,), policy.shape, seed=1), random_pack((6, 12), policy.shape, seed=2)]
    result = policy.update(packs, neg_logprob)
    reference = HfReference(moe_folder)
    total = sum(-reference.logprobs(pack, pack.routing).sum() for pack in packs)
    assert isinstance(total, torch.Tensor)
    torch.autograd.backward(total)
    norm = torch.sqrt(sum(((p.grad**2).sum() for p in reference.model.parameters()), torch.zeros(()))).item()
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)
    assert sum(result.losses) == pytest.approx(total.item(), rel=1e-5)
    assert [metrics["tokens"] for metrics in result.metrics] == [float(pack.loss_mask.sum()) for pack in packs]
    head = policy.model.output_layer.weight.main_grad
    assert (head - reference.model.lm_head.weight.grad).norm() <= 1e-5 * head.norm()


def test_two_ranks_step_like_one(moe_folder: Path, tmp_path: Path) -> None:
    run_ranks(2, str(moe_folder), str(tmp_path), "1,2,3,4")
    policy, norms = two_steps(moe_folder, [1, 2, 3, 4])
    for rank in (0, 1):
        assert json.loads((tmp_path / f"norms-{rank}-of-2.json").read_text()) == pytest.approx(norms, rel=1e-5)
    # The checkpoint of two ranks, taken up by one: the moments hold both steps' gradients, the weights both steps.
    other = Policy.from_pretrained(moe_folder, TRAIN)
    other.load(tmp_path / "checkpoint")
    assert other.steps == 2
    one, two = moments(policy), moments(other)
    assert one.keys() == two.keys()
    for name, moment in one.items():
        assert (two[name] - moment).norm() <= 1e-5 * moment.norm() + 1e-12, name
    start, exported, loaded = load_file(moe_folder), load_file(tmp_path / "hf"), dict(other.export())
    for name, tensor in policy.export():
        # Adam divides by the gradient's own size: an entry whose gradient is rounding noise may step either way.
        assert (exported[name] - tensor).norm() <= 1e-3 * (tensor - start[name]).norm(), name
        assert torch.equal(exported[name], loaded[name]), name


def run_ranks(ranks: int, *arguments: str) -> None:
    """Run megatron_rank.py as torchrun would. Fails with the errors of the first rank that failed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = Path(__file__).parent.parent
    shared = {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(root / "tests" / "support" / "megatron_rank.py"), *arguments],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)},
            stderr=subprocess.PIPE,
        )
        for rank in range(ranks)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=240)
            assert process.returncode == 0, errors.decode()[-3000:]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def moments(policy: Policy) -> dict[str, torch.Tensor]:
    return {
        f"{index}.{key}": values[key].clone()
        for part in policy._optimizer.chained_optimizers
        for index, values in part.optimizer.state_dict()["state"].items()
        for key in ("exp_avg", "exp_avg_sq")
    }


def test_resumed_step_is_bit_equal(moe_folder: Path, tmp_path: Path) -> None:
    train = TrainConfig(dtype="float32", lr=1e-3, weight_decay=0.1, warmup_steps=4)
    policy = Policy.from_pretrained(moe_folder, train)
    packs = [random_pack(LENGTHS, policy.shape, seed=seed) for seed in range(3)]
    for pack in packs[:2]:
        policy.update([pack], neg_logprob)
    policy.save(tmp_path / "checkpoint")
    last = policy.update([packs[2]], neg_logprob)
    resumed = Policy.from_pretrained(moe_folder, train)
    resumed.load(tmp_path / "checkpoint")
    assert resumed.steps == 2
    assert resumed.update([packs[2]], neg_logprob) == last
    for (name, tensor), (_, other) in zip(policy.export(), resumed.export(), strict=True):
        assert torch.equal(tensor, other), name
    assert last.lr == pytest.approx(1e-3 * 3 / 4)


def test_checkpoint_replaces_the_one_before_and_leaves_nothing_half_written(moe_folder: Path, tmp_path: Path) -> None:
    policy = Policy.from_pretrained(moe_folder, TRAIN)
    folder = tmp_path / "checkpoint"
    (tmp_path / ".checkpoint.writing").mkdir()  # a save that was killed
    policy.save(folder)
    policy.update([random_pack(LENGTHS, policy.shape)], neg_logprob)
    policy.save(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    other = Policy.from_pretrained(moe_folder, TRAIN)
    other.load(folder)
    assert other.steps == 1


def test_load_of_a_folder_that_is_no_checkpoint_is_refused(moe_folder: Path, tmp_path: Path) -> None:
    policy = Policy.from_pretrained(moe_folder, TRAIN)
    with pytest.raises(DataError, match="not a checkpoint"):
        policy.load(tmp_path / "missing")


def test_loss_that_is_not_finite_changes_no_weight(moe_folder: Path) -> None:
    policy = Policy.from_pretrained(moe_folder, TRAIN)
    before, pack = weights(policy), random_pack(LENGTHS, policy.shape)
    with pytest.raises(ContractError, match=r"gradient norm nan, losses .*nan"):
        policy.update([pack, pack], lambda i, p, logps, e: (logps.sum() * (float("nan") if i else 1.0), {}))
    assert policy.steps == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.export())
    assert torch.isfinite(policy.logprobs([pack], replay=True)[0].logprobs).all()


def test_gradient_that_is_not_finite_changes_no_weight(moe_folder: Path) -> None:
    policy = Policy.from_pretrained(moe_folder, TRAIN)
    before, pack = weights(policy), random_pack(LENGTHS, policy.shape)
    with pytest.raises(ContractError, match=r"gradient norm nan, losses \[0\.0\]"):
        policy.update([pack], lambda i, p, logps, e: ((logps * 0).sum().sqrt(), {}))
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.export())


def test_pack_without_loss_tokens_takes_part_with_zero_gradient(moe_folder: Path) -> None:
    policy = Policy.from_pretrained(moe_folder, TRAIN)
    pack = random_pack((2,), policy.shape)
    result = policy.update([replace(pack, loss_mask=torch.zeros(2, dtype=torch.bool))], neg_logprob)
    assert result.grad_norm == 0 and result.losses == (0,)


def test_packs_that_break_the_contract_are_refused(moe_folder: Path) -> None:
    policy = Policy.from_pretrained(moe_folder, TRAIN)
    pack = random_pack(LENGTHS, policy.shape)
    with pytest.raises(ContractError, match="no packs"):
        policy.logprobs([], replay=True)
    with pytest.raises(ContractError, match="count from 0"):
        policy.logprobs([replace(pack, positions=torch.arange(sum(LENGTHS)))], replay=True)
    with pytest.raises(ContractError, match="carries no routing"):
        policy.logprobs([replace(pack, routing=None)], replay=True)
    with pytest.raises(ContractError, match="1 of 2 packs carry"):
        policy.update([pack, replace(pack, routing=None)], neg_logprob)


def test_dense_model_trains_without_replay_and_is_refused_with_it(dense_folder: Path) -> None:
    with pytest.raises(DataError, match=r"dense model .*train\.routing=none"):
        Policy.from_pretrained(dense_folder, TRAIN)
    policy = Policy.from_pretrained(dense_folder, TRAIN, replay=False)
    pack = random_pack(LENGTHS, None)
    losses = [policy.update([pack], neg_logprob).losses[0] for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]
    with pytest.raises(ContractError, match="dense"):
        policy.logprobs([pack], replay=True)


def test_bfloat16_trains_on_float32_masters(moe_folder: Path) -> None:
    policy = Policy.from_pretrained(moe_folder, TrainConfig(dtype="bfloat16", lr=1e-4))
    pack = random_pack(LENGTHS, policy.shape)
    assert {tensor.dtype for _, tensor in policy.export()} == {torch.bfloat16}
    losses = [policy.update([pack], neg_logprob).losses[0] for _ in range(6)]
    assert losses[-1] < losses[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="states what happens without CUDA")
def test_cuda_asked_for_and_absent_is_a_config_error(moe_folder: Path) -> None:
    with pytest.raises(ConfigError, match="no CUDA device"):
        Policy.from_pretrained(moe_folder, TrainConfig(dtype="float32", device="cuda"))


def test_torch_is_untouched_outside_of_megatron_calls(moe_folder: Path) -> None:
    current_device = torch.cuda.current_device
    policy = Policy.from_pretrained(moe_folder, TRAIN)
    policy.logprobs([random_pack(LENGTHS, policy.shape)], replay=True)
    assert torch.cuda.current_device is current_device
    assert torch.zeros(1).type() == "torch.FloatTensor"
