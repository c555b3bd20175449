"""The trainer as a process: it learns what is rewarded, survives kill -9 and SIGTERM, and ranks agree with one."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from agent_r3.config import Config, TrainConfig, dump_config, load_config
from agent_r3.errors import UserError
from agent_r3.hfconfig import read_model
from agent_r3.metrics import read_metrics
from agent_r3.store import EmbeddedServer
from agent_r3.types import MoEShape
from tests.support.rollout import ScriptedRollout, alternating

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(600)]

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
            return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def metrics(self) -> list[dict[str, float]]:
        return read_metrics(self.folder)

    def wait_for_step(self, process: "subprocess.Popen[bytes]", step: int) -> None:
        """Until the metrics of `step` are written."""
        deadline = time.monotonic() + DEADLINE_S
        while not any(line["step"] == step for line in self.metrics()):
            assert process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < deadline, self.log.read_text()[-3000:]
            time.sleep(0.02)

    def finish(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.wait(timeout=DEADLINE_S) == 0, self.log.read_text()[-3000:]

    def weights(self) -> dict[str, torch.Tensor]:
        (folder,) = (self.folder / "weights").iterdir()
        assert folder.name == f"v{STEPS:06d}"
        return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedServer(tmp_path_factory.mktemp("store")) as server:
        yield server.url


@pytest.fixture(scope="module")
def shape(tiny_moe: Path) -> MoEShape:
    return read_model(tiny_moe).require_moe()


def make_run(name: str, model: Path, url: str, folder: Path, **train: object) -> Run:
    settings: Mapping[str, object] = {
        "steps": STEPS,
        "dtype": "float32",
        "lr": 1e-3,
        "dynamic_sampling": "filter",
        "micro_batch_tokens": 64,
        "diagnostics_trajectories": 4,
        "save_every": 2,
        **train,
    }
    config = Config.model_validate(
        {
            "run": {"name": name, "dir": folder},
            "model": {"path": str(model)},
            "tasks": {"dataset": "offline"},
            "store": {"url": url},
            "rollout": {"groups_per_step": GROUPS, "samples_per_task": SAMPLES},
            "train": settings,
        }
    )
    path = folder / f"{name}.yaml"
    path.write_text(dump_config(config))
    return Run(path, config.run.folder, name, url, folder / f"{name}.log")


@pytest.fixture(scope="module")
def finished(
    tiny_moe: Path, shape: MoEShape, server_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Run, ScriptedRollout]]:
    """One rank, from the first step to the last without interruption."""
    run = make_run("straight", tiny_moe, server_url, tmp_path_factory.mktemp("straight"))
    with ScriptedRollout(server_url, run.name, shape, rewards) as rollout:
        run.finish(run.start())
    yield run, rollout


def test_each_step_trains_its_groups_under_its_own_policy_version(finished: tuple[Run, ScriptedRollout]) -> None:
    run, rollout = finished
    assert [(group.index, group.policy_version) for group in rollout.groups] == [
        (index, index // GROUPS) for index in range(STEPS * GROUPS)
    ]
    assert [line["step"] for line in run.metrics()] == list(range(STEPS))
    assert [line["train/groups_kept"] for line in run.metrics()] == [2, 1, 2, 2, 2]


def test_metrics_cover_rollout_replay_and_time(finished: tuple[Run, ScriptedRollout]) -> None:
    for line in finished[0].metrics():
        assert line["rollout/episodes"] == GROUPS * SAMPLES and line["rollout/turns_mean"] == 2
        assert line["rollout/ending/max_turns"] == GROUPS and line["rollout/infra/engine"] == GROUPS
        assert line["rollout/reprefilled_tokens"] == 0 and line["rollout/cached_tokens"] == 16 * GROUPS * SAMPLES
        assert line["r3/coverage"] == 1 and line["r3/rows_missing"] == 0 and line["r3/fallback_fraction"] == 0
        assert line["r3/mixed_version_fraction"] == 0 and line["r3/bytes_per_token"] > 0
        assert line["r3/mismatch_routers"] > 0.5  # rows of random experts
        assert line["r3/kl_replay"] > 0 and line["r3/kl_native"] > 0 and line["r3/kl_replay"] != line["r3/kl_native"]
        assert line["train/entropy"] > 0 and line["train/grad_norm"] > 0 and line["train/clip_fraction"] == 0
        for stage in ("wait", "load", "logprobs", "diagnostics", "update", "push", "step", "rollout"):
            assert line[f"perf/{stage}_s"] > 0


def test_training_makes_rewarded_behaviour_likelier(finished: tuple[Run, ScriptedRollout], tiny_moe: Path) -> None:
    from agent_r3.trainer.batch import make_packs
    from agent_r3.trainer.megatron import Policy
    from tests.support.rollout import scripted_turns
    from tests.support.trajectories import trajectory_of

    run, _ = finished
    (trained,) = (run.folder / "weights").iterdir()
    means = []
    for path in (tiny_moe, trained):
        policy = Policy.from_pretrained(path, TrainConfig(dtype="float32"))
        assert policy.shape is not None
        mean = []
        for good in (False, True):
            # A prompt and rows that were not trained on.
            trajectory = trajectory_of(scripted_turns(99, int(good), good, 0, policy.shape))
            (pack,) = make_packs([(0,)], {0: trajectory}, torch.zeros(1).numpy(), policy.shape)
            (output,) = policy.logprobs([pack], replay=True)
            mean.append(float(output.logprobs[pack.loss_mask].mean()))
        means.append(mean)
    (bad_before, good_before), (bad_after, good_after) = means
    assert good_after > good_before + 0.5
    assert good_after - bad_after > good_before - bad_before + 0.5


def test_kill_9_and_sigterm_lose_no_group_and_train_none_twice(
    finished: tuple[Run, ScriptedRollout], tiny_moe: Path, shape: MoEShape, server_url: str, tmp_path: Path
) -> None:
    run = make_run("interrupted", tiny_moe, server_url, tmp_path)
    with ScriptedRollout(server_url, run.name, shape, rewards) as rollout:
        process = run.start()
        run.wait_for_step(process, 2)  # the checkpoint holds steps 0 and 1; step 3 is under way
        process.kill()
        process.wait()
        process = run.start(resume=True)
        run.wait_for_step(process, 3)
        process.send_signal(signal.SIGTERM)
        run.finish(process)
        steps_before = len(run.metrics())
        if steps_before < STEPS:
            run.finish(run.start(resume=True))
    assert sorted(group.index for group in rollout.groups) == list(range(STEPS * GROUPS))
    straight, _ = finished
    assert [line["step"] for line in run.metrics()] == list(range(STEPS))
    for name in ("train/loss", "train/grad_norm", "r3/kl_replay", "rollout/tokens"):
        assert [line[name] for line in run.metrics()] == pytest.approx([line[name] for line in straight.metrics()])
    for name, tensor in straight.weights().items():
        torch.testing.assert_close(run.weights()[name], tensor, msg=lambda text, name=name: f"{name}: {text}")


def test_two_ranks_train_like_one(
    finished: tuple[Run, ScriptedRollout], tiny_moe: Path, shape: MoEShape, server_url: str, tmp_path: Path
) -> None:
    run = make_run("ranks", tiny_moe, server_url, tmp_path)
    with ScriptedRollout(server_url, run.name, shape, rewards):
        run.finish(run.start(ranks=2))
    straight, _ = finished
    same = ("train/loss", "train/grad_norm", "train/entropy", "r3/kl_replay", "r3/kl_native", "r3/mismatch_routers")
    for name in (*same, "rollout/tokens", "rollout/sampled_tokens", "r3/coverage", "r3/diagnosed_tokens"):
        expected = [line[name] for line in straight.metrics()]
        assert [line[name] for line in run.metrics()] == pytest.approx(expected, rel=1e-3, abs=1e-5), name
    before = load_file(tiny_moe / "model.safetensors")
    ours, theirs = run.weights(), straight.weights()
    moved = sum(float((theirs[name] - before[name]).square().sum()) for name in theirs)
    apart = sum(float((theirs[name] - ours[name]).square().sum()) for name in theirs)
    assert apart < 1e-4 * moved


def test_a_new_run_in_the_folder_of_an_earlier_one_is_refused(finished: tuple[Run, ScriptedRollout]) -> None:
    from agent_r3.trainer.loop import main

    run, _ = finished
    with pytest.raises(UserError, match=f"checkpoint of step {STEPS}: continue that run with --resume"):
        main(load_config(run.config), run.url, [])
    assert len(run.metrics()) == STEPS
