"""`make chaos-sandbox`: episodes of real rollout workers while containers, the engine and the workers are killed.

The last line of the output is one JSON object: `episodes` by what became of them, `faults` by kind, and three counts
that must be 0: `leaked` (containers, networks, sockets, processes, ... of ours that are left), `infra_as_reward`
(rewards or observations that are not what the scripted agent deserves or must have seen), `unaccounted`. The exit
status is 1 if one of them is not 0; each finding is printed before.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from agent_r3.archive import list_episodes, read_episode
from agent_r3.config import Config, SandboxConfig, TasksConfig, dump_config
from agent_r3.envs.build import build_tasks
from agent_r3.envs.datasets import load_tasks
from agent_r3.envs.images import ImageBuilder
from agent_r3.envs.local import open_pool, reap
from agent_r3.envs.offline import offline_spec_path
from agent_r3.store import EmbeddedServer, GroupReader
from agent_r3.types import Task, TrajectoryGroup
from tests.chaos import leaks
from tests.chaos.account import Account, Claims, account, wrongs
from tests.chaos.agents import COMMAND_S
from tests.chaos.storm import Storm, Workers
from tests.support.engine import save_tokenizer
from tests.support.private_engine import PrivateEngine
from tests.support.tasks import MISTUNE, PATHSPEC

SAMPLES, RETRIES, WORKERS = 4, 3, 3
_SETTLE_S = 30.0  # what is on its way out may take so long to go


@dataclass(frozen=True, slots=True)
class Options:
    episodes: int
    seed: int
    kill_every_s: float
    limit_s: float
    keep: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--episodes", type=int, default=200, help=f"a multiple of {SAMPLES}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kill-every-s", type=float, default=3.0, help="mean time between two killed containers")
    parser.add_argument("--limit-s", type=float, default=1200.0, help="give up after that")
    parser.add_argument("--keep", action="store_true", help="keep logs and episodes, and say where")
    options = Options(**vars(parser.parse_args()))
    if options.episodes % SAMPLES:
        parser.error(f"--episodes must be a multiple of {SAMPLES}")
    result = run(options)
    print(json.dumps(result))
    raise SystemExit(1 if result["leaked"] or result["infra_as_reward"] or result["unaccounted"] else 0)


def run(options: Options) -> dict[str, Any]:
    """One chaos run on a private engine in a folder of its own, all of which is gone afterwards."""
    began = time.monotonic()
    mark = uuid.uuid4().hex[:12]
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    scratch = folder / "tmp"
    scratch.mkdir()
    try:
        tasks = asyncio.run(_tasks())
        # With groups under one name, what runs in a container can be told from outside, also when its engine is gone.
        groups = ("--exec-opt", "native.cgroupdriver=cgroupfs", "--cgroup-parent", f"/chaos-{mark}")
        with PrivateEngine(folder / "engine", *groups) as engine:
            _say(f"loading {len(tasks)} task images into a private engine")
            engine.load(*(task.image for task in tasks))
            # From here on for this process (the reaper) and all its children.
            os.environ |= {"DOCKER_HOST": engine.url, "TMPDIR": str(scratch), leaks.MARK: mark}
            tempfile.tempdir = None
            return _run_on(engine, folder, tasks, options, mark, began)
    finally:
        leaks.remove_cgroups(f"chaos-{mark}")
        if options.keep:
            _say(f"kept: {folder}")
        else:
            shutil.rmtree(folder)


async def _tasks() -> list[Task]:
    async with open_pool(SandboxConfig(kind="docker"), run="tasks-build") as pool:
        await build_tasks(offline_spec_path("offline"), (PATHSPEC, MISTUNE), ImageBuilder(), pool, lambda *_: None)
    return load_tasks(TasksConfig(dataset="offline", include=(PATHSPEC, MISTUNE)))


def _run_on(
    engine: PrivateEngine, folder: Path, tasks: list[Task], options: Options, mark: str, began: float
) -> dict[str, Any]:
    with contextlib.closing(engine.client()) as api:
        networks = {network["Name"] for network in api.networks()}
    model = folder / "model"
    model.mkdir()
    save_tokenizer(model)
    with EmbeddedServer(folder / "store") as store:
        config = _config(folder, store.url, options.seed)
        (folder / "config.yaml").write_text(dump_config(config))
        groups, storm, killed = _weather(engine, folder, config, options)
        _say("stopping: what is left?")
        reaped = reap(config.sandbox, config.run.name)  # as `agent-r3 train` does when its workers have ended
        notes = [json.loads(line) for line in (folder / "claims.jsonl").read_text().splitlines()]
        found = account(groups, options.episodes // SAMPLES, SAMPLES, RETRIES, Claims(notes, killed))
        wrong = _wrongs(config, groups, {task.id: task for task in tasks})
    left = _left(engine, folder, mark, networks, storm.engine_ended_at)
    orphans = left.pop("engine_orphans")
    named = [*(f"forgotten by the killed engine: {name}" for name in orphans)]
    named += [f"left: {kind}: {name}" for kind, names in left.items() for name in names]
    for problem in [*found.problems, *wrong, *named]:
        _say(problem)
    return {
        "episodes": _by_kind(options, found),
        "faults": dict(storm.faults),
        "leaked": sum(map(len, left.values())),
        "infra_as_reward": len(wrong),
        "unaccounted": len(found.problems),
        "reaped": reaped,
        "engine_orphans": len(orphans),
        "seed": options.seed,
        "seconds": round(time.monotonic() - began, 1),
    }


def _by_kind(options: Options, found: Account) -> dict[str, Any]:
    return {
        "all": options.episodes,
        "finished": found.finished,
        "finished_after_retries": found.finished_after_retries,
        "left_out": found.left_out,
        "failed_attempts": dict(found.failures),
        "groups_run_again": found.groups_run_again,
    }


def _config(folder: Path, store_url: str, seed: int) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "chaos", "dir": str(folder / "runs"), "seed": seed},
            "model": {"path": str(folder / "model")},
            "tasks": {"dataset": "offline", "include": [PATHSPEC, MISTUNE]},
            "agent": {"max_tokens": 50_000, "command_timeout_s": COMMAND_S},
            "rollout": {"samples_per_task": SAMPLES, "concurrency": 2 * SAMPLES, "retries": RETRIES},
            "sandbox": {"kind": "docker", "warm": 2, "memory": "512m", "watch_s": 5},
            "grading": {"reuse": False, "concurrency": 3},
            "store": {"url": store_url},
        }
    )


def _weather(
    engine: PrivateEngine, folder: Path, config: Config, options: Options
) -> tuple[list[TrajectoryGroup], Storm, list[int]]:
    """Run all groups through the storm: the delivered groups, the storm, the killed workers' process ids."""
    wanted = options.episodes // SAMPLES
    groups: list[TrajectoryGroup] = []
    chance = random.Random(options.seed)
    assert config.store.url is not None
    with GroupReader.connect(config.store.url, config.run.name) as reader, Workers(folder, WORKERS) as workers:
        reader.reset_position(0)
        reader.set_policy(0, "scripted")
        reader.set_demand(wanted)
        storm = Storm(engine, workers, chance, every_s=options.kill_every_s, say=_say)
        deadline = time.monotonic() + options.limit_s
        while len(groups) < wanted:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{len(groups)} of {wanted} groups after {options.limit_s:g} s; faults {storm.faults}"
                )
            workers.check()
            before = len(groups)
            groups += [delivery.group for delivery in reader.read(wanted, 0.3)]
            if len(groups) // 5 > before // 5:
                _say(f"{len(groups)} of {wanted} groups, faults so far: {dict(storm.faults)}")
            storm.at(len(groups) / wanted)
        for group in groups:
            for trajectory_id in group.trajectory_ids:
                reader.load(trajectory_id)  # raises for one that is not whole
        workers.stop()
        if not storm.over:
            raise RuntimeError(f"the run was over before the storm: {storm.faults}; ask for more episodes")
        return groups, storm, workers.killed


def _wrongs(config: Config, groups: list[TrajectoryGroup], tasks: Mapping[str, Task]) -> list[str]:
    rewards = {
        trajectory_id: reward
        for group in groups
        for trajectory_id, reward in zip(group.trajectory_ids, group.rewards, strict=True)
    }
    found = []
    for path in list_episodes(config.run.folder):
        info = read_episode(path).info
        found += wrongs(info, tasks, rewards.pop(info.id, None))
    return found + [f"{trajectory_id}: published and not archived" for trajectory_id in rewards]


def _left(
    engine: PrivateEngine, folder: Path, mark: str, networks: set[str], engine_ended_at: float | None
) -> dict[str, list[str]]:
    """What is left once what was on its way out had its time."""
    deadline = time.monotonic() + _SETTLE_S
    while True:
        with contextlib.closing(engine.client()) as api:
            found = leaks.on_engine(api, networks)
        spared = {os.getpid(), *leaks.running(engine.processes(), "dockerd", "containerd")}
        found |= leaks.on_host(mark, f"chaos-{mark}", folder, spared, engine_ended_at)
        ours = [name for kind, names in found.items() if kind != "engine_orphans" for name in names]
        if not ours or time.monotonic() > deadline:
            return found
        time.sleep(0.5)


def _say(what: str) -> None:
    print(f"chaos: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    main()
