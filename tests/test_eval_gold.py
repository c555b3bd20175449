"""`agent-r3 eval gold`, as a user runs it, in real containers."""

import json
from collections.abc import Callable
from pathlib import Path

import docker
import pytest

from agent_r3.envs.images import ImageBuilder
from agent_r3.errors import DataError
from agent_r3.eval.folder import EvaluationFolder
from agent_r3.eval.gold import gold_failures, gold_unknown
from agent_r3.eval.records import Prediction
from tests.support.cli import Cli
from tests.support.predictions import LONG, write_lines
from tests.support.tasks import MISTUNE, PATHSPEC

pytestmark = pytest.mark.docker


def test_gold_patches_that_fail_here_are_listed_with_the_reason(
    cli: Cli, offline_rows: Path, tmp_path: Path, run_name: str, no_docker: Callable[[], None]
) -> None:
    rows = [json.loads(line) for line in offline_rows.read_text().splitlines()]
    rows[1]["parsed_commit_content"] = rows[1]["parsed_commit_content"].replace("if not s:", "if s:")
    commit = json.loads(rows[2]["parsed_commit_content"])
    commit["file_diffs"][0]["is_binary_file"] = True
    rows[2]["parsed_commit_content"] = json.dumps(commit)
    write_lines(offline_rows, *rows)
    out = tmp_path / "gold"
    arguments = ["eval", "gold", offline_rows, f"run.name={run_name}", "--out", out]
    code, said, _ = cli(*arguments, f"tasks.include=[{PATHSPEC}, {MISTUNE}]")
    assert code == 0 and "1 of 2 gold patches do not resolve their instance here:" in said
    code, said, _ = cli(*arguments)
    assert code == 0 and f"  {MISTUNE}: 7 of 8 differ" in said
    failures = gold_failures(out)
    assert failures.keys() == {MISTUNE, LONG} and gold_unknown(out) == ()
    assert failures[LONG] == "it has no gold patch that text can say"
    assert {one.model_name_or_path for one in EvaluationFolder(out).predictions.values()} == {"gold"}
    no_docker()
    code, again, _ = cli(*arguments)
    assert code == 0 and said.splitlines()[-3:] == again.splitlines()[-3:]


def test_gold_without_a_verdict_is_unknown_and_no_failure(
    cli: Cli, offline_rows: Path, tmp_path: Path, run_name: str
) -> None:
    out = tmp_path / "gold"
    arguments = ["eval", "gold", offline_rows, f"run.name={run_name}", f"tasks.include=[{MISTUNE}]", "--out", out]
    code, said, _ = cli(*arguments, "sandbox.start_timeout_s=0.001", "grading.retries=0")
    assert (code, gold_failures(out), gold_unknown(out)) == (1, {}, (MISTUNE,))
    assert said.splitlines()[-1] == f"1 have no verdict yet: {MISTUNE}"
    code, said, _ = cli(*arguments)
    assert (code, gold_failures(out), gold_unknown(out)) == (0, {}, ())
    assert "0 of 1 gold patches do not resolve" in said


def test_solutions_of_harbor_tasks_are_run_once_and_their_changes_graded(
    cli: Cli, docker_engine: docker.APIClient, tmp_path: Path, run_name: str
) -> None:
    dockerfile = f"""
FROM {ImageBuilder().base()}
WORKDIR /app
RUN ldconfig && echo echo bye >app.sh && git init -q . && git add -A \\
 && git -c user.name=a -c user.email=a@localhost commit -q -m base
"""
    for name, solution in (("sound", "echo 'echo hello' >app.sh\n"), ("wrong", "true\n"), ("broken", "exit 3\n")):
        for path, text in {
            "task.toml": 'version = "1.0"\n[metadata]\ndifficulty = "easy"\n',
            "instruction.md": "Make app.sh say hello.\n",
            "environment/Dockerfile": dockerfile,
            "tests/test.sh": '[ "$(sh app.sh)" = hello ]; echo $((1 - $?)) >/logs/verifier/reward.txt\n',
            "solution/solve.sh": solution,
        }.items():
            file = tmp_path / "tasks" / name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    assert cli("tasks", "build", tmp_path / "tasks")[0] == 0
    out = tmp_path / "gold"
    arguments = ["eval", "gold", tmp_path / "tasks", f"run.name={run_name}", "--out", out]
    code, said, _ = cli(*arguments)
    assert code == 0, said
    failures = gold_failures(out)
    assert failures.keys() == {"wrong", "broken"}
    assert failures["wrong"] == "the verifier's reward is 0" and "ended with exit status 3" in failures["broken"]
    written = (out / "grades.jsonl").read_bytes()
    assert cli(*arguments)[0] == 0 and (out / "grades.jsonl").read_bytes() == written


def test_a_folder_without_gold_patches_is_no_evaluation_of_them(tmp_path: Path) -> None:
    folder = EvaluationFolder(tmp_path)
    for _ in range(2):
        with pytest.raises(DataError, match=r"holds no evaluation of gold patches; `agent-r3 eval gold DATASET"):
            gold_failures(tmp_path)
        if not folder.predictions:
            folder.add_prediction(Prediction("a", "m", ""))
