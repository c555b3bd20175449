"""The command line: help is quick and complete; what the user can mend is one line and exit code 2."""

import json
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from agent_r3.cli.main import app
from agent_r3.config import dump_config, load_config
from agent_r3.types import Task
from tests.support.cli import Cli
from tests.support.engine import edit_config, save_tiny_moe

ROOT = Path(__file__).parent.parent
TINY = ROOT / "configs" / "tiny-cpu.yaml"


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_moe(tmp_path_factory.mktemp("moe"))


@pytest.fixture
def config(tmp_path: Path, moe: Path, pathspec_task: Task) -> Path:
    """A config that would run."""
    path = tmp_path / "config.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "run": {"name": "cli", "dir": str(tmp_path / "runs")},
                "model": {"path": str(moe)},
                "tasks": {"dataset": "offline", "include": [pathspec_task.id]},
                "agent": {"max_tokens": 2048},
                "engine": {"device": "cpu", "context_length": 2048, "max_total_tokens": 8192},
            }
        )
    )
    return path


def refused(cli: Cli, *args: object) -> str:
    """The one line with which the command is refused; exit code 2, nothing on stdout."""
    code, out, err = cli(*args)
    lines = err.strip().splitlines()
    assert (code, len(lines)) == (2, 1), (code, out, err)
    assert lines[0].startswith("agent-r3: ")
    return lines[0]


def test_help_answers_in_half_a_second_and_imports_nothing_heavy() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "agent_r3.cli", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {line.split("|")[2].strip() for line in result.stderr.splitlines() if line.count("|") == 2}
    heavy = {"torch", "numpy", "pydantic", "docker", "redis", "transformers", "megatron", "verl", "sglang", "httpx"}
    assert not imported & heavy
    assert "train" in result.stdout


def test_every_command_has_help_with_an_example() -> None:
    import typer

    def commands(command: object, path: str) -> list[tuple[str, object]]:
        children = getattr(command, "commands", None)
        if not children:
            return [(path, command)]
        return [found for name, child in children.items() for found in commands(child, f"{path} {name}")]

    found = commands(typer.main.get_command(app), "agent-r3")
    assert len(found) >= 12
    for path, command in found:
        text = getattr(command, "help", "") or ""
        assert re.search(r"Example: .*(agent-r3|agent_r3)", text), f"{path} has no example"


def test_dry_run_prints_a_config_that_reads_back_equal(cli: Cli, config: Path, tmp_path: Path) -> None:
    code, out, _ = cli("train", config, "train.lr=1e-6", "--dry-run")
    assert code == 0
    again = tmp_path / "again.yaml"
    again.write_text(out)
    assert load_config(again) == load_config(config, ["train.lr=1e-6"])
    assert yaml.safe_load(out)["train"]["lr"] == 1e-6


@pytest.mark.parametrize("example", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_the_example_configs_are_valid(example: Path) -> None:
    assert dump_config(load_config(example))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["train.lrr=1"], "unknown key `train.lrr`; did you mean `lr`?"),
        (["trian.lr=1"], "unknown key `trian`; did you mean `train`?"),
        (["train.steps=many"], "`train.steps`"),
        (["train.steps"], "'train.steps' is not of the form section.key=value"),
        (["model.path.x=1"], "'path' is a value, not a section"),
        (["agent.max_tokens=999999"], "exceeds engine.context_length"),
        (["sampling.top_p=0.9"], "training needs top_p=1"),
        (["agent.tools=[search,nosuch]"], "unknown tool 'nosuch'"),
        (["model.path=/nowhere"], "model folder /nowhere is not there"),
        (["tasks.include=[pathspec__0.12.2]"], "did you mean `pathspec__0.12.1`?"),
        (["tasks.dataset=nothing.jsonl", "tasks.include=[]"], "dataset file nothing.jsonl is not there"),
        (["store.url=redis://127.0.0.1:1/0"], "no Redis server answers"),
        (["store.url=postgres://x"], "is not a Redis URL"),
        (["engine.chunked_prefill_size=-1"], "chunked_prefill_size"),
        (["engine.extra_args=[--enable-hierarchical-cache]"], "--enable-hierarchical-cache is refused"),
        (["engine.routed_experts=false"], "train.routing is r3 but engine.routed_experts is off"),
    ],
)
def test_bad_config_is_one_line_and_exit_code_2(cli: Cli, config: Path, args: list[str], said: str) -> None:
    assert said in refused(cli, "train", config, *args)
    assert not (config.parent / "runs").exists(), "nothing may be started or written"


def test_a_missing_config_file_is_named(cli: Cli, tmp_path: Path) -> None:
    assert "is not there" in refused(cli, "train", tmp_path / "no.yaml")


def test_a_dense_model_cannot_be_trained_with_r3(cli: Cli, config: Path, moe: Path, tmp_path: Path) -> None:
    dense = shutil.copytree(moe, tmp_path / "dense")
    edit_config(dense, num_experts=0, num_experts_per_tok=0)
    assert "is not a Mixture-of-Experts model" in refused(cli, "train", config, f"model.path={dense}")


def test_a_tokenizer_of_another_model_is_refused(cli: Cli, config: Path, moe: Path, tmp_path: Path) -> None:
    other = shutil.copytree(moe, tmp_path / "other")
    edit_config(other, vocab_size=100)
    assert "does not match the model" in refused(cli, "train", config, f"model.path={other}")


def test_a_port_in_use_is_told_before_the_roles_work(cli: Cli, config: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"cannot listen on 127.0.0.1:{port}" in refused(cli, "train", config, f"engine.port={port}")


def test_engines_that_are_not_there_end_the_run_at_start_in_one_line(cli: Cli, config: Path) -> None:
    line = refused(cli, "train", config, "engine.urls=[http://127.0.0.1:1]")
    assert "engine.urls: engine http://127.0.0.1:1 is not reachable" in line


def test_a_row_without_a_column_is_named_with_its_place(cli: Cli, config: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"repo_name": "x"}) + "\n")
    line = refused(cli, "train", config, f"tasks.dataset={rows}", "tasks.include=[]")
    assert "row 1" in line and "docker_image" in line


def test_a_run_folder_is_never_overwritten_unasked(cli: Cli, config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "cli"
    folder.mkdir(parents=True)
    (folder / "precious").write_text("x")
    assert "--resume goes on, --overwrite deletes it" in refused(cli, "train", config)
    assert (folder / "precious").exists()


def test_doctor_names_every_part_and_says_what_to_do(cli: Cli) -> None:
    began = time.monotonic()
    code, out, _ = cli("doctor", "--json")
    findings = {finding["part"]: finding for finding in json.loads(out)}
    assert code == 0
    assert {"python", "torch", "sglang", "megatron-core", "verl", "docker engine", "embedded store"} <= findings.keys()
    assert findings["docker compose"]["ok"] and "compose 2." in findings["docker compose"]["found"]
    assert all(finding["ok"] or finding["advice"] for finding in findings.values())
    assert time.monotonic() - began < 60


def test_doctor_fails_and_says_how_without_docker_and_bwrap(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    monkeypatch.setenv("PATH", "")
    code, out, _ = cli("doctor", "--json")
    findings = {finding["part"]: finding for finding in json.loads(out)}
    docker, compose = findings["docker engine"], findings["docker compose"]
    assert code == 1
    assert not docker["ok"] and "docker/engine.sh" in docker["advice"]
    assert compose["found"] == "compose missing, buildx missing" and "scripts/docker-plugins.sh" in compose["advice"]


def test_training_without_docker_is_refused_in_one_line(
    cli: Cli, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    assert "no Docker engine" in refused(cli, "train", config, "sandbox.kind=docker")
