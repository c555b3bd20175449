"""From turns to a trajectory: the arrays one turn brings, and the splice of all of them. Pure; no I/O."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agent_r3.errors import ContractError
from agent_r3.routing import RoutingLedger, rows_from
from agent_r3.types import BoolArray, Ending, Float32Array, Int32Array, Routing, Trajectory, Turn


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """n tokens that one turn appended at `start`, with the routing rows that came with them."""

    index: int
    start: int
    tokens: Int32Array  # [n], n >= 1
    loss_mask: BoolArray  # [n], True on sampled tokens
    logprobs: Float32Array  # [n], 0 where loss_mask is False
    versions: Int32Array  # [n]
    routing: Routing  # from max(start - 1, 0) to start + n - 1
    cached_tokens: int

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    @classmethod
    def of(cls, turn: Turn) -> "TurnRecord":
        """The turn's arrays side by side. Raises ContractError when they do not fit together."""
        prompt, sampled = len(turn.prompt_ids), len(turn.sampled_ids)
        if sampled == 0 or len(turn.logprobs) != sampled:
            raise ContractError(
                f"turn {turn.index}: {sampled} sampled tokens (at least 1) with {len(turn.logprobs)} log-probs"
            )
        mask = np.zeros(prompt + sampled, np.bool_)
        mask[prompt:] = True
        logprobs = np.zeros(prompt + sampled, np.float32)
        logprobs[prompt:] = turn.logprobs
        record = cls(
            index=turn.index,
            start=turn.start,
            tokens=np.concatenate([turn.prompt_ids, turn.sampled_ids]).astype(np.int32, copy=False),
            loss_mask=mask,
            logprobs=logprobs,
            versions=np.full(prompt + sampled, turn.policy_version, np.int32),
            routing=turn.routing,
            cached_tokens=turn.cached_tokens,
        )
        record.check()
        return record

    def check(self) -> None:
        """Invariants of one record. Raises ContractError with the numbers."""
        what, n = f"turn {self.index}", len(self.tokens)
        lengths = (n, len(self.loss_mask), len(self.logprobs), len(self.versions))
        if n == 0 or len(set(lengths)) != 1:
            raise ContractError(f"{what}: lengths of tokens, mask, log-probs, versions differ or are 0: {lengths}")
        if (self.index == 0) != (self.start == 0) or self.start < 0:
            raise ContractError(f"{what}: starts at token {self.start}; only turn 0 starts at 0")
        if self.routing.start != rows_from(self.start) or self.routing.stop != self.stop - 1:
            raise ContractError(
                f"{what}: tokens {self.start}..{self.stop - 1} need rows {rows_from(self.start)}..{self.stop - 2}, "
                f"got {self.routing.start}..{self.routing.stop - 1}"
            )
        if not np.isfinite(self.logprobs).all():
            raise ContractError(f"{what}: {int((~np.isfinite(self.logprobs)).sum())} log-probs are not finite")
        if self.logprobs[~self.loss_mask].any():
            raise ContractError(f"{what}: log-probs on tokens that were not sampled")
        if int(self.tokens.min()) < 0:
            raise ContractError(f"{what}: negative token id {int(self.tokens.min())}")


@dataclass(frozen=True, slots=True)
class TrajectoryEnd:
    """What is known of a trajectory besides its turns once it has ended."""

    id: str
    group_id: str
    task_id: str
    reward: float
    ending: Ending
    prompt_tokens: int
    cached_tokens: int
    reprefilled_tokens: int


def splice(records: Sequence[TurnRecord], end: TrajectoryEnd) -> Trajectory:
    """Join the turns of a trajectory: T tokens, T-1 rows.

    Raises ContractError (RoutingError for rows) with the numbers for a missing, repeated or misplaced turn.
    """
    what = f"trajectory {end.id}"
    if not records:
        raise ContractError(f"{what}: no turns")
    total = sum(len(record.tokens) for record in records)
    ledger = RoutingLedger(what, capacity=total)
    length = 0
    for place, record in enumerate(records):
        if record.index != place or record.start != length:
            raise ContractError(
                f"{what}: turn {place} at token {length} expected, got turn {record.index} at token {record.start}"
            )
        length = record.stop
        ledger.append(record.routing, version=int(record.versions[0]), total_tokens=length)
    return Trajectory(
        id=end.id,
        group_id=end.group_id,
        task_id=end.task_id,
        tokens=np.concatenate([record.tokens for record in records]),
        loss_mask=np.concatenate([record.loss_mask for record in records]),
        logprobs=np.concatenate([record.logprobs for record in records]),
        versions=np.concatenate([record.versions for record in records]),
        routing=ledger.finish(total),
        reward=end.reward,
        ending=end.ending,
        turns=len(records),
        prompt_tokens=end.prompt_tokens,
        cached_tokens=end.cached_tokens,
        reprefilled_tokens=end.reprefilled_tokens,
    )


def engine_counters(turns: Sequence[Turn]) -> dict[str, int]:
    """What the engine was sent over an episode: prompt_tokens, cached_tokens, reprefilled_tokens.

    Of a turn's `start` earlier tokens all but the last one had been inputs before, so `start - 1` should be cached.
    """
    return {
        "prompt_tokens": sum(turn.start + len(turn.prompt_ids) for turn in turns),
        "cached_tokens": sum(turn.cached_tokens for turn in turns),
        "reprefilled_tokens": sum(max(0, turn.start - 1 - turn.cached_tokens) for turn in turns),
    }
