"""What the host takes for the report of an honest run."""

import json

import pytest

from agent_r3.envs.canaries import make_canaries
from agent_r3.envs.pytest_launcher import signer
from agent_r3.envs.signed_report import NotBegunError, Record, UnfairError, difference, read_report, statuses

KEY = bytes(range(32))
_HONEST = (["begin"], ["report", "t.py::test_a", "call", "FAILED", "1"], ["finish", "1", "1", ""])


def _lines(*records: list[str], key: bytes = KEY) -> list[bytes]:
    sign = signer(key)
    signed = [json.dumps([str(number), *record]).encode() for number, record in enumerate(records)]
    return [sign(line) + b" " + line + b"\n" for line in signed]


def _record(node: str, word: str, when: str = "call") -> Record:
    return Record(node, when, word, word != "PASSED")


def test_an_honest_report_is_read() -> None:
    report = read_report(b"".join(_lines(*_HONEST)), KEY, 1)
    assert report.records == (Record("t.py::test_a", "call", "FAILED", True),) and not report.interrupted


def test_no_report_at_all_is_not_the_agents_doing() -> None:
    with pytest.raises(NotBegunError):
        read_report(b"", KEY, 1)


_GOOD = _lines(*_HONEST)


@pytest.mark.parametrize(
    ("lines", "exit_status", "outcome", "reason"),
    [
        (_lines(*_HONEST, key=bytes(32)), 1, "tampered", "record 0 of the report was not written by the launcher"),
        ([_GOOD[0], b"garbage\n", *_GOOD[1:]], 1, "tampered", "record 1 of the report was not written"),
        ([*_GOOD, b"\n"], 1, "tampered", "record 3 of the report was not written"),
        ([_GOOD[0], _GOOD[2]], 1, "tampered", "record 2 of the report stands in place 1"),
        ([_GOOD[0], _GOOD[0], *_GOOD[1:]], 1, "tampered", "record 0 of the report stands in place 1"),
        ([_GOOD[1], _GOOD[0], _GOOD[2]], 1, "tampered", "record 1 of the report stands in place 0"),
        ([_GOOD[1]], 1, "tampered", "record 1 of the report stands in place 0"),
        ([*_GOOD[:2], _GOOD[2][:-1]], 1, "tampered", "ends within a record"),
        (_GOOD[:2], 0, "ended_early", "ended before its report did, exit status 0"),
        (_GOOD[:1], 137, "ended_early", "exit status 137"),
        (_lines(*_HONEST[1:]), 1, "tampered", "does not start with its beginning"),
        (_lines(*_HONEST, _HONEST[2]), 1, "tampered", "'finish' in its midst"),
        (_GOOD, 0, "tampered", "exit status 0, the report says 1"),
        (_lines(*_HONEST[:2], ["finish", "1", "0", ""]), 1, "tampered", "1 failures were reported, pytest counts 0"),
        (_lines(*_HONEST[:2], ["finish", "1", "1", "x.y"]), 1, "tampered", "the run changed x.y"),
    ],
)
def test_anything_else_is_no_verdict(lines: list[bytes], exit_status: int, outcome: str, reason: str) -> None:
    with pytest.raises(UnfairError) as caught:
        read_report(b"".join(lines), KEY, exit_status)
    assert caught.value.outcome == outcome and reason in str(caught.value)


def test_of_equal_names_in_two_files_the_worse_status_stays_whatever_the_order() -> None:
    words = ["PASSED", "ERROR", "FAILED"]
    for order in (words, words[::-1]):
        assert statuses(_record(f"{n}.py::test_x", word) for n, word in enumerate(order)) == {"test_x": "FAILED"}
    assert statuses([_record("a.py::t", "ERROR", "setup"), _record("b.py::t", "PASSED")]) == {"t": "ERROR"}


def test_whole_node_ids_are_kept_where_a_task_names_them() -> None:
    records = [_record("a.py::T::test_x[a - b]", "PASSED"), _record("a.py", "ERROR", "collect")]
    assert statuses(records) == {"T.test_x[a": "PASSED", "": "ERROR"}
    assert statuses(records, whole_ids=True) == {"a.py::T::test_x[a - b]": "PASSED", "a.py": "ERROR"}


def test_a_difference_is_told_in_one_line_with_a_few_names() -> None:
    expected = dict.fromkeys("abcde", "PASSED")
    assert difference(expected, expected, 2) is None
    told = difference({"a": "FAILED", "f": "PASSED"}, expected, 2)
    assert told == "6 of 5 differ: a FAILED instead of PASSED, b missing instead of PASSED, ..."


@pytest.mark.parametrize(
    ("there", "last"),
    [
        ([], "test_0.py"),
        (["test_1.py"], "test_1.py"),
        (["test_1.py", "test_2.py", "util.py"], "test_2.py"),
        ([f"test_{n}.py" for n in range(1, 10)], "test_9.py"),
        ([f"test_{n}.py" for n in range(1, 13)], "test_9.py"),
    ],
)
def test_canaries_have_a_new_name_that_looks_like_the_others_and_sorts_last(there: list[str], last: str) -> None:
    name = make_canaries(there).file
    assert name not in there and name > last and name.removeprefix("test_").removesuffix(".py").isdigit()


def test_no_two_runs_have_the_same_canaries() -> None:
    first, second = make_canaries(["test_1.py"]), make_canaries(["test_1.py"])
    assert not set(first.expected) & set(second.expected)
    assert sorted(first.expected.values()) == sorted(second.expected.values())
    assert set(first.expected.values()) == {"PASSED", "FAILED", "ERROR"}


def test_canaries_that_come_out_otherwise_are_a_problem() -> None:
    canaries = make_canaries([])
    good = [_record(f"r2e_tests/{canaries.file}::{name}", word) for name, word in canaries.expected.items()]
    assert canaries.problem(good) is None and all(canaries.holds(record) for record in good)
    passed = [Record(record.node, "call", "PASSED", False) for record in good]
    for wrong in (passed, good[1:], [], [*good, good[0]], [*good, _record("r2e_tests/test_1.py::test_more", "FAILED")]):
        assert "tests whose outcome is known came out differently" in (canaries.problem(wrong) or "")
