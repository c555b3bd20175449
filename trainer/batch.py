"""Trajectories to packs: THD micro-batches, each a row of whole sequences without padding. Pure; no I/O, no torch.dist.

Letters: T tokens and S sequences of a pack, N trajectories of a step, L MoE layers, K experts per token, E per layer.

Alignment, everywhere in the trainer: a per-token value belongs to the token itself. `logprobs[t]` is
log p(tokens[t] | earlier tokens of its sequence), read from the logits at t - 1; a sequence's first token has 0.
Example, one sequence of T = 5 with a prompt of 2 and 3 sampled tokens:

    position    0  1  2  3  4
    loss_mask   -  -  x  x  x     x: the sampled tokens
    logits from    0  1  2  3     position whose logits give the token's log-prob
    row         0  1  2  3  -     T - 1 rows; the last token was never an input, its row is a filler

So every log-prob in the loss is computed through recorded rows only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from agent_r3.errors import ContractError, RoutingError
from agent_r3.routing import validate_rows
from agent_r3.types import Float32Array, Int32Array, MoEShape, Trajectory

FILLER_TOKENS = 2
"""Length of the sequence that stands in a pack without trajectories."""

FILLER_SEQUENCE = -1
"""Value in `Pack.sequences` for such a sequence."""


@dataclass(frozen=True, slots=True)
class Pack:
    """One forward pass of one rank. All tensors are on the CPU; the policy moves them."""

    tokens: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T], from 0 in each sequence
    cu_seqlens: torch.Tensor  # int32 [S + 1], starts at 0, ends at T
    loss_mask: torch.Tensor  # bool [T], True on sampled tokens that count
    routing: torch.Tensor | None  # int32 [L, T, K], distinct experts at every position; None: no replay
    has_row: torch.Tensor  # bool [T], True where `routing` was recorded, False where it is a filler
    advantages: torch.Tensor  # float32 [T], 0 outside the loss
    rollout_logprobs: torch.Tensor  # float32 [T], 0 outside the loss
    versions: torch.Tensor  # int32 [T]
    sequences: tuple[int, ...]  # [S], the trajectory's index in the step, or FILLER_SEQUENCE

    def spans(self) -> list[tuple[int, int, int]]:
        """(trajectory index, start, stop) of every real sequence."""
        bounds = self.cu_seqlens.tolist()
        return [
            (index, start, stop)
            for index, start, stop in zip(self.sequences, bounds[:-1], bounds[1:], strict=True)
            if index != FILLER_SEQUENCE
        ]


def check_trajectory(trajectory: Trajectory, shape: MoEShape | None) -> None:
    """Refuse a trajectory whose parts do not fit each other, or, with a shape, whose rows do not fit the model.

    Raises ContractError or RoutingError with the numbers.
    """
    total, name = len(trajectory.tokens), trajectory.id
    if total < 2:
        raise ContractError(f"trajectory {name}: {total} tokens, at least 2 are needed")
    for field in ("loss_mask", "logprobs", "versions"):
        length = len(getattr(trajectory, field))
        if length != total:
            raise ContractError(f"trajectory {name}: {length} entries of {field} for {total} tokens")
    if trajectory.loss_mask[0]:
        raise ContractError(f"trajectory {name}: token 0 is marked as sampled, but nothing precedes it")
    sampled = trajectory.logprobs[trajectory.loss_mask]
    bad = int((~np.isfinite(sampled)).sum() + (sampled > 0).sum())
    if bad:
        raise ContractError(f"trajectory {name}: {bad} of {len(sampled)} log-probs are positive or not finite")
    if shape is not None:
        _check_rows(trajectory, shape)


def _check_rows(trajectory: Trajectory, shape: MoEShape) -> None:
    routing, name = trajectory.routing, trajectory.id
    wanted = (len(trajectory.tokens) - 1, shape.num_layers, shape.top_k)
    if routing.start != 0 or routing.experts.shape != wanted:
        raise RoutingError(
            f"trajectory {name}: rows from {routing.start} of shape {tuple(routing.experts.shape)}, "
            f"wanted from 0 of shape {wanted}"
        )
    validate_rows(routing.experts, shape, f"trajectory {name}")


def check_version(trajectory: Trajectory, version: int) -> None:
    """Refuse a trajectory with a token of another policy version. Raises ContractError with the numbers."""
    other = trajectory.versions != version
    if other.any():
        found = sorted({int(value) for value in trajectory.versions[other]})
        raise ContractError(
            f"trajectory {trajectory.id}: {int(other.sum())} of {len(other)} tokens come from policy version "
            f"{found}, the trainer is at {version}"
        )


def plan_packs(lengths: Sequence[int], ranks: int, micro_batch_tokens: int) -> list[list[tuple[int, ...]]]:
    """Which trajectory goes to which rank and pack: `plan[rank][pack]` holds indices into `lengths`.

    Ranks are balanced by tokens (longest first, to the rank with the fewest); in a rank, packs are filled first fit,
    longest first, to at most `micro_batch_tokens`; a longer trajectory goes alone. Every rank gets equally many packs
    (they take part in each other's collectives): the missing ones are empty tuples, which become filler packs.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for index in order:
        rank = loads.index(min(loads))
        shares[rank].append(index)
        loads[rank] += lengths[index]
    plan = [_first_fit(share, lengths, micro_batch_tokens) for share in shares]
    count = max(len(packs) for packs in plan)
    return [packs + [()] * (count - len(packs)) for packs in plan]


def _first_fit(share: Sequence[int], lengths: Sequence[int], limit: int) -> list[tuple[int, ...]]:
    packs: list[list[int]] = []
    room: list[int] = []
    for index in share:
        length = lengths[index]
        place = next((i for i, free in enumerate(room) if free >= length), None)
        if place is None:
            packs.append([index])
            room.append(limit - length)
        else:
            packs[place].append(index)
            room[place] -= length
    return [tuple(pack) for pack in packs]


def make_packs(
    packs: Sequence[tuple[int, ...]],
    trajectories: Mapping[int, Trajectory],
    advantages: Float32Array,
    shape: MoEShape | None,
) -> list[Pack]:
    """Build one rank's packs of `plan_packs`. `advantages` is [N], one per trajectory of the step.

    `shape` says what routing rows must look like; None leaves routing out (the policy routes by itself).
    Raises ContractError or RoutingError for a trajectory that does not fit.
    """
    for index, trajectory in trajectories.items():
        check_trajectory(trajectory, shape)
        if not np.isfinite(advantages[index]):
            raise ContractError(f"trajectory {trajectory.id}: advantage {advantages[index]}")
    return [
        _make_pack([(index, trajectories[index], float(advantages[index])) for index in pack], shape)
        if pack
        else filler_pack(shape)
        for pack in packs
    ]


def _make_pack(members: Sequence[tuple[int, Trajectory, float]], shape: MoEShape | None) -> Pack:
    lengths = [len(trajectory.tokens) for _, trajectory, _ in members]
    bounds = np.cumsum([0, *lengths])
    total = int(bounds[-1])
    routing = filler_rows(total, shape) if shape else None
    has_row = np.zeros(total, dtype=np.bool_)
    advantages = np.zeros(total, dtype=np.float32)
    for start, (_, trajectory, advantage) in zip(bounds[:-1], members, strict=True):
        stop = start + len(trajectory.tokens)
        advantages[start:stop][trajectory.loss_mask] = advantage
        if routing is not None:
            routing[:, start : stop - 1] = trajectory.routing.experts.transpose(1, 0, 2)
            has_row[start : stop - 1] = True
    mask = np.concatenate([trajectory.loss_mask for _, trajectory, _ in members])
    logprobs = np.concatenate([trajectory.logprobs for _, trajectory, _ in members]).astype(np.float32)
    return Pack(
        tokens=torch.from_numpy(np.concatenate([trajectory.tokens for _, trajectory, _ in members]).astype(np.int64)),
        positions=torch.from_numpy(np.concatenate([np.arange(length, dtype=np.int64) for length in lengths])),
        cu_seqlens=torch.from_numpy(bounds.astype(np.int32)),
        loss_mask=torch.from_numpy(mask),
        routing=None if routing is None else torch.from_numpy(routing),
        has_row=torch.from_numpy(has_row),
        advantages=torch.from_numpy(advantages),
        rollout_logprobs=torch.from_numpy(np.where(mask, logprobs, np.float32(0))),
        versions=torch.from_numpy(np.concatenate([trajectory.versions for _, trajectory, _ in members])),
        sequences=tuple(index for index, _, _ in members),
    )


def filler_pack(shape: MoEShape | None) -> Pack:
    """A pack outside the loss, for a rank with fewer packs than the others."""
    total = FILLER_TOKENS
    return Pack(
        tokens=torch.zeros(total, dtype=torch.int64),
        positions=torch.arange(total, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, total], dtype=torch.int32),
        loss_mask=torch.zeros(total, dtype=torch.bool),
        routing=torch.from_numpy(filler_rows(total, shape)) if shape else None,
        has_row=torch.zeros(total, dtype=torch.bool),
        advantages=torch.zeros(total, dtype=torch.float32),
        rollout_logprobs=torch.zeros(total, dtype=torch.float32),
        versions=torch.zeros(total, dtype=torch.int32),
        sequences=(FILLER_SEQUENCE,),
    )


def filler_rows(total: int, shape: MoEShape) -> Int32Array:
    """Rows for positions without one: [L, total, K], distinct in a row, spread evenly over experts in each layer.

    Megatron takes any row for real: -1 fails, a repeated expert silently collapses to one at 1/K, zeros overload it.
    """
    slots = np.arange(total, dtype=np.int32)[None, :, None] * shape.top_k + np.arange(shape.top_k, dtype=np.int32)
    layers = np.arange(shape.num_layers, dtype=np.int32)[:, None, None]
    return ((slots + layers) % shape.num_experts).astype(np.int32)
