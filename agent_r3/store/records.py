"""The binary form of what one turn leaves in the store, checked on both ends.

Layout, little-endian: header (magic, codec, index, start, n, cached), then tokens int32[n], loss mask uint8[n],
log-probs float32[n], versions int32[n], routing rows (`agent_r3.routing.encode_rows`), and a crc32 of all before it.
Text, calls and observations are for people and go to the archive, not through the store.
"""

import struct
import zlib

import numpy as np

from agent_r3.errors import ContractError
from agent_r3.routing import decode_rows, encode_rows
from agent_r3.trajectory import TurnRecord

_HEADER = struct.Struct("<4sHIQII")
_MAGIC = b"r3tu"
_CODEC = 1
_BYTES_PER_TOKEN = 4 + 1 + 4 + 4


def encode_record(record: TurnRecord) -> bytes:
    """Checked bytes; equal records give equal bytes, which is what makes a retried append recognisable."""
    record.check()
    body = b"".join(
        (
            _HEADER.pack(_MAGIC, _CODEC, record.index, record.start, len(record.tokens), record.cached_tokens),
            record.tokens.astype("<i4", copy=False).tobytes(),
            record.loss_mask.astype("u1", copy=False).tobytes(),
            record.logprobs.astype("<f4", copy=False).tobytes(),
            record.versions.astype("<i4", copy=False).tobytes(),
            encode_rows(record.routing),
        )
    )
    return body + zlib.crc32(body).to_bytes(4, "little")


def decode_record(data: bytes) -> TurnRecord:
    """Inverse of `encode_record`; arrays are read-only views of `data`. Raises ContractError on damaged bytes."""
    if len(data) < _HEADER.size + 4:
        raise ContractError(f"turn record: {len(data)} bytes are shorter than header and checksum")
    magic, codec, index, start, n, cached = _HEADER.unpack_from(data)
    if magic != _MAGIC or codec != _CODEC:
        raise ContractError(f"turn record: magic {magic!r}, codec {codec}; this version reads {_MAGIC!r}, {_CODEC}")
    body = memoryview(data)[:-4]
    if zlib.crc32(body) != int.from_bytes(data[-4:], "little"):
        raise ContractError(f"turn record {index}: checksum does not match its {len(data)} bytes")
    rows_at = _HEADER.size + n * _BYTES_PER_TOKEN
    if rows_at > len(body):
        raise ContractError(f"turn record {index}: {n} tokens do not fit into {len(data)} bytes")

    def take(dtype: str, offset: int) -> "np.ndarray[tuple[int], np.dtype[np.generic]]":
        return np.frombuffer(body, dtype=dtype, count=n, offset=_HEADER.size + offset * n)

    record = TurnRecord(
        index=index,
        start=start,
        tokens=take("<i4", 0),  # type: ignore[arg-type]
        loss_mask=take("?", 4),  # type: ignore[arg-type]
        logprobs=take("<f4", 5),  # type: ignore[arg-type]
        versions=take("<i4", 9),  # type: ignore[arg-type]
        routing=decode_rows(body[rows_at:]),
        cached_tokens=cached,
    )
    record.check()
    return record
