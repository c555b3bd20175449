"""`agent-r3 eval grade`, as a user runs it, in real containers."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import docker
import pytest

from agent_r3.config import load_config
from agent_r3.envs.commits import file_diff, patch_of
from agent_r3.eval.dataset import InstanceInfo, read_dataset
from agent_r3.eval.folder import EvaluationFolder
from tests.support.cli import Cli
from tests.support.predictions import LONG, entry, verdicts, write_lines
from tests.support.tasks import MISTUNE, PATHSPEC
from tests.support.tiny_image import make_tiny_image

pytestmark = pytest.mark.docker

BINARY = "diff --git a/data.bin b/data.bin\nnew file mode 100644\nindex {}..{}\n{}"
BINARY_WITH_DATA = BINARY.format(
    "0" * 40,
    "20b5be91886d0b6f26dc98a225c0dac05fe2c86e",
    "GIT binary patch\nliteral 3\nKcmYdfNCE%>hycU@\n\nliteral 0\nHcmV?d00001\n\n",
)
BINARY_WITHOUT_DATA = BINARY.format("0" * 7, "20b5be9", "Binary files /dev/null and b/data.bin differ\n")

OWN_TEST = "--- /dev/null\n+++ b/tests/test_own.py\n@@ -0,0 +1 @@\n+x = 1\n"


def test_every_prediction_of_a_mixed_file_gets_its_verdict_and_is_not_graded_again(
    cli: Cli,
    offline_rows: Path,
    gold_patches: Mapping[str, str],
    tmp_path: Path,
    run_name: str,
    no_docker: Callable[[], None],
) -> None:
    wrong = gold_patches[PATHSPEC].replace("match_file", "march_file")
    large = patch_of([file_diff("large.py", None, "x = 1\n" * 5_000)])
    predictions = write_lines(
        tmp_path / "predictions.jsonl",
        *(entry(PATHSPEC, patch, n) for n, patch in enumerate([gold_patches[PATHSPEC], None, " \n", wrong, OWN_TEST])),
        *(entry(MISTUNE, patch, n) for n, patch in enumerate([BINARY_WITH_DATA, BINARY_WITHOUT_DATA, large])),
        entry(LONG, gold_patches[LONG].rstrip("\n")),
        end="\r\n",
        mark="\ufeff",
    )
    out = tmp_path / "out"
    arguments = ["eval", "grade", predictions, f"run.name={run_name}", "grading.max_patch_bytes=20000"]
    arguments += ["--dataset", offline_rows, "--out", out]
    code, said, _ = cli(*arguments)
    assert code == 0, said
    assert verdicts(out) == {
        (PATHSPEC, 0): ("resolved", 33),
        (PATHSPEC, 1): ("empty_patch", 0),
        (PATHSPEC, 2): ("empty_patch", 0),
        (PATHSPEC, 3): ("not_applied", 0),
        (PATHSPEC, 4): ("failed", 32),
        (MISTUNE, 0): ("failed", 7),
        (MISTUNE, 1): ("not_applied", 0),
        (MISTUNE, 2): ("error", 0),
        (LONG, 0): ("resolved", 8),
    }
    folder = EvaluationFolder(out)
    assert folder.grades[PATHSPEC, 4].tests_touched == ("tests/test_own.py",)
    assert list(read_dataset(out).values()) == [
        InstanceInfo(PATHSPEC, "pathspec"), InstanceInfo(MISTUNE, "mistune"), InstanceInfo(LONG, "mistune")
    ]  # fmt: skip
    config = load_config(out / "config.yaml")
    assert (config.model.path, config.tasks.dataset, config.eval.samples) == ("someone", str(offline_rows), 5)
    assert f"/9 {LONG}: resolved: all 8 as expected" in said and f"/9 {PATHSPEC}, sample 1: empty_patch" in said
    assert json.loads((out / "report.json").read_text())

    written = (out / "grades.jsonl").read_bytes()
    no_docker()
    code, said, _ = cli(*arguments)
    assert code == 0 and f"9 of 9 predictions have a verdict in {out}" in said
    assert (out / "grades.jsonl").read_bytes() == written


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_a_grading_that_was_ended_goes_on_and_ends_the_same(
    cli: Cli, offline_rows: Path, gold_patches: Mapping[str, str], tmp_path: Path, run_name: str, signum: signal.Signals
) -> None:
    predictions = write_lines(
        tmp_path / "preds.jsonl",
        *(entry(MISTUNE, gold_patches[MISTUNE] if n % 2 else BINARY_WITH_DATA, n) for n in range(4)),
    )
    out = tmp_path / "out"
    arguments = ["eval", "grade", str(predictions), f"run.name={run_name}", "--dataset", str(offline_rows)]
    arguments += ["--out", str(out), "--workers", "1"]
    command = [sys.executable, "-m", "agent_r3.cli", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(signum)
        rest = process.stdout.read()
    assert f"1/4 {MISTUNE}: failed" in first
    if signum is signal.SIGINT:
        assert process.returncode == 130 and "left to grade; the same command goes on" in rest.splitlines()[-1]
    else:
        assert process.returncode == -signum
    assert 1 <= len(verdicts(out)) < 4
    code, said, _ = cli(*arguments)
    assert code == 0, said
    assert verdicts(out) == {(MISTUNE, n): ("resolved", 8) if n % 2 else ("failed", 7) for n in range(4)}


def test_an_infrastructure_failure_is_no_verdict_and_is_graded_by_the_next_call(
    cli: Cli, offline_rows: Path, gold_patches: Mapping[str, str], tmp_path: Path, run_name: str
) -> None:
    predictions = write_lines(tmp_path / "preds.jsonl", entry(MISTUNE, gold_patches[MISTUNE]), entry(PATHSPEC, ""))
    out = tmp_path / "out"
    arguments = ["eval", "grade", predictions, f"run.name={run_name}", "--dataset", offline_rows, "--out", out]
    code, _, said = cli(*arguments, "sandbox.start_timeout_s=0.001", "grading.retries=0")
    assert code == 1
    assert "the infrastructure failed for 1 prediction (grading 1); the same command tries again" in said
    assert verdicts(out) == {(PATHSPEC, 0): ("empty_patch", 0)}
    [failure] = EvaluationFolder(out).failures
    assert (failure.key, failure.stage, failure.kind) == ((MISTUNE, 0), "grading", "grading")
    code, _, _ = cli(*arguments)
    assert code == 0 and verdicts(out)[MISTUNE, 0] == ("resolved", 8)


def test_a_task_that_turns_out_not_to_be_gradable_keeps_no_other_from_its_verdict(
    cli: Cli,
    offline_rows: Path,
    gold_patches: Mapping[str, str],
    tmp_path: Path,
    run_name: str,
    docker_engine: docker.APIClient,
) -> None:
    image = "agent-r3-test/no-shell:latest"
    make_tiny_image(docker_engine, image, without="bash")
    rows = [json.loads(line) for line in offline_rows.read_text().splitlines()]
    write_lines(offline_rows, rows[0] | {"docker_image": image}, rows[1])
    predictions = write_lines(
        tmp_path / "preds.jsonl", entry(PATHSPEC, gold_patches[PATHSPEC]), entry(MISTUNE, gold_patches[MISTUNE])
    )
    out = tmp_path / "out"
    options = [f"run.name={run_name}", "--dataset", offline_rows, "--out", out, "--workers", 1]
    code, said, error = cli("eval", "grade", predictions, *options)
    assert code == 2 and error.splitlines()[-1].startswith(f"agent-r3: image {image} of task {PATHSPEC} cannot be used")
    assert f"1/2 {PATHSPEC}: cannot be graded: image {image}" in said
    assert verdicts(out) == {(MISTUNE, 0): ("resolved", 8)} and (out / "report.json").exists()


@pytest.mark.parametrize(
    ("content", "options", "said"),
    [
        ([entry("pathspec__0.12.2", "x"), entry(MISTUNE, "x")], [], "1 of 2 predictions are of instances that "),
        ([entry("pathspec__0.12.2", "x")], [], f"first `pathspec__0.12.2`; did you mean `{PATHSPEC}`?"),
        ([entry("django__django-1", "x")], [], "first `django__django-1`; is it of another dataset?"),
        ([entry(MISTUNE, "x"), entry(MISTUNE, "y")], [], f"line 1 and line 2 are both of `{MISTUNE}`"),
        ([entry(MISTUNE, "x") | {"model_patch": 1}], [], "line 1: `model_patch`"),
        ([], [], "holds no predictions"),
        ([entry(MISTUNE, "x")], ["--dataset", "nothing.parquet"], "dataset file nothing.parquet is not there"),
        ([entry(MISTUNE, "x")], ["tasks.include=[nothing]"], "tasks.include: "),
        ([entry(MISTUNE, "x")], [f"tasks.exclude=[{MISTUNE}]"], "leave none of its 1 predictions"),
        ([entry(MISTUNE, "x")], ["grading.timeout=1"], "unknown key `grading.timeout`; did you mean `timeout_s`?"),
        ([entry(MISTUNE, "x")], ["sandbox.broker=unix:///nowhere"], "no broker answers"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(
    cli: Cli, offline_rows: Path, tmp_path: Path, content: list[dict[str, Any]], options: list[str], said: str
) -> None:
    predictions = write_lines(tmp_path / "predictions.jsonl", *content)
    out = tmp_path / "out"
    code, printed, error = cli("eval", "grade", predictions, "--dataset", offline_rows, "--out", out, *options)
    lines = error.strip().splitlines()
    assert (code, len(lines)) == (2, 1), (code, printed, error)
    assert lines[0].startswith("agent-r3: ") and said in lines[0], lines
    assert not out.exists()


def test_rows_without_tests_and_ungradable_ones_are_refused_before_anything_runs(
    cli: Cli, offline_rows: Path, tmp_path: Path
) -> None:
    rows = [json.loads(line) for line in offline_rows.read_text().splitlines()]
    predictions = write_lines(tmp_path / "predictions.jsonl", entry(PATHSPEC, "x"))
    arguments = ["eval", "grade", predictions, "--dataset", offline_rows, "--out", tmp_path / "out"]
    for column, value, said in (
        ("expected_output_json", "{}", "row 1: column `expected_output_json` must be a non-empty JSON object"),
        ("test_command", "make test", f"task {PATHSPEC}: its test command is not of the form"),
        ("docker_image", "agent-r3/task:never-built", "agent-r3/task:never-built"),
    ):
        write_lines(offline_rows, rows[0] | {column: value}, *rows[1:])
        code, _, error = cli(*arguments)
        assert code == 2 and said in error and len(error.strip().splitlines()) == 1, error
    # A row that no prediction is of may be whatever it is.
    write_lines(offline_rows, rows[0], rows[1] | {"test_command": "make test"})
    write_lines(predictions, entry(PATHSPEC, ""))
    assert cli(*arguments)[0] == 0


def test_a_folder_takes_further_predictions_but_no_other_patch_and_no_other_agent(
    cli: Cli, offline_rows: Path, tmp_path: Path
) -> None:
    out, path = tmp_path / "out", tmp_path / "predictions.jsonl"
    arguments = ["eval", "grade", path, "--dataset", offline_rows, "--out", out]
    write_lines(path, entry(MISTUNE, ""))
    assert cli(*arguments)[0] == 0
    write_lines(path, entry(MISTUNE, ""), entry(PATHSPEC, ""), entry(MISTUNE, " ", 1))
    assert cli(*arguments)[0] == 0
    assert len(verdicts(out)) == 3
    for changed, said in (
        (entry(MISTUNE, "\n", 1), f"holds another patch of `{MISTUNE}`, sample 1; choose another --out"),
        (entry(LONG, "", model="other"), "holds predictions of `someone`, these are of `other`; choose another --out"),
    ):
        before = (out / "predictions.jsonl").read_bytes()
        code, _, error = cli(*arguments[:2], write_lines(tmp_path / "changed.jsonl", changed), *arguments[3:])
        assert code == 2 and said in error
        assert (out / "predictions.jsonl").read_bytes() == before


def test_predictions_that_include_and_exclude_leave_out_are_told_and_not_graded(
    cli: Cli, offline_rows: Path, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "predictions.jsonl", entry(MISTUNE, ""), entry(PATHSPEC, ""))
    code, said, _ = cli(
        "eval", "grade", path, f"tasks.include=[{MISTUNE}]", "--dataset", offline_rows, "--out", tmp_path / "out"
    )
    assert code == 0 and "1 of 2 predictions are not graded" in said
    assert verdicts(tmp_path / "out").keys() == {(MISTUNE, 0)}
