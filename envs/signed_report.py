"""What the launcher in a grading container reported, checked: every record signed, in order, and one end. Pure.

`pytest_launcher.py` says what a record is.
"""

import hashlib
import hmac
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from agent_r3.envs.summary import clean_name
from agent_r3.types import Outcome

_WORSE = {"PASSED": 0, "ERROR": 1, "FAILED": 2}  # the order in which pytest's summary lists them


class NotBegunError(Exception):
    """There is no report: the tests' process failed before anything of the repository could run."""


class UnfairError(Exception):
    """The report is not that of a whole, honest run. `str()` says why."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome


@dataclass(frozen=True, slots=True)
class Record:
    """One of pytest's reports."""

    node: str
    when: str  # collect, setup, call or teardown
    word: str  # PASSED, FAILED, ERROR, SKIPPED, XFAIL, ... as the summary says it
    failed: bool  # pytest counts it as a failure


@dataclass(frozen=True, slots=True)
class Report:
    """All of pytest's reports and its exit status."""

    records: tuple[Record, ...]
    exit_status: int

    @property
    def interrupted(self) -> bool:
        """A file could not be collected, so that pytest ran no test."""
        return self.exit_status == 2 and bool(self.records) and all(record.when == "collect" for record in self.records)


def read_report(data: bytes, key: bytes, exit_status: int) -> Report:
    """`data` is what came through the descriptor, `exit_status` that of the process.

    Raises NotBegunError, UnfairError.
    """
    if not data:
        raise NotBegunError
    lines = data.split(b"\n")
    if lines.pop():
        raise UnfairError("tampered", "the report ends within a record")
    kinds = [_checked(line, key, number) for number, line in enumerate(lines)]
    if kinds[0] != ["begin"]:
        raise UnfairError("tampered", "the report does not start with its beginning")
    if kinds[-1][0] != "finish":
        raise UnfairError("ended_early", f"the tests' process ended before its report did, exit status {exit_status}")
    records = []
    for kind, *fields in kinds[1:-1]:
        if kind != "report":
            raise UnfairError("tampered", f"the report has a record {kind!r} in its midst")
        node, when, word, failed = fields
        records.append(Record(node, when, word, failed == "1"))
    _check_finish(kinds[-1], sum(record.failed for record in records), exit_status)
    return Report(tuple(records), exit_status)


def statuses(records: Iterable[Record], *, whole_ids: bool = False) -> dict[str, str]:
    """{test: PASSED | FAILED | ERROR} under R2E-Gym's naming, or under the whole node id.

    R2E: the parts after the file joined with "." and cut at " - "; of equal names the worse status stays, FAILED
    before ERROR as in pytest's summary; a file that could not be collected has the name "".
    """
    found: dict[str, str] = {}
    for record in records:
        if record.word not in _WORSE:
            continue
        name = record.node if whole_ids else clean_name(".".join(record.node.split("::")[1:]))
        if _WORSE[record.word] >= _WORSE[found.get(name, "PASSED")]:
            found[name] = record.word
    return found


def difference(found: Mapping[str, str], expected: Mapping[str, str], shown: int) -> str | None:
    """In one line, how the statuses differ from the expected ones; None when they do not."""
    names = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
    if not names:
        return None
    told = ", ".join(
        f"{name or 'a file that could not be collected'} {found.get(name, 'missing')} "
        f"instead of {expected.get(name, 'absent')}"
        for name in names[:shown]
    )
    return f"{len(names)} of {len(expected)} differ: {told}{', ...' if len(names) > shown else ''}"


def _checked(line: bytes, key: bytes, number: int) -> list[str]:
    """The fields of one record after its number."""
    signature, _, signed = line.partition(b" ")
    if not hmac.compare_digest(signature, hmac.new(key, signed, hashlib.sha256).hexdigest().encode()):
        raise UnfairError("tampered", f"record {number} of the report was not written by the launcher")
    count, *fields = json.loads(signed)
    if count != str(number):
        raise UnfairError("tampered", f"record {count} of the report stands in place {number}")
    return [str(field) for field in fields]


def _check_finish(finish: list[str], failures: int, exit_status: int) -> None:
    _, said_status, said_failures, changed = finish
    if int(said_status) != exit_status:
        raise UnfairError("tampered", f"exit status {exit_status}, the report says {said_status}")
    if int(said_failures) != failures:
        raise UnfairError("tampered", f"{failures} failures were reported, pytest counts {said_failures}")
    if changed:
        raise UnfairError("tampered", f"the run changed {changed}")
