"""Packs: whole sequences, exact rows, balanced ranks; what does not fit is refused with numbers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r3.errors import ContractError, RoutingError
from agent_r3.trainer.batch import (
    FILLER_SEQUENCE,
    check_trajectory,
    check_version,
    filler_rows,
    make_packs,
    plan_packs,
)
from agent_r3.types import MoEShape, Routing
from tests.support.trajectories import SHAPE, make_trajectory

LENGTHS = st.lists(st.integers(2, 40), max_size=20)


@given(LENGTHS, st.integers(1, 4), st.integers(2, 60))
def test_plan_places_every_trajectory_once_within_the_budget(lengths: list[int], ranks: int, limit: int) -> None:
    plan = plan_packs(lengths, ranks, limit)
    assert sorted(index for packs in plan for pack in packs for index in pack) == list(range(len(lengths)))
    for packs in plan:
        assert all(sum(lengths[i] for i in pack) <= limit or len(pack) == 1 for pack in packs)


@given(LENGTHS, st.integers(1, 4), st.integers(2, 60))
def test_plan_gives_ranks_equally_many_packs_and_balanced_tokens(lengths: list[int], ranks: int, limit: int) -> None:
    plan = plan_packs(lengths, ranks, limit)
    assert len({len(packs) for packs in plan}) == 1
    loads = [sum(lengths[i] for pack in packs for i in pack) for packs in plan]
    assert max(loads) - min(loads) <= max(lengths, default=0)


@settings(max_examples=30, deadline=None)
@given(LENGTHS.filter(bool), st.integers(10, 60), st.integers(0, 2**32 - 1))
def test_packs_hold_the_trajectories_unchanged(lengths: list[int], limit: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    trajectories = {i: make_trajectory(rng, n, name=str(i), version=i) for i, n in enumerate(lengths)}
    advantages = rng.standard_normal(len(lengths)).astype(np.float32)
    (plan,) = plan_packs(lengths, 1, limit)
    for pack in make_packs(plan, trajectories, advantages, SHAPE):
        assert pack.routing is not None
        for index, start, stop in pack.spans():
            t = trajectories[index]
            span = slice(start, stop)
            assert pack.tokens[span].tolist() == t.tokens.tolist()
            assert pack.positions[span].tolist() == list(range(len(t.tokens)))
            assert pack.loss_mask[span].tolist() == t.loss_mask.tolist()
            assert pack.versions[span].tolist() == t.versions.tolist()
            np.testing.assert_array_equal(pack.rollout_logprobs[span].numpy(), t.logprobs)
            np.testing.assert_array_equal(pack.advantages[span].numpy(), np.where(t.loss_mask, advantages[index], 0))
            np.testing.assert_array_equal(pack.routing[:, start : stop - 1].permute(1, 0, 2).numpy(), t.routing.experts)
            assert pack.has_row[span].tolist() == [True] * (stop - start - 1) + [False]
        ordered = pack.routing.sort(-1).values
        assert (ordered[..., 1:] != ordered[..., :-1]).all()
        assert pack.routing.dtype == torch.int32 and pack.tokens.dtype == torch.int64


def test_a_rank_without_trajectories_gets_a_filler_pack_outside_the_loss() -> None:
    plan = plan_packs([5], 2, 16)
    assert plan == [[(0,)], [()]]
    (pack,) = make_packs(plan[1], {}, np.zeros(1, np.float32), SHAPE)
    assert pack.sequences == (FILLER_SEQUENCE,) and pack.spans() == []
    assert not pack.loss_mask.any() and not pack.has_row.any()


@given(st.integers(1, 64), st.integers(1, 3), st.integers(1, 16), st.data())
def test_filler_rows_are_distinct_and_spread_evenly(total: int, layers: int, experts: int, data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, experts))
    rows = filler_rows(total, MoEShape(layers, experts, top_k))
    ordered = np.sort(rows, axis=-1)
    assert (ordered[..., 1:] != ordered[..., :-1]).all()
    for layer in rows:
        counts = np.bincount(layer.ravel(), minlength=experts)
        assert counts.max() - counts.min() <= 1


def test_without_replay_packs_carry_no_rows_and_need_none() -> None:
    trajectory = make_trajectory(np.random.default_rng(0), 6)
    bare = replace(trajectory, routing=Routing(0, np.zeros((5, 0, 0), np.uint8)))
    (pack,) = make_packs([(0,)], {0: bare}, np.zeros(1, np.float32), None)
    assert pack.routing is None and not pack.has_row.any()


def _rows(change: str) -> Routing:
    rows = make_trajectory(np.random.default_rng(1), 9).routing.experts.copy()
    match change:
        case "missing":
            return Routing(0, rows[:-1])
        case "extra":
            return Routing(0, np.concatenate([rows, rows[:1]]))
        case "late":
            return Routing(1, rows)
        case "range":
            rows[3, 1, 0] = 8
        case "twice":
            rows[3, 1, 0] = rows[3, 1, 1]
        case "layer":
            return Routing(0, rows[:, :1])
    return Routing(0, rows)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", r"\(7, 2, 2\).*\(8, 2, 2\)"),
        ("extra", r"\(9, 2, 2\).*\(8, 2, 2\)"),
        ("late", "rows from 1"),
        ("range", "out of range 0..7"),
        ("twice", "1 routers hold an expert twice"),
        ("layer", r"\(8, 1, 2\)"),
    ],
)
def test_rows_that_do_not_fit_are_refused_with_numbers(change: str, message: str) -> None:
    trajectory = replace(make_trajectory(np.random.default_rng(1), 9), routing=_rows(change))
    with pytest.raises(RoutingError, match=message):
        make_packs([(0,)], {0: trajectory}, np.zeros(1, np.float32), SHAPE)


@pytest.mark.parametrize("field", ["loss_mask", "logprobs", "versions"])
def test_arrays_of_another_length_are_refused(field: str) -> None:
    trajectory = make_trajectory(np.random.default_rng(1), 9)
    short = replace(trajectory, **{field: getattr(trajectory, field)[:-1]})
    with pytest.raises(ContractError, match=f"8 entries of {field} for 9 tokens"):
        check_trajectory(short, SHAPE)


def test_a_sampled_first_token_is_refused() -> None:
    trajectory = make_trajectory(np.random.default_rng(1), 9)
    with pytest.raises(ContractError, match="nothing precedes it"):
        check_trajectory(replace(trajectory, loss_mask=np.ones(9, np.bool_)), SHAPE)


@pytest.mark.parametrize("value", [0.5, np.nan, -np.inf])
def test_impossible_logprobs_are_refused(value: float) -> None:
    trajectory = make_trajectory(np.random.default_rng(1), 9)
    logprobs = trajectory.logprobs.copy()
    logprobs[8] = value
    with pytest.raises(ContractError, match="1 of 5 log-probs"):
        check_trajectory(replace(trajectory, logprobs=logprobs), SHAPE)


def test_a_token_of_another_policy_version_is_refused() -> None:
    trajectory = make_trajectory(np.random.default_rng(1), 9, version=3)
    check_version(trajectory, 3)
    versions = trajectory.versions.copy()
    versions[4:6] = 2
    with pytest.raises(ContractError, match=r"2 of 9 tokens come from policy version \[2\], the trainer is at 3"):
        check_version(replace(trajectory, versions=versions), 3)


def test_an_advantage_that_is_no_number_is_refused() -> None:
    with pytest.raises(ContractError, match="advantage nan"):
        make_packs([(0,)], {0: make_trajectory(np.random.default_rng(1), 9)}, np.full(1, np.nan, np.float32), SHAPE)
