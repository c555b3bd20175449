"""`agent-r3 tasks`, as a user runs it."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agent_r3.cli.tasks import app
from agent_r3.envs.offline import offline_spec_path, rows_path
from agent_r3.types import Task
from tests.support.tasks import MISTUNE, PATHSPEC

pytestmark = pytest.mark.docker
RUNNER = CliRunner()


@pytest.fixture
def rows_file(tmp_path: Path, built_tasks: Mapping[str, Task]) -> Path:
    """The two built tasks as a dataset of their own; the second one's gold patch is spoilt."""
    rows = {}
    for line in rows_path(offline_spec_path("offline")).read_text().splitlines():
        row = json.loads(line)
        rows[row["instance_id"]] = row | {
            "hidden_tests_dir": str(rows_path(offline_spec_path("offline")).parent / row["hidden_tests_dir"])
        }
    rows[MISTUNE]["parsed_commit_content"] = rows[MISTUNE]["parsed_commit_content"].replace("if not s:", "if s:")
    path = tmp_path / "two.jsonl"
    path.write_text("".join(json.dumps(rows[task_id]) + "\n" for task_id in (PATHSPEC, MISTUNE)))
    return path


def test_list_shows_every_task_of_a_file(rows_file: Path) -> None:
    result = RUNNER.invoke(app, ["list", str(rows_file), "--json"])
    assert result.exit_code == 0, result.output
    assert [(task["id"], task["tests"]) for task in json.loads(result.stdout)["tasks"]] == [
        (PATHSPEC, 33),
        (MISTUNE, 8),
    ]
    table = RUNNER.invoke(app, ["list", str(rows_file)])
    assert PATHSPEC in table.stdout and "2 tasks" in " ".join(table.stdout.split())


def test_show_prints_issue_and_gold_patch(built_tasks: Mapping[str, Task]) -> None:
    result = RUNNER.invoke(app, ["show", PATHSPEC])
    assert result.exit_code == 0, result.output
    assert built_tasks[PATHSPEC].problem_statement in result.stdout
    assert "+\t\treturn bool(include)" in result.stdout
    facts = json.loads(RUNNER.invoke(app, ["show", PATHSPEC, "--json"]).stdout)
    assert facts["expected"] == built_tasks[PATHSPEC].expected


def test_build_of_what_is_there_says_so(built_tasks: Mapping[str, Task]) -> None:
    result = RUNNER.invoke(app, ["build", "offline", "--only", PATHSPEC])
    assert result.exit_code == 0, result.output
    assert "1 tasks ready, 1 of them already there" in result.stdout


def test_verify_ends_with_how_many_are_sound_and_fails_if_one_is_not(rows_file: Path) -> None:
    result = RUNNER.invoke(app, ["verify", str(rows_file), "--workers", "2"])
    assert result.exit_code == 1, result.output
    assert result.stdout.splitlines()[-1] == "1 of 2 sound, 1 broken"
    assert "the gold patch does not earn it: 7 of 8 differ" in " ".join(result.stderr.split())


def test_verify_as_json_gives_every_run_and_passes_for_a_sound_task(rows_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "verified.jsonl"
    arguments = ["verify", str(rows_file), "--only", PATHSPEC, "--json", "--times", "2", "--out", str(out)]
    result = RUNNER.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["sound"], report["flaky"], report["total"]) == (1, 0, 1)
    [task] = report["tasks"]
    assert [run["reward"] for run in task["noop"]] == [0.0, 0.0]
    assert [run["reward"] for run in task["gold"]] == [1.0, 1.0] and task["problem"] == ""
    written = out.read_bytes()
    again = RUNNER.invoke(app, arguments)
    assert json.loads(again.stdout) == report and out.read_bytes() == written  # nothing was run a second time
