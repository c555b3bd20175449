"""Files that survive a kill: JSON lines, on disk when `append` returns, and files written whole or not at all.

And files that others may read.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from agent_r3.errors import DataError, boundary

T = TypeVar("T")

_BLOCK = 1 << 16


def append(path: Path, entry: Mapping[str, Any]) -> None:
    """One more line, written through to the disk. Half a line that a killed process left is cut off first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        file.truncate(_end_of_lines(file.seek(0, os.SEEK_END), path))
        file.write(json.dumps(entry, allow_nan=False).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read(path: Path, kind: TypeAdapter[T], writer: str) -> Iterator[T]:
    """Each line as a `kind`; nothing where there is no file. Half a line at the end, of a killed process, is left out.

    Raises DataError for a file that cannot be read and a line that `writer`, a command of ours, did not write.
    """
    if not path.exists():
        return
    with boundary(DataError, f"read {path}", OSError, UnicodeDecodeError):
        *lines, _ = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            # Not pydantic's own parser: it refuses halves of surrogate pairs, which stand for bytes that are not UTF-8.
            entry = kind.validate_python(json.loads(line))
        except ValidationError as exc:
            error = exc.errors()[0]
            where = ".".join(map(str, error["loc"]))
            problem = f"{where}: {error['msg']}" if where else error["msg"]
            raise DataError(f"{path}: line {number} is not of `{writer}`: {problem}") from exc
        except ValueError as exc:
            raise DataError(f"{path}: line {number} is not of `{writer}`: {exc}") from exc
        yield entry


def _end_of_lines(size: int, path: Path) -> int:
    """Where the last whole line ends, looking only at the end of the file."""
    with path.open("rb") as file:
        stop = size
        while stop:
            start = max(0, stop - _BLOCK)
            file.seek(start)
            newline = file.read(stop - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            stop = start
    return 0


def write_whole(path: Path, text: str, *, errors: str = "strict") -> None:
    """Write a file that others may be reading: they find the old text or the new one, and so does a killed process.

    `errors` is for what UTF-8 has no bytes for.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8", errors=errors)
    partial.replace(path)


def usual_mode(path: Path) -> None:
    """Give a file the mode that new files have in its folder: safetensors 0.8 makes its own 0600."""
    path.chmod(path.parent.stat().st_mode & 0o666)
