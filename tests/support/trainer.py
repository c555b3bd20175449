"""The trainer as a process on a real store, and one straight run of it that tests compare others with."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from agent_r3.config import Config, dump_config, load_config
from agent_r3.hfconfig import read_model
from agent_r3.metrics import read_metrics
from agent_r3.process import signal_group
from agent_r3.store import EmbeddedServer
from agent_r3.types import MoEShape
from tests.support.rollout import ScriptedRollout, alternating

if TYPE_CHECKING:
    import torch

STEPS, GROUPS, SAMPLES = 5, 2, 4
DEADLINE_S = 180.0  # of one process; it takes about 15 s on two idle cores
# The process under test: `agent-r3 trainer` without servers to push to.
TRAINER = """
import sys
from pathlib import Path
import torch
from agent_r3.config import load_config
from agent_r3.metrics import setup_logging
from agent_r3.trainer.loop import main
if __name__ == "__main__":  # Megatron's checkpoint writer starts processes that import this module
    torch.set_num_threads(1)
    setup_logging()
    config = load_config(Path(sys.argv[1]))
    main(config, config.store.url, [], resume=sys.argv[2] == "resume")
"""


def rewards(index: int) -> list[float]:
    """Group 3, in the second step, has equal rewards."""
    return [1.0] * SAMPLES if index == 3 else alternating(SAMPLES)(index)


@dataclass(frozen=True)
class Run:
    """A run of its own name in the shared store."""

    config: Path
    folder: Path
    name: str
    url: str
    log: Path

    def start(self, *, resume: bool = False, ranks: int = 1) -> "subprocess.Popen[bytes]":
        script = self.log.with_suffix(".py")
        script.write_text(TRAINER)
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        command = [sys.executable, *torchrun, str(script), str(self.config), "resume" if resume else "new"]
        with self.log.open("ab") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

    def kill(self, process: "subprocess.Popen[bytes]") -> None:
        """kill -9. What it leaves, such as helpers of a checkpoint's writer, goes after it, as under a supervisor."""
        process.kill()
        process.wait()
        signal_group(process, signal.SIGKILL)

    def loaded(self) -> Config:
        return load_config(self.config)

    def metrics(self) -> list[dict[str, float]]:
        return read_metrics(self.folder)

    def wait_for_step(self, process: "subprocess.Popen[bytes]", step: int) -> None:
        """Until the metrics of `step` are written."""
        self.wait_for(process, lambda: any(line["step"] == step for line in self.metrics()))

    def wait_for(self, process: "subprocess.Popen[bytes]", there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not there():
            assert process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < deadline, self.log.read_text()[-3000:]
            time.sleep(0.02)

    def finish(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.wait(timeout=DEADLINE_S) == 0, self.log.read_text()[-3000:]

    def weights(self) -> "dict[str, torch.Tensor]":
        from safetensors.torch import load_file

        (folder,) = (self.folder / "weights").iterdir()
        assert folder.name == f"v{STEPS:06d}"
        return load_file(folder / "model.safetensors")


@pytest.fixture(scope="session")
def trainer_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a store that all runs share, each under its own name."""
    with EmbeddedServer(tmp_path_factory.mktemp("store")) as server:
        yield server.url


@pytest.fixture(scope="session")
def tiny_shape(tiny_moe: Path) -> MoEShape:
    return read_model(tiny_moe).require_moe()


def make_run(name: str, model: Path, url: str, folder: Path, *, held: Mapping[str, object] | None = None) -> Run:
    """A run's config, written; `held` is its section `eval`."""
    config = Config.model_validate(
        {
            "run": {"name": name, "dir": folder},
            "model": {"path": str(model)},
            "tasks": {"dataset": "offline"},
            "store": {"url": url},
            "rollout": {"groups_per_step": GROUPS, "samples_per_task": SAMPLES},
            "train": {
                "steps": STEPS,
                "dtype": "float32",
                "lr": 1e-3,
                "dynamic_sampling": "filter",
                "micro_batch_tokens": 64,
                "diagnostics_trajectories": 4,
                "save_every": 2,
            },
            "eval": held or {},
        }
    )
    path = folder / f"{name}.yaml"
    path.write_text(dump_config(config))
    return Run(path, config.run.folder, name, url, folder / f"{name}.log")


@pytest.fixture(scope="session")
def straight_run(
    tiny_moe: Path, tiny_shape: MoEShape, trainer_store: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Run, ScriptedRollout]:
    """One rank, from the first step to the last without interruption, and what it was fed."""
    run = make_run("straight", tiny_moe, trainer_store, tmp_path_factory.mktemp("straight"))
    with ScriptedRollout(trainer_store, run.name, tiny_shape, rewards) as rollout:
        run.finish(run.start())
    return run, rollout
