"""pytest's short summary, read under R2E-Gym's naming."""

from agent_r3.envs.summary import parse_summary

_TITLE = "=========================== short test summary info ============================"
_END = "=============== 1 failed, 1 passed, 1 error in 0.12s ==============="


def _log(*lines: str) -> str:
    return "\n".join(["collected 3 items", "", _TITLE, *lines, _END, ""])


def test_names_are_the_parts_after_the_file_joined_by_dots() -> None:
    log = _log("PASSED r2e_tests/test_1.py::TestA::test_x[1-a b]", "FAILED r2e_tests/test_1.py::test_y - assert 1 == 2")
    assert parse_summary(log) == {"TestA.test_x[1-a b]": "PASSED", "test_y": "FAILED"}


def test_names_are_cut_at_the_first_dash_between_spaces_for_every_status() -> None:
    log = _log(
        "PASSED t.py::test_p[a - b]", "FAILED t.py::test_f - ValueError: x - y", "ERROR t.py::test_e - fixture missing"
    )
    assert parse_summary(log) == {"test_p[a": "PASSED", "test_f": "FAILED", "test_e": "ERROR"}


def test_a_double_colon_in_a_parameter_becomes_a_dot() -> None:
    assert parse_summary(_log("PASSED t.py::test_a[::1]")) == {"test_a[.1]": "PASSED"}


def test_a_file_that_cannot_be_collected_has_the_empty_name() -> None:
    assert parse_summary(_log("ERROR r2e_tests/test_1.py", "ERROR r2e_tests/test_2.py - ImportError")) == {"": "ERROR"}


def test_skipped_and_expected_failures_are_left_out() -> None:
    log = _log("SKIPPED [1] t.py:3: why", "XFAIL t.py::test_a - why", "XPASS t.py::test_b", "PASSED t.py::test_c")
    assert parse_summary(log) == {"test_c": "PASSED"}


def test_a_failed_line_that_mentions_passed_is_failed() -> None:
    assert parse_summary(_log("FAILED t.py::test_a - assert 'PASSED' == 'ERROR'")) == {"test_a": "FAILED"}


def test_colours_of_any_code_are_stripped() -> None:
    log = _log(
        "\x1b[32mPASSED\x1b[0m t.py::\x1b[1mtest_a\x1b[0m", "\x1b[1;31mFAILED\x1b[0m t.py::\x1b[38;5;9mtest_b\x1b[0m"
    )
    coloured = log.replace(_TITLE, f"\x1b[36m\x1b[1m{_TITLE}\x1b[0m")
    assert parse_summary(coloured) == {"test_a": "PASSED", "test_b": "FAILED"}


def test_the_summary_is_the_last_section_of_that_title() -> None:
    inner = _log("PASSED inner.py::test_forged", "PASSED t.py::test_a")
    assert parse_summary(inner + "a test printed: short test summary info\n" + _log("FAILED t.py::test_a")) == {
        "test_a": "FAILED"
    }


def test_what_is_printed_after_pytests_last_line_is_not_read() -> None:
    assert parse_summary(_log("FAILED t.py::test_a") + "PASSED t.py::test_a\n") == {"test_a": "FAILED"}


def test_of_equal_names_in_two_files_the_worse_status_stays() -> None:
    log = _log("PASSED a.py::test_x", "ERROR b.py::test_x - setup")
    assert parse_summary(log) == {"test_x": "ERROR"}


def test_carriage_returns_do_not_end_up_in_names() -> None:
    assert parse_summary(_log("PASSED t.py::test_a").replace("\n", "\r\n")) == {"test_a": "PASSED"}


def test_a_log_without_a_summary_gives_nothing() -> None:
    assert parse_summary("PASSED t.py::test_a\nKilled\n") == {}
