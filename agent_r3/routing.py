"""Routing rows: checks, the append-only splice over turns, and their compact byte form.

Row i holds the experts chosen when token i was the input, so T tokens have T-1 rows: the last token was never an input.
A turn's last sampled token gets its row from the next turn's prefill, hence every request asks for rows from
`rows_from(tokens so far)`. Worked example, one router with top-1 for brevity:

    turn 0  prompt a b c, samples d e     tokens 0..4, the engine returns rows 0..3       (a b c d)
    turn 1  observation f, samples g h    tokens 5..7, request starts at 4: rows 4..6     (e f g)
    finish  8 tokens, 7 rows; h has none

Row i is recorded in the turn that appended token i+1, so its policy version is `versions[i + 1]` of the tokens.
The first recorded row of a position stays: the following token was sampled under it. A gap, an overlap, a wrong count,
an expert out of range or twice in a row is a RoutingError with the numbers, never a zero fill and never a cut.
"""

import struct
from typing import cast

import numpy as np
import numpy.typing as npt

from agent_r3.errors import RoutingError
from agent_r3.types import Int32Array, MoEShape, Routing, RowArray

_HEADER = struct.Struct("<4sBBHHQQ")  # magic, codec version, bytes per expert, L, K, start, R
_MAGIC = b"r3ro"
_CODEC = 1
_DTYPES: dict[int, npt.DTypeLike] = {1: np.dtype("<u1"), 2: np.dtype("<u2")}


def rows_from(length: int) -> int:
    """First row to ask for when `length` tokens are already in the trajectory (and have `length - 1` rows)."""
    return max(length - 1, 0)


def validate_rows(experts: npt.NDArray[np.generic], shape: MoEShape, what: str) -> RowArray:
    """Check rows [R, L, K] of any integer type and return them as the model's compact type (no copy if they are).

    Range is checked before narrowing, so an id of 256 or above cannot wrap into a valid uint8.
    Cost at 48 layers x top-8: about 0.5 ms per 1,000 rows of uint8. Raises RoutingError; `what` opens its message.
    """
    if experts.ndim != 3 or experts.shape[1:] != (shape.num_layers, shape.top_k):
        raise RoutingError(f"{what}: rows have shape {experts.shape}, expected [R, {shape.num_layers}, {shape.top_k}]")
    if experts.dtype.kind not in "iu":
        raise RoutingError(f"{what}: rows have type {experts.dtype}, expected integers")
    if experts.size == 0:
        return _narrow(experts, shape)
    if int(experts.max()) >= shape.num_experts or (experts.dtype.kind == "i" and int(experts.min()) < 0):
        wrong = (experts < 0) | (experts >= shape.num_experts)  # type: ignore[operator]
        row, layer, _ = (int(i) for i in np.argwhere(wrong)[0])
        raise RoutingError(
            f"{what}: {int(wrong.sum())} experts out of range 0..{shape.num_experts - 1}, "
            f"first in row {row}, layer {layer}: {experts[row, layer].tolist()}"
        )
    rows = _narrow(experts, shape)
    _require_distinct(rows, what)
    return rows


def _narrow(experts: npt.NDArray[np.generic], shape: MoEShape) -> RowArray:
    return cast(RowArray, experts.astype(shape.dtype, copy=False))


def _require_distinct(rows: RowArray, what: str) -> None:
    # Comparing whole columns of one choice each is ~30x faster than sorting K numbers a million times.
    columns = np.ascontiguousarray(rows.reshape(-1, rows.shape[2]).T)  # [K, R * L]
    for shift in range(1, len(columns)):
        if (columns[shift:] == columns[:-shift]).any():
            ordered = np.sort(rows, axis=2)
            twice = (ordered[:, :, 1:] == ordered[:, :, :-1]).any(axis=2)
            row, layer = (int(i) for i in np.argwhere(twice)[0])
            raise RoutingError(
                f"{what}: {int(twice.sum())} routers hold an expert twice, "
                f"first in row {row}, layer {layer}: {rows[row, layer].tolist()}"
            )


class RoutingLedger:
    """Rows of one trajectory, appended turn by turn into a buffer that grows by doubling.

        ledger = RoutingLedger("trajectory g3-1")
        ledger.append(generation.routing, version=4, total_tokens=len(tokens))   # once a turn
        ledger.next_start                                                        # what the next request asks for
        routing = ledger.finish(total_tokens=len(tokens))

    Append-only: what was recorded is never overwritten. `capacity` is the number of rows expected, if known.
    """

    def __init__(self, what: str, capacity: int = 256) -> None:
        self._what = what
        self._capacity = max(capacity, 1)
        self._length = 0
        self._rows: RowArray | None = None
        self._versions = np.empty(0, np.int32)

    def __len__(self) -> int:
        return self._length

    @property
    def next_start(self) -> int:
        """Position of the next row."""
        return self._length

    @property
    def versions(self) -> Int32Array:
        """Policy version of each row, [R]."""
        return self._versions[: self._length]

    def append(self, routing: Routing, *, version: int, total_tokens: int) -> None:
        """Add the rows that one turn brought; the trajectory then has `total_tokens` tokens.

        Raises RoutingError when rows are missing before `routing.start`, already there, too few or too many.
        """
        experts = routing.experts
        if experts.ndim != 3 or experts.dtype not in (np.uint8, np.uint16):
            raise RoutingError(
                f"{self._what}: rows of shape {experts.shape} and type {experts.dtype}, not compact rows"
            )
        if routing.start != self._length:
            kind = "gap" if routing.start > self._length else "overlap"
            raise RoutingError(
                f"{self._what}: {kind} in routing rows: {self._length} are recorded, the next ones start at "
                f"{routing.start} (stop {routing.stop})"
            )
        if routing.stop != total_tokens - 1:
            raise RoutingError(
                f"{self._what}: {total_tokens} tokens need rows {self._length}..{total_tokens - 2}, "
                f"got {len(experts)} rows from {routing.start}, expected {total_tokens - 1 - self._length}"
            )
        self._reserve(experts, routing.stop)
        assert self._rows is not None
        self._rows[self._length : routing.stop] = experts
        self._versions[self._length : routing.stop] = version
        self._length = routing.stop

    def finish(self, total_tokens: int) -> Routing:
        """All rows as one read-only view. Raises RoutingError unless there are `total_tokens - 1` of them."""
        if self._rows is None or self._length != total_tokens - 1:
            raise RoutingError(
                f"{self._what}: {total_tokens} tokens need {total_tokens - 1} rows, {len(self)} are there"
            )
        experts = self._rows[: self._length]
        experts.flags.writeable = False
        return Routing(start=0, experts=experts)

    def _reserve(self, experts: RowArray, stop: int) -> None:
        if self._rows is None:
            self._capacity = max(self._capacity, stop)
            self._rows = np.empty((self._capacity, *experts.shape[1:]), experts.dtype)
            self._versions = np.empty(self._capacity, np.int32)
            return
        if experts.shape[1:] != self._rows.shape[1:] or experts.dtype != self._rows.dtype:
            raise RoutingError(
                f"{self._what}: rows of {experts.shape[1:]} {experts.dtype} after rows of "
                f"{self._rows.shape[1:]} {self._rows.dtype}"
            )
        if stop > self._capacity:
            self._capacity = max(2 * self._capacity, stop)
            old_rows, old_versions = self._rows, self._versions
            self._rows = np.empty((self._capacity, *old_rows.shape[1:]), old_rows.dtype)
            self._versions = np.empty(self._capacity, np.int32)
            self._rows[: self._length] = old_rows[: self._length]
            self._versions[: self._length] = old_versions[: self._length]


def encode_rows(routing: Routing) -> bytes:
    """Header and the experts in C order, little-endian: R * L * K bytes (twice that above 256 experts)."""
    rows, layers, top_k = routing.experts.shape
    size = routing.experts.dtype.itemsize
    if size not in _DTYPES or routing.experts.dtype.kind != "u":
        raise RoutingError(f"rows of type {routing.experts.dtype} cannot be encoded, expected uint8 or uint16")
    header = _HEADER.pack(_MAGIC, _CODEC, size, layers, top_k, routing.start, rows)
    return header + np.ascontiguousarray(routing.experts, dtype=_DTYPES[size]).tobytes()


def decode_rows(data: bytes | memoryview) -> Routing:
    """Inverse of `encode_rows`; the array is a read-only view of `data`. Raises RoutingError on any other bytes."""
    if len(data) < _HEADER.size:
        raise RoutingError(f"routing rows: {len(data)} bytes are shorter than the header of {_HEADER.size}")
    magic, codec, size, layers, top_k, start, rows = _HEADER.unpack_from(data)
    if magic != _MAGIC or codec != _CODEC or size not in _DTYPES:
        raise RoutingError(f"routing rows: magic {magic!r}, codec {codec}, {size} bytes per expert are not known here")
    expected = _HEADER.size + rows * layers * top_k * size
    if len(data) != expected:
        raise RoutingError(
            f"routing rows: header says [{rows}, {layers}, {top_k}] x {size} bytes = {expected} bytes, got {len(data)}"
        )
    experts = np.frombuffer(data, dtype=_DTYPES[size], offset=_HEADER.size).reshape(rows, layers, top_k)
    return Routing(start=start, experts=experts)
