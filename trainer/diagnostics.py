"""How far the trainer's policy is from the rollout's: pure sums over sampled tokens and routers, mergeable by `+`.

r = pi_train / pi_rollout on sampled tokens. KL = mean(r - 1 - log r), F(tau) = share of tokens with max(r, 1/r) > tau
(arXiv 2510.11370, section 3). Everything is kept as sums, so a value pooled over packs, ranks and steps is exact; the
KL is heavy-tailed (rare route flips make the outliers), so pooled values and the maximum are what to look at.
"""

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from agent_r3.types import BoolArray, Float32Array, Trajectory

TAU = 2.0
"""Threshold of F(tau)."""

IntArray = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class RatioSums:
    """Of the ratio r on sampled tokens."""

    tokens: int = 0
    kl: float = 0.0  # sum of r - 1 - log r
    extreme: int = 0  # tokens with max(r, 1/r) > TAU
    abs_log_ratio: float = 0.0  # sum of |log r|
    max_ratio: float = 1.0  # largest max(r, 1/r)

    def __add__(self, other: "RatioSums") -> "RatioSums":
        return RatioSums(
            self.tokens + other.tokens,
            self.kl + other.kl,
            self.extreme + other.extreme,
            self.abs_log_ratio + other.abs_log_ratio,
            max(self.max_ratio, other.max_ratio),
        )

    def metrics(self, suffix: str) -> dict[str, float]:
        """`r3/kl_<suffix>` and its kind; empty when no token was seen."""
        if not self.tokens:
            return {}
        return {
            f"r3/kl_{suffix}": self.kl / self.tokens,
            f"r3/f2_{suffix}": self.extreme / self.tokens,
            f"r3/abs_dlogp_{suffix}": self.abs_log_ratio / self.tokens,
            f"r3/max_ratio_{suffix}": self.max_ratio,
        }


def ratio_sums(train: Float32Array, rollout: Float32Array) -> RatioSums:
    """Of two arrays of log-probs of the same sampled tokens, [n] each."""
    if not len(train):
        return RatioSums()
    log_ratio = train.astype(np.float64) - rollout.astype(np.float64)
    # exp(x) - 1 - x loses all digits near 0, where a replayed policy is; expm1 does not.
    kl = np.expm1(log_ratio) - log_ratio
    spread = np.abs(log_ratio)
    return RatioSums(
        tokens=len(log_ratio),
        kl=float(kl.sum()),
        extreme=int((spread > np.log(TAU)).sum()),
        abs_log_ratio=float(spread.sum()),
        max_ratio=float(np.exp(spread.max())),
    )


@dataclass(frozen=True, slots=True)
class RouteSums:
    """How many expert sets differ between the trainer's natural choice and the recorded rows."""

    routers: int = 0  # (layer, token) pairs
    routers_differ: int = 0
    tokens: int = 0
    tokens_differ: int = 0  # in at least one layer
    sequences: int = 0
    sequences_differ: int = 0  # in at least one token

    def __add__(self, other: "RouteSums") -> "RouteSums":
        return RouteSums(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def metrics(self) -> dict[str, float]:
        if not self.routers:
            return {}
        return {
            "r3/mismatch_routers": self.routers_differ / self.routers,
            "r3/mismatch_tokens": self.tokens_differ / self.tokens,
            "r3/mismatch_sequences": self.sequences_differ / self.sequences,
        }


def route_sums(natural: IntArray, recorded: IntArray, has_row: BoolArray) -> RouteSums:
    """Compare the expert sets of one sequence: [L, T, K] each, in any order within a row; only where `has_row` [T]."""
    same = np.sort(natural[:, has_row], axis=-1) == np.sort(recorded[:, has_row], axis=-1)
    differ = ~same.all(axis=-1)  # [L, rows]
    if not differ.size:
        return RouteSums()
    return RouteSums(
        routers=differ.size,
        routers_differ=int(differ.sum()),
        tokens=differ.shape[1],
        tokens_differ=int(differ.any(axis=0).sum()),
        sequences=1,
        sequences_differ=int(differ.any()),
    )


@dataclass(frozen=True, slots=True)
class RowSums:
    """What the trajectories brought along."""

    trajectories: int = 0
    tokens: int = 0
    rows: int = 0
    rows_wanted: int = 0  # T - 1 per trajectory
    row_bytes: int = 0
    mixed_versions: int = 0  # trajectories with tokens of more than one policy version
    trained: int = 0  # positions whose logits gave a log-prob of the loss
    fallback: int = 0  # of those, replayed without a recorded row

    def __add__(self, other: "RowSums") -> "RowSums":
        return RowSums(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def metrics(self) -> dict[str, float]:
        if not self.rows_wanted:
            return {}
        fallback = {"r3/fallback_fraction": self.fallback / self.trained} if self.trained else {}
        return {
            **fallback,
            "r3/coverage": self.rows / self.rows_wanted,
            "r3/rows_missing": float(self.rows_wanted - self.rows),
            "r3/bytes_per_token": self.row_bytes / self.tokens,
            "r3/mixed_version_fraction": self.mixed_versions / self.trajectories,
        }


def row_sums(trajectory: Trajectory) -> RowSums:
    """Coverage, size and versions of one trajectory. An engine that records none gives rows of no layers."""
    experts = trajectory.routing.experts
    return RowSums(
        trajectories=1,
        tokens=len(trajectory.tokens),
        rows=len(experts) if experts.size else 0,
        rows_wanted=len(trajectory.tokens) - 1,
        row_bytes=experts.nbytes,
        mixed_versions=int(len(np.unique(trajectory.versions)) > 1),
    )


def fallback_sums(loss_mask: BoolArray, has_row: BoolArray) -> RowSums:
    """Of one replayed pack, [T] each: the log-prob of token t went through the rows of t - 1 and before."""
    used = np.flatnonzero(loss_mask) - 1
    return RowSums(trained=len(used), fallback=int((~has_row[used]).sum()))


@dataclass(frozen=True, slots=True)
class Diagnostics:
    """One step's, or one run's: `+` pools."""

    replay: RatioSums = RatioSums()
    native: RatioSums = RatioSums()
    routes: RouteSums = RouteSums()
    rows: RowSums = RowSums()

    def __add__(self, other: "Diagnostics") -> "Diagnostics":
        return Diagnostics(
            self.replay + other.replay,
            self.native + other.native,
            self.routes + other.routes,
            self.rows + other.rows,
        )

    def metrics(self) -> dict[str, float]:
        """Metric name -> value. `r3/diagnosed_tokens` weighs a step when steps are pooled."""
        return {
            **self.replay.metrics("replay"),
            **self.native.metrics("native"),
            **self.routes.metrics(),
            **self.rows.metrics(),
            "r3/diagnosed_tokens": float(max(self.replay.tokens, self.native.tokens)),
        }
