"""KL, F(2) and route mismatch are exact sums: pooled in any grouping they are the same."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r3.trainer.diagnostics import (
    Diagnostics,
    RatioSums,
    RouteSums,
    RowSums,
    fallback_sums,
    ratio_sums,
    route_sums,
    row_sums,
)
from agent_r3.types import Routing
from tests.support.trajectories import SHAPE, make_trajectory, random_rows

LOGPROBS = st.lists(st.floats(-20, 0, width=32), max_size=30)


def test_ratio_figures_of_a_worked_example() -> None:
    # r = 1, 3, 1/4: KL terms 0, 3-1-ln 3, 1/4-1+ln 4
    rollout = np.log(np.array([0.5, 0.1, 0.8], np.float32))
    train = np.log(np.array([0.5, 0.3, 0.2], np.float32))
    metrics = ratio_sums(train, rollout).metrics("replay")
    assert metrics["r3/kl_replay"] == pytest.approx((2 - np.log(3) - 0.75 + np.log(4)) / 3, rel=1e-5)
    assert metrics["r3/f2_replay"] == pytest.approx(2 / 3)
    assert metrics["r3/max_ratio_replay"] == pytest.approx(4, rel=1e-5)
    assert metrics["r3/abs_dlogp_replay"] == pytest.approx((np.log(3) + np.log(4)) / 3, rel=1e-5)


def test_a_ratio_of_exactly_two_is_not_extreme() -> None:
    assert ratio_sums(np.zeros(1, np.float32), -np.log(np.full(1, 1.99, np.float32))).extreme == 0
    assert ratio_sums(np.zeros(1, np.float32), -np.log(np.full(1, 2.01, np.float32))).extreme == 1


def test_tiny_differences_keep_their_digits() -> None:
    sums = ratio_sums(np.full(1, -1e-4, np.float32), np.zeros(1, np.float32))
    assert sums.kl == pytest.approx(5e-9, rel=1e-3)


@given(LOGPROBS, st.integers(0, 30), st.randoms())
def test_pooling_in_any_grouping_gives_the_same_figures(values: list[float], cut: int, random: object) -> None:
    train = np.array(values, np.float32)
    rollout = np.array(values[::-1], np.float32)
    whole = ratio_sums(train, rollout)
    parts = ratio_sums(train[:cut], rollout[:cut]) + ratio_sums(train[cut:], rollout[cut:])
    assert (parts.tokens, parts.extreme, parts.max_ratio) == (whole.tokens, whole.extreme, whole.max_ratio)
    assert parts.kl == pytest.approx(whole.kl, rel=1e-9, abs=1e-12)
    assert whole.kl >= 0


def test_nothing_seen_reports_nothing_rather_than_zero() -> None:
    assert Diagnostics().metrics() == {"r3/diagnosed_tokens": 0.0}
    assert ratio_sums(np.zeros(0, np.float32), np.zeros(0, np.float32)) == RatioSums()


def test_expert_sets_are_compared_without_order_and_only_where_rows_exist() -> None:
    rng = np.random.default_rng(0)
    recorded = random_rows(rng, 5).transpose(1, 0, 2).astype(np.int32)  # [L, T, K]
    natural = recorded[..., ::-1].copy()
    has_row = np.array([True, True, True, True, False])
    natural[:, 4] = (natural[:, 4] + 1) % 8
    assert route_sums(natural, recorded, has_row) == RouteSums(8, 0, 4, 0, 1, 0)
    natural[0, 2, 0] = next(e for e in range(8) if e not in recorded[0, 2])
    natural[1, 2, 0] = next(e for e in range(8) if e not in recorded[1, 2])
    natural[1, 3, 0] = next(e for e in range(8) if e not in recorded[1, 3])
    sums = route_sums(natural, recorded, has_row)
    assert sums == RouteSums(8, 3, 4, 2, 1, 1)
    assert (sums + RouteSums(8, 0, 4, 0, 1, 0)).metrics() == {
        "r3/mismatch_routers": 3 / 16,
        "r3/mismatch_tokens": 2 / 8,
        "r3/mismatch_sequences": 1 / 2,
    }


def test_coverage_bytes_and_mixed_versions() -> None:
    rng = np.random.default_rng(0)
    whole = make_trajectory(rng, 9)
    bare = replace(make_trajectory(rng, 5), routing=Routing(0, np.zeros((4, 0, 0), np.uint8)))
    mixed = replace(whole, versions=np.arange(9, dtype=np.int32))
    sums = row_sums(whole) + row_sums(bare) + row_sums(mixed)
    assert sums == RowSums(3, 23, 16, 20, 2 * 8 * SHAPE.num_layers * SHAPE.top_k, 1)
    assert sums.metrics()["r3/coverage"] == 16 / 20
    assert sums.metrics()["r3/rows_missing"] == 4.0


def test_a_trained_token_whose_preceding_position_has_no_row_counts_as_fallback() -> None:
    loss_mask = np.array([False, True, True, False, True])
    has_row = np.array([True, False, True, True, False])
    assert fallback_sums(loss_mask, has_row) == RowSums(trained=3, fallback=1)
