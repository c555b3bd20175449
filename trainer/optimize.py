"""The numbers of one step on one rank: old log-probs, diagnostics with and without replay, optimizer steps."""

from collections.abc import Sequence
from dataclasses import asdict

import torch

from agent_r3.config import Config
from agent_r3.trainer.batch import Pack
from agent_r3.trainer.batch_loader import Batch, BatchLoader, MiniBatch
from agent_r3.trainer.diagnostics import Diagnostics, RowSums, fallback_sums, ratio_sums, route_sums
from agent_r3.trainer.losses import LossSums, PolicyLoss
from agent_r3.trainer.megatron import PackOutput, Policy
from agent_r3.types import Float32Array, Trajectory

Logprobs = dict[int, Float32Array]
"""Sample index -> log-probs of its sampled tokens."""

OldLogprobs = tuple[tuple[torch.Tensor, ...], ...]
"""Of the policy before the step's first update: [mini-step][pack] -> float32 [T]."""


def recompute(policy: Policy, mini_batches: Sequence[MiniBatch], *, replay: bool) -> OldLogprobs:
    """One forward pass over the whole batch; with `replay` its gates are those that the update will use."""
    rest = iter(policy.logprobs([pack for mini_batch in mini_batches for pack in mini_batch.packs], replay=replay))
    return tuple(tuple(next(rest).logprobs for _ in mini_batch.packs) for mini_batch in mini_batches)


def diagnose(policy: Policy, loader: BatchLoader, batch: Batch, config: Config) -> Diagnostics:
    """KL, F(2) and route mismatch with and without replay, on the same samples.

    They are drawn from all episodes of the step, those of groups without a gradient too: what rollout and trainer
    disagree on does not depend on the reward.
    """
    result = Diagnostics(
        rows=sum(
            (
                fallback_sums(pack.loss_mask.numpy(), pack.has_row.numpy())
                for mini_batch in batch.mini_batches
                for pack in mini_batch.packs
                if pack.routing is not None
            ),
            RowSums(),
        )
    )
    if not config.train.diagnostics_trajectories:
        return result
    packs = loader.packs(batch.diagnosed, batch.advantages)
    recorded = any(pack.routing is not None for pack in packs)
    native = policy.logprobs(packs, replay=False, natural=recorded)
    replay = _by_sample(packs, policy.logprobs(packs, replay=True)) if recorded else {}
    return sum((_compare(*pair, batch.diagnosed, replay) for pair in zip(packs, native, strict=True)), result)


def _compare(pack: Pack, native: PackOutput, trajectories: dict[int, Trajectory], replay: Logprobs) -> Diagnostics:
    result = Diagnostics()
    own = _by_sample([pack], [native])
    for index, start, stop in pack.spans():
        trajectory = trajectories[index]
        rollout = trajectory.logprobs[trajectory.loss_mask]
        part = Diagnostics(native=ratio_sums(own[index], rollout))
        if index in replay:
            part += Diagnostics(replay=ratio_sums(replay[index], rollout))
        if native.natural is not None and pack.routing is not None:
            span = slice(start, stop)
            part += Diagnostics(
                routes=route_sums(
                    native.natural[:, span].numpy(), pack.routing[:, span].numpy(), pack.has_row[span].numpy()
                )
            )
        result += part
    return result


def update(
    policy: Policy, mini_batches: Sequence[MiniBatch], old: OldLogprobs, config: Config
) -> tuple[LossSums, dict[str, float]]:
    """One optimizer step a mini-batch. Returns this rank's sums, and figures that are the same on every rank."""
    sums = LossSums()
    norms, lr = [], 0.0
    for mini_batch, old_logprobs in zip(mini_batches, old, strict=True):
        loss = PolicyLoss(
            config.train, tokens=mini_batch.tokens, sequences=mini_batch.sequences, horizon=config.agent.max_tokens
        )

        def evaluate(
            index: int,
            pack: Pack,
            logprobs: torch.Tensor,
            entropy: torch.Tensor,
            loss: PolicyLoss = loss,
            old_logprobs: tuple[torch.Tensor, ...] = old_logprobs,
        ) -> tuple[torch.Tensor, dict[str, float]]:
            value, part = loss(pack, logprobs, old_logprobs[index], entropy)
            return value, asdict(part)

        result = policy.update(mini_batch.packs, evaluate)
        sums = sum((LossSums(**part) for part in result.metrics), sums)  # type: ignore[arg-type]
        norms.append(result.grad_norm)
        lr = result.lr
    return sums, {
        "train/grad_norm": sum(norms) / len(norms),
        "train/lr": lr,
        "train/optimizer_steps": float(len(norms)),
    }


def _by_sample(packs: Sequence[Pack], outputs: Sequence[PackOutput]) -> Logprobs:
    return {
        index: output.logprobs[start:stop][pack.loss_mask[start:stop]].numpy()
        for pack, output in zip(packs, outputs, strict=True)
        for index, start, stop in pack.spans()
    }
