"""A dataset's row -> Task, whatever kind of row it is: pure, with a DataError that names file, row and column."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from agent_r3.envs import r2e_rows, swe_rows
from agent_r3.envs.columns import Origin as Origin
from agent_r3.envs.columns import Row
from agent_r3.errors import DataError
from agent_r3.types import Task

COLUMNS = frozenset({*r2e_rows.COLUMNS, *swe_rows.BENCH_COLUMNS, *swe_rows.SMITH_COLUMNS})

# Columns that rows of one kind have and rows of the others have not.
_MARKS = {
    "R2E-Gym": r2e_rows.REQUIRED,
    "SWE-bench": ("test_patch",),
    "SWE-smith": ("image_name",),
}
_READERS = {"R2E-Gym": r2e_rows.r2e_task, "SWE-bench": swe_rows.bench_task, "SWE-smith": swe_rows.smith_task}


def tasks_from_rows(rows: Iterable[tuple[Mapping[str, Any], Origin]]) -> Iterator[Task]:
    """The tasks of one dataset, whose rows are all of one kind."""
    first = None
    for row, origin in rows:
        kind = _kind(row, origin)
        first = first or kind
        if kind != first:
            raise DataError(f"{origin.name}: row {origin.number} is a row of {kind}, the ones before it are of {first}")
        yield _READERS[kind](row, origin)


def task_from_row(row: Row, origin: Origin) -> Task:
    """Raises DataError for a row of no known kind, and for a missing or malformed column."""
    return _READERS[_kind(row, origin)](row, origin)


def _kind(row: Row, origin: Origin) -> str:
    found = {
        kind: column for kind, marks in _MARKS.items() for column in reversed(marks) if row.get(column) is not None
    }
    if len(found) == 1:
        return next(iter(found))
    where = f"{origin.name}: row {origin.number}"
    if found:
        mixed = " and ".join(f"{kind} (`{column}`)" for kind, column in found.items())
        raise DataError(f"{where}: has columns of {mixed}; a row is of one kind")
    known = ", ".join(f"{kind} (`{marks[0]}`)" for kind, marks in _MARKS.items())
    raise DataError(f"{where}: has none of the columns by which a row is known: {known}")
