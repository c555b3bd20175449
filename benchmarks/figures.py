"""Figures that the benchmarks share. Pure."""

from collections.abc import Mapping, Sequence

import numpy as np


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between neighbours. Raises ValueError for no values."""
    if not values:
        raise ValueError("no values to take a percentile of")
    return float(np.percentile(np.asarray(values), percent))


def round_trips(prefix: str, at_1_ms: Sequence[float], at_32_ms: Sequence[float]) -> dict[str, float]:
    """p50 and p95 of command round trips in one container alone and in each of 32 at the same time."""
    return {
        f"{prefix}exec_p50_ms": percentile(at_1_ms, 50),
        f"{prefix}exec_p95_ms": percentile(at_1_ms, 95),
        f"{prefix}exec_p50_ms_32": percentile(at_32_ms, 50),
        f"{prefix}exec_p95_ms_32": percentile(at_32_ms, 95),
    }


def speedups(figures: Mapping[str, float], peers: Sequence[str]) -> dict[str, float]:
    """How many times faster our round trip is than each peer's, by medians, at 1 and at 32 containers."""
    return {
        f"exec_speedup_vs_{peer}{at}": figures[f"{peer}_exec_p50_ms{at}"] / figures[f"exec_p50_ms{at}"]
        for peer in peers
        for at in ("", "_32")
    }
