"""The predictions of mini-swe-agent, as its own batch command leaves them, through `agent-r3 eval grade`."""

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import docker
import pytest
import yaml

from agent_r3.types import Task
from benchmarks.sandbox_peers import install_peers
from tests.support.cli import Cli
from tests.support.predictions import verdicts, write_lines
from tests.support.tasks import MISTUNE, PATHSPEC

pytestmark = pytest.mark.docker

# What the deterministic model does, whatever the instance: the fix where it fits, else something else.
_FIX = "if [ -d pathspec ]; then git apply <<'END'\n{gold}END\nelse echo '# nothing' >>src/mistune/toc.py; fi"
_DIFF = "git add -A && git diff --cached >/tmp/patch.txt"
_SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat /tmp/patch.txt"


@pytest.fixture
def mini_containers(docker_engine: docker.APIClient, run_name: str) -> Iterator[str]:
    """The label of mini-swe-agent's containers, which it leaves to a process in the background to remove."""
    label = f"agent_r3.test={run_name}"
    yield label
    for container in docker_engine.containers(all=True, filters={"label": label}):
        with contextlib.suppress(docker.errors.APIError):  # it is being removed
            docker_engine.remove_container(container, force=True)


def mini_swe_agent(folder: Path, tasks: Mapping[str, Task], label: str) -> Path:
    """Run its own batch command with its deterministic model; returns its preds.json."""
    commands = (_FIX.format(gold=tasks[PATHSPEC].gold_patch), _DIFF, _SUBMIT)
    outputs = [{"role": "assistant", "content": "", "extra": {"actions": [{"command": one}]}} for one in commands]
    config = {
        "agent": {"system_template": "s", "instance_template": "{{task}}", "cost_limit": 0.0},
        "environment": {
            "cwd": "/testbed",
            "interpreter": ["bash", "-c"],
            "run_args": ["--rm", "--init", "--network", "none", "--label", label],
        },
        "model": {"model_class": "deterministic", "model_name": "deterministic", "outputs": outputs},
    }
    (folder / "data").mkdir()
    (folder / "mini.yaml").write_text(yaml.safe_dump(config))
    write_lines(
        folder / "data" / "test.jsonl",
        *(
            {"instance_id": task.id, "problem_statement": task.problem_statement, "image_name": task.image}
            for task in tasks.values()
        ),
    )
    python = Path(install_peers(print))
    options = {
        "--subset": folder / "data",
        "--split": "test",
        "-o": folder / "mini",
        "-c": folder / "mini.yaml",
        "-w": 2,
    }
    own = {"HF_HUB_OFFLINE": "1", "HF_HOME": folder / "hf", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(
        [python.with_name("mini-extra"), "swebench", *(str(part) for option in options.items() for part in option)],
        env={**os.environ, **{name: str(value) for name, value in own.items()}},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "mini" / "preds.json"


def test_predictions_of_mini_swe_agent_are_graded(
    cli: Cli, offline_rows: Path, built_tasks: Mapping[str, Task], tmp_path: Path, run_name: str, mini_containers: str
) -> None:
    preds = mini_swe_agent(tmp_path, built_tasks, mini_containers)
    found = json.loads(preds.read_text())
    assert found.keys() == {PATHSPEC, MISTUNE} and found[PATHSPEC]["model_name_or_path"] == "deterministic"
    out = tmp_path / "out"
    code, said, _ = cli("eval", "grade", preds, f"run.name={run_name}", "--dataset", offline_rows, "--out", out)
    assert code == 0, said
    assert verdicts(out) == {(PATHSPEC, 0): ("resolved", 33), (MISTUNE, 0): ("failed", 7)}
