"""Routing rows: what is refused, and that the splice over turns loses and invents nothing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r3.errors import RoutingError
from agent_r3.routing import RoutingLedger, decode_rows, encode_rows, rows_from, validate_rows
from agent_r3.types import MoEShape, Routing
from tests.support.trajectories import random_rows

SHAPE = MoEShape(num_layers=3, num_experts=16, top_k=4)
WIDE = MoEShape(num_layers=2, num_experts=512, top_k=10)


def rows(count: int, shape: MoEShape = SHAPE, seed: int = 0) -> np.ndarray:
    return random_rows(np.random.default_rng(seed), count, shape)


@pytest.mark.parametrize("shape", [SHAPE, WIDE])
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16])
def test_valid_rows_of_any_integer_type_become_the_compact_type(shape: MoEShape, dtype: type) -> None:
    plain = rows(50, shape)
    checked = validate_rows(plain.astype(dtype), shape, "x")
    assert checked.dtype == shape.dtype
    assert np.array_equal(checked, plain)


def test_rows_already_compact_are_not_copied() -> None:
    plain = rows(5)
    assert validate_rows(plain, SHAPE, "x") is plain


@pytest.mark.parametrize("wrong", [(5, 2, 4), (5, 3, 3), (5, 3), (3, 5, 4)])
def test_wrong_layers_or_top_k_are_refused_with_the_numbers(wrong: tuple[int, ...]) -> None:
    with pytest.raises(RoutingError, match=r"turn 4: rows have shape .*expected \[R, 3, 4\]"):
        validate_rows(np.zeros(wrong, np.int32), SHAPE, "turn 4")


def test_floats_are_refused() -> None:
    with pytest.raises(RoutingError, match="float32"):
        validate_rows(rows(5).astype(np.float32), SHAPE, "x")


@pytest.mark.parametrize("expert", [16, 256, 272, -1])
def test_expert_out_of_range_is_refused_before_it_can_wrap(expert: int) -> None:
    bad = rows(9).astype(np.int32)
    bad[7, 2, 1] = expert
    with pytest.raises(RoutingError, match=r"1 experts out of range 0\.\.15, first in row 7, layer 2"):
        validate_rows(bad, SHAPE, "x")


@pytest.mark.parametrize(("first", "second"), [(0, 1), (0, 3), (1, 3), (2, 3)])
def test_an_expert_twice_in_a_row_is_refused(first: int, second: int) -> None:
    bad = rows(9)
    bad[6, 1, first] = bad[6, 1, second]
    with pytest.raises(RoutingError, match="1 routers hold an expert twice, first in row 6, layer 1"):
        validate_rows(bad, SHAPE, "x")


def test_the_same_expert_in_neighbouring_rows_and_layers_is_fine() -> None:
    same = np.broadcast_to(np.array([3, 1, 0, 2], np.uint8), (4, 3, 4))
    assert np.array_equal(validate_rows(same, SHAPE, "x"), same)


@given(cuts=st.lists(st.integers(1, 40), min_size=1, max_size=12), capacity=st.integers(1, 300), seed=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_any_split_into_turns_splices_back_to_the_same_rows(cuts: list[int], capacity: int, seed: int) -> None:
    total = sum(cuts) + 1  # turn 0 has at least two tokens
    whole = rows(total - 1, seed=seed)
    ledger = RoutingLedger("t", capacity=capacity)
    length = 1
    for version, cut in enumerate(cuts):
        start = rows_from(length) if version else 0
        length += cut
        ledger.append(Routing(start, whole[start : length - 1]), version=version, total_tokens=length)
        assert ledger.next_start == len(ledger) == length - 1
    spliced = ledger.finish(total)
    assert spliced.start == 0 and np.array_equal(spliced.experts, whole)
    assert np.array_equal(ledger.versions, np.repeat(np.arange(len(cuts)), cuts))


def ledger_of(tokens: int) -> RoutingLedger:
    ledger = RoutingLedger("trajectory t")
    ledger.append(Routing(0, rows(tokens - 1)), version=0, total_tokens=tokens)
    return ledger


def test_a_gap_is_refused() -> None:
    with pytest.raises(RoutingError, match=r"trajectory t: gap in .* rows: 9 are recorded, the next ones start at 10"):
        ledger_of(10).append(Routing(10, rows(4)), version=0, total_tokens=15)


def test_an_overlap_is_refused_and_the_first_record_stays() -> None:
    ledger = ledger_of(10)
    before = ledger.finish(10).experts.copy()
    with pytest.raises(RoutingError, match=r"overlap .* 9 are recorded, the next ones start at 8"):
        ledger.append(Routing(8, rows(6, seed=1)), version=1, total_tokens=15)
    assert np.array_equal(ledger.finish(10).experts, before)


@pytest.mark.parametrize("count", [4, 6, 0])
def test_a_wrong_count_is_refused(count: int) -> None:
    with pytest.raises(RoutingError, match=rf"15 tokens need rows 9\.\.13, got {count} rows from 9, expected 5"):
        ledger_of(10).append(Routing(9, rows(count)), version=0, total_tokens=15)


def test_another_shape_or_type_in_a_later_turn_is_refused() -> None:
    with pytest.raises(RoutingError, match="after rows of"):
        ledger_of(10).append(Routing(9, rows(5, WIDE)), version=0, total_tokens=15)
    with pytest.raises(RoutingError, match="not compact"):
        ledger_of(10).append(Routing(9, rows(5).astype(np.int32)), version=0, total_tokens=15)  # type: ignore[arg-type]


def test_finish_needs_one_row_less_than_tokens() -> None:
    assert ledger_of(10).finish(10).stop == 9
    for tokens in (9, 11):
        with pytest.raises(RoutingError, match=f"{tokens} tokens need {tokens - 1} rows, 9 are there"):
            ledger_of(10).finish(tokens)
    with pytest.raises(RoutingError, match="0 are there"):
        RoutingLedger("t").finish(2)


def test_finished_rows_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="read-only"):
        ledger_of(10).finish(10).experts[0, 0, 0] = 1


@pytest.mark.parametrize("shape", [SHAPE, WIDE, MoEShape(0, 1, 0)])
def test_bytes_hold_the_rows_and_one_header(shape: MoEShape) -> None:
    routing = Routing(17, rows(20, shape)) if shape.num_layers else Routing(17, np.zeros((20, 0, 0), np.uint8))
    data = encode_rows(routing)
    back = decode_rows(data)
    assert back.start == 17 and back.experts.dtype == shape.dtype
    assert np.array_equal(back.experts, routing.experts)
    assert len(data) - routing.experts.nbytes < 32


@pytest.mark.parametrize("cut", [0, 5, 27, -1])
def test_cut_bytes_are_refused(cut: int) -> None:
    with pytest.raises(RoutingError, match="bytes"):
        decode_rows(encode_rows(Routing(0, rows(20)))[:cut])


def test_foreign_bytes_and_longer_bytes_are_refused() -> None:
    data = encode_rows(Routing(0, rows(20)))
    with pytest.raises(RoutingError, match="magic"):
        decode_rows(b"x" + data[1:])
    with pytest.raises(RoutingError, match="got"):
        decode_rows(data + b"\0")
