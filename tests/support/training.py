"""`agent-r3 train configs/tiny-cpu.yaml` by its command, nothing scripted; one short run serves the whole session."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import docker
import psutil
import pytest

from agent_r3.tiny import SCRIPTS
from tests.support.docker import containers_of
from tests.support.otlp import Collector, collecting

COMMAND = [sys.executable, "-m", "agent_r3.cli"]
CONFIG = Path(__file__).parents[2] / "configs" / "tiny-cpu.yaml"
SMALL = ("train.steps=2", "train.diagnostics_trajectories=8", "rollout.samples_per_task=4")
HELD = ("mistune__3.1.1", "pathspec__0.12.1")  # two of the tasks: the tiny policy knows no others
_FINISHED = (
    # SGLang's own record of every request: ids in, ids out.
    "engine.extra_args=[--log-requests, --log-requests-level, '3', --log-requests-format, json]",
    f"eval.tasks={{dataset: offline, include: [{', '.join(HELD)}]}}",
    "eval.every=2",
)


@dataclass(frozen=True)
class Training:
    """The command as a process."""

    process: subprocess.Popen[str]
    folder: Path

    def wait_for(self, what: str, there: Callable[[], bool], timeout_s: float = 240) -> None:
        deadline = time.monotonic() + timeout_s
        while not there():
            assert self.process.poll() is None, f"ended before {what}: {self.output()}"
            assert time.monotonic() < deadline, f"no {what} after {timeout_s} s: {self.output()}"
            time.sleep(0.2)

    def finish(self, timeout_s: float = 400) -> int:
        return self.process.wait(timeout=timeout_s)

    def output(self) -> str:
        return (self.folder.parent / f"{self.folder.name}.out").read_text()

    def descendants(self, containing: str) -> list[psutil.Process]:
        found = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in found if containing in " ".join(child.cmdline())]


def own_name(label: str) -> str:
    """Containers are found by their run's name, so it is this test session's own."""
    return f"{label}-{os.getpid()}"


def containers(label: str) -> list[str]:
    client = docker.from_env()
    try:
        return containers_of(client.api, own_name(label))
    finally:
        client.close()


@contextlib.contextmanager
def trainings(folder: Path) -> Iterator[Callable[..., Training]]:
    """Starts runs in `folder`; those that still go on at the end are stopped."""
    started: list[Training] = []

    def start(label: str, *overrides: str) -> Training:
        name = own_name(label)
        out = (folder / f"{name}.out").open("w")
        command = [*COMMAND, "train", str(CONFIG), f"run.name={name}", f"run.dir={folder}"]
        process = subprocess.Popen([*command, *SMALL, *overrides], stdout=out, stderr=subprocess.STDOUT, text=True)
        started.append(Training(process, folder / name))
        return started[-1]

    yield start
    for training in started:
        if training.process.poll() is None:
            training.process.send_signal(signal.SIGINT)
            training.process.wait(timeout=60)


@pytest.fixture(scope="session")
def tiny_policy() -> None:
    """The tasks and the policy that the demo makes; kept in the user's cache."""
    only = [part for task in SCRIPTS for part in ("--only", task)]
    subprocess.run([*COMMAND, "tasks", "build", "offline", *only], check=True)
    subprocess.run([*COMMAND, "model", "tiny"], check=True)


@pytest.fixture(scope="session")
def finished_traces() -> Iterator[Collector]:
    """The traces of `finished_training`."""
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="session")
def finished_training(
    tiny_policy: None, tmp_path_factory: pytest.TempPathFactory, finished_traces: Collector
) -> Iterator[Training]:
    """A run of two steps in two goes: one step, then `--resume` with one more.

    SGLang recorded every request, and the policy was evaluated before the steps and after each.
    """
    traced = f"track.otlp_endpoint={finished_traces.url}"
    with trainings(tmp_path_factory.mktemp("finished")) as start:
        first = start("finished", *_FINISHED, traced, "train.steps=1")
        assert first.finish() == 0, first.output()
        again = start("finished", *_FINISHED, traced, "train.steps=2", "--resume")
        assert again.finish() == 0, again.output()
        yield again
