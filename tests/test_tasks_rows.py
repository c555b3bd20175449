"""R2E-Gym rows -> tasks: good ones, and bad ones with file, row and column in the message."""

import json
from pathlib import Path
from typing import Any

import pytest

from agent_r3.envs.commits import file_diff
from agent_r3.envs.rows import Origin, task_from_row
from agent_r3.errors import DataError
from tests.support.r2e_rows import commit_content, r2e_row

ORIGIN = Origin("rows.jsonl", 3)


def test_a_row_becomes_a_task_with_r2es_id_command_and_image() -> None:
    task = task_from_row(r2e_row(), ORIGIN)
    assert (task.id, task.repo, task.workdir) == ("tornado__0123456789ab", "tornado", "/testbed")
    assert task.image == "namanjain12/tornado_final:0123456789abcdef0123456789abcdef01234567"
    assert task.test_command.endswith(".venv/bin/python -W ignore -m pytest -rA r2e_tests")
    assert task.expected == {"T.test_a": "PASSED", "T.test_b": "FAILED"}
    assert "-a = 1\n+a = 2\n" in task.gold_patch
    assert task.hidden_tests_dir is None


def test_the_agent_sees_the_text_between_the_issue_marks() -> None:
    assert task_from_row(r2e_row(), ORIGIN).problem_statement == "It is 1, not 2."
    assert task_from_row(r2e_row(problem_statement=None), ORIGIN).problem_statement == "It is 1."
    assert task_from_row(r2e_row(problem_statement="Plain.", prompt=None), ORIGIN).problem_statement == "Plain."


def test_orange3_runs_under_a_display_of_its_own() -> None:
    command = task_from_row(r2e_row(repo_name="orange3"), ORIGIN).test_command
    assert "QT_QPA_PLATFORM=minimal xvfb-run" in command


def test_expected_names_are_cut_and_freed_of_colours_like_the_run_ones() -> None:
    raw = json.dumps({"\x1b[1mtest_a\x1b[0m - why": "PASSED", "": "ERROR"})
    assert task_from_row(r2e_row(expected_output_json=raw), ORIGIN).expected == {"test_a": "PASSED", "": "ERROR"}


def test_expected_names_keep_spaces_and_clocks() -> None:
    names = ("T.test_a[two words]", "test_b[12:30:01.5]", "test_c[a-b]")
    raw = json.dumps(dict.fromkeys(names, "PASSED"))
    assert tuple(task_from_row(r2e_row(expected_output_json=raw), ORIGIN).expected) == names


def test_a_row_whose_commit_holds_a_binary_file_loads_without_a_gold_patch() -> None:
    binary = file_diff("logo.png", None, "") | {"is_binary_file": True, "binary_line": "Binary files differ"}
    task = task_from_row(r2e_row(parsed_commit_content=commit_content(file_diff("a.py", "1", "2"), binary)), ORIGIN)
    assert task.gold_patch == ""


def test_our_extra_columns_are_read_relative_to_the_rows_file(tmp_path: Path) -> None:
    (tmp_path / "hidden").mkdir()
    row = r2e_row(instance_id="mine", test_command="pytest", hidden_tests_dir="hidden", test_timeout_s=20)
    task = task_from_row(row, Origin("rows.jsonl", 1, tmp_path))
    assert (task.id, task.test_command, task.hidden_tests_dir) == ("mine", "pytest", tmp_path / "hidden")
    assert task.test_timeout_s == 20.0


@pytest.mark.parametrize(
    "column", ["repo_name", "docker_image", "commit_hash", "parsed_commit_content", "expected_output_json"]
)
def test_a_missing_column_is_named_with_file_and_row(column: str) -> None:
    with pytest.raises(DataError, match=f"rows.jsonl: row 3: column `{column}` is missing"):
        task_from_row(r2e_row(**{column: None}), ORIGIN)


def test_a_row_with_neither_statement_nor_prompt_is_refused() -> None:
    with pytest.raises(DataError, match="row 3: column `problem_statement` is missing"):
        task_from_row(r2e_row(problem_statement=None, prompt=None), ORIGIN)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("docker_image", " ", "must be a non-empty string"),
        ("test_timeout_s", "20", "must be a number of seconds above 0, found '20'"),
        ("test_timeout_s", 0, "must be a number of seconds above 0, found 0"),
        ("repo_name", 7, "must be a non-empty string, found 7"),
        ("problem_statement", "[ISSUE]\n[/ISSUE]", "has nothing between"),
        ("expected_output_json", "{", "is not JSON"),
        ("expected_output_json", "[]", "must be a non-empty JSON object"),
        ("expected_output_json", "{}", "must be a non-empty JSON object"),
        ("expected_output_json", '{"test_a": "OK"}', "'test_a' the status 'OK'"),
        ("parsed_commit_content", "nope", "is not JSON"),
        ("parsed_commit_content", "{}", "is not a ParsedCommit"),
        ("parsed_commit_content", '{"file_diffs": [{"header": {}}]}', "is not a ParsedCommit"),
        ("parsed_commit_content", "[1]", "is not a ParsedCommit"),
        ("hidden_tests_dir", "not/there", "is not there"),
        ("hidden_tests_dir", 5, "must be a string"),
    ],
)
def test_a_malformed_column_is_named_with_file_row_and_reason(column: str, value: Any, message: str) -> None:
    with pytest.raises(DataError, match=f"^rows.jsonl: row 3: column `{column}` .*{message}") as caught:
        task_from_row(r2e_row(**{column: value}), ORIGIN)
    assert "\n" not in str(caught.value)
