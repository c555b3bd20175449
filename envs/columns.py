"""Columns of a dataset row, checked as they are read: what is wrong is a DataError that names file, row and column."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_r3.errors import DataError

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a row stands, for messages and for relative paths."""

    name: str  # file or hub id
    number: int  # from 1
    folder: Path | None = None  # of the file
    dataset: str = "r2e"

    def error(self, column: str, problem: str) -> DataError:
        return DataError(f"{self.name}: row {self.number}: column `{column}` {problem}")


def text(row: Row, column: str, origin: Origin) -> str:
    """A string that is not blank."""
    if column not in row:
        raise origin.error(column, "is missing")
    value = row[column]
    if not isinstance(value, str) or not value.strip():
        raise origin.error(column, f"must be a non-empty string, found {short(value)}")
    return value


def optional_text(row: Row, column: str, origin: Origin) -> str | None:
    return None if row.get(column) is None else text(row, column, origin)


def names(row: Row, column: str, origin: Origin) -> tuple[str, ...]:
    """A list of strings, or one as JSON."""
    if column not in row:
        raise origin.error(column, "is missing")
    value = row[column]
    found = parsed(value, column, origin) if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(name, str) and name for name in found):
        raise origin.error(column, f"must be a list of test names, found {short(value)}")
    return tuple(found)


def parsed(raw: str, column: str, origin: Origin) -> Any:
    """What a column's JSON says."""
    try:
        return json.loads(raw)
    except json.JSONDecodeError as exc:
        raise origin.error(column, f"is not JSON ({exc.msg} at character {exc.pos})") from exc


def short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
