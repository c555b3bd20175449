"""Sandboxes: ours against the Docker SDK, mini-swe-agent and SWE-ReX, in one run on one machine and in one image.

Round trips are of `true` in a fresh bash, in one container alone and in each of 32 at the same time: `sdk` is
docker-py's exec_run, `mini_swe_agent` its DockerEnvironment.execute (`docker exec`), `swe_rex` its DockerDeployment's
runtime.execute over HTTP. `session` figures are of a shell whose state stays, for SWE-ReX and for us.

    agent-r3 bench sandbox --json
    python -m benchmarks.sandbox --quick
"""

import argparse
import asyncio
import json
import os
import sys
import time
import uuid
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

from agent_r3.config import SandboxConfig, TasksConfig
from agent_r3.envs.build import build_tasks
from agent_r3.envs.datasets import load_tasks
from agent_r3.envs.images import ImageBuilder
from agent_r3.envs.local import open_pool
from agent_r3.envs.offline import offline_spec_path
from agent_r3.errors import UserError
from agent_r3.types import Task
from benchmarks import sandbox_ours as ours
from benchmarks.figures import percentile, round_trips, speedups
from benchmarks.sandbox_peers import VERSIONS, Peers

TASK = "pathspec__0.12.1"
FRAMEWORKS = ("mini_swe_agent", "swe_rex")


@dataclass(frozen=True, slots=True)
class Counts:
    """How much is measured."""

    crowd: int = 32  # containers at the same time
    rounds: int = 4
    commands: int = 15  # round trips in one container alone, each round
    crowd_commands: int = 4  # in each of the crowd, each round
    starts: int = 20
    idle: int = 16  # sandboxes whose memory is measured
    episodes: int = 64
    episode_commands: int = 20
    gradings: int = 8


QUICK = Counts(crowd=8, rounds=1, commands=10, crowd_commands=3, starts=4, idle=4, gradings=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="does it work: few repetitions, 8 containers for 32")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.parse_args()
    try:
        result = asyncio.run(measure(QUICK if options.quick else Counts()))
    except UserError as exc:
        print(f"bench sandbox: {exc}", file=sys.stderr)
        raise SystemExit(2) from exc
    print(json.dumps(result) if options.json else in_words(result))


async def measure(counts: Counts) -> dict[str, Any]:
    """All figures of one run."""
    began = time.perf_counter()
    load = os.getloadavg()[0]
    task = await _task()
    with Peers(task.image, f"bench-{uuid.uuid4().hex[:12]}", _say) as peers:
        same = replace(task, image=peers.image)
        figures = await _round_trips(same, peers, counts)
        engine = peers.engine()
    figures |= await _rest(task, same, counts)
    return figures | {
        "commands_64_vs_exec_api": figures["commands_per_s_64"] / figures["exec_api_ceiling_per_s"],
        "machine": {"cpus": os.cpu_count(), "load_before": load, "engine": engine},
        "peers": VERSIONS,
        "counts": asdict(counts),
        "seconds": time.perf_counter() - began,
    }


async def _task() -> Task:
    """The task whose image and tests everything runs with, built when it is not there."""
    async with open_pool(SandboxConfig(kind="docker"), run="tasks-build") as pool:
        await build_tasks(offline_spec_path("offline"), (TASK,), ImageBuilder(), pool, lambda *_: None)
    return load_tasks(TasksConfig(dataset="offline", include=(TASK,)))[0]


async def _round_trips(task: Task, peers: Peers, counts: Counts) -> dict[str, Any]:
    """Everyone's containers are there all the time and take turns, so that a noisy machine is noisy for all."""
    names = ("ours", "sdk", *FRAMEWORKS)
    taken: dict[tuple[str, str, int], list[float]] = {}
    ceiling = 0.0
    async with AsyncExitStack() as stack:
        systems: dict[str, Any] = {}
        for name in names:
            _say(f"starting {counts.crowd} containers: {name}")
            if name == "ours":
                systems[name] = await stack.enter_async_context(ours.Ours(task, counts.crowd))
            else:
                made = peers.sdk(counts.crowd) if name == "sdk" else peers.framework(name, counts.crowd)
                systems[name] = await asyncio.to_thread(stack.enter_context, made)
        for number in range(-1, counts.rounds):  # the first one warms up
            _say(f"round trips, round {number + 1} of {counts.rounds}" if number >= 0 else "round trips, warming up")
            order = names[number % len(names) :] + names[: number % len(names)]
            for name in order:
                for kind, containers, commands in _SHAPES[name](counts):
                    began = time.perf_counter()
                    found = await _measure(systems[name], kind, containers, commands)
                    if number >= 0:
                        taken.setdefault((name, kind, containers), []).extend(found)
                    if name == "sdk" and number >= 0:
                        ceiling = max(ceiling, len(found) / (time.perf_counter() - began))
    figures: dict[str, Any] = {"exec_api_ceiling_per_s": ceiling}
    for name in names:
        prefix = "" if name == "ours" else f"{name}_"
        figures |= round_trips(prefix, taken[name, "fresh", 1], taken[name, "fresh", counts.crowd])
        if (name, "session", 1) in taken:
            figures[f"{prefix}session_p50_ms"] = percentile(taken[name, "session", 1], 50)
    return figures | speedups(figures, names[1:])


async def _measure(system: Any, kind: str, containers: int, commands: int) -> list[float]:
    if isinstance(system, ours.Ours):
        return await system.measure(kind, containers, commands)
    found: list[float] = await asyncio.to_thread(system.measure, kind, containers, commands)
    return found


def _fresh(counts: Counts) -> list[tuple[str, int, int]]:
    return [("fresh", 1, counts.commands), ("fresh", counts.crowd, counts.crowd_commands)]


def _fresh_and_session(counts: Counts) -> list[tuple[str, int, int]]:
    return [*_fresh(counts), ("session", 1, counts.commands)]


# Kind, containers, commands in each: what one round measures of a system.
_SHAPES = {
    "ours": _fresh_and_session,
    "sdk": _fresh,
    "mini_swe_agent": _fresh,
    "swe_rex": _fresh_and_session,
}


async def _rest(task: Task, same: Task, counts: Counts) -> dict[str, Any]:
    """What is measured of ours alone; `same` is the task in the image of the round trips."""
    _say("cold and warm starts")
    cold, warm = await ours.starts(same, counts.starts)
    _say("memory")
    memory = await ours.memory(same, counts.idle)
    _say(f"{counts.episodes} episodes at once")
    episodes = await ours.episodes(same, counts.episodes, counts.episode_commands)
    _say("grading")
    grading = await ours.grading(task, counts.gradings)
    cold_ms, warm_ms = percentile(cold, 50), percentile(warm, 50)
    return {
        "cold_start_p50_ms": cold_ms,
        "warm_start_p50_ms": warm_ms,
        "warm_start_speedup": cold_ms / warm_ms,
        "memory_per_sandbox_mib": memory,
        "episodes_64_errors": episodes.errors,
        "commands_per_s_64": episodes.commands_per_s,
        "episodes_64_s": episodes.seconds,
        "grading_s": grading.graded,
        "bare_tests_s": grading.bare,
        "grading_overhead_s": grading.graded - grading.bare,
    }


def in_words(figures: Mapping[str, Any]) -> str:
    """A plain table: round trips by system, then one figure a line."""
    lines = [f"{'command round trip, ms':24} {'p50':>8} {'p95':>8} {'p50 at 32':>10} {'p95 at 32':>10} {'ours is':>9}"]
    for title, prefix in (("ours", ""), ("docker SDK", "sdk_"), *((name, f"{name}_") for name in FRAMEWORKS)):
        p50, p95, p50_32, p95_32 = (
            figures[f"{prefix}exec_{key}"] for key in ("p50_ms", "p95_ms", "p50_ms_32", "p95_ms_32")
        )
        ratio = f"{figures[f'exec_speedup_vs_{prefix[:-1]}']:.1f}x" if prefix else ""
        lines.append(f"{title:24} {p50:8.2f} {p95:8.2f} {p50_32:10.2f} {p95_32:10.2f} {ratio:>9}")
    known = ("exec_p", "speedup_vs", "machine", "peers", "counts")
    for name, value in figures.items():
        if not any(part in name for part in known):
            lines.append(f"{name:34} {value if isinstance(value, int) or value is None else format(value, '.3f')}")
    machine = figures["machine"]
    lines.append(f"{machine['cpus']} CPUs, load {machine['load_before']:.1f} before, Docker {machine['engine']}")
    return "\n".join(lines)


def _say(what: str) -> None:
    print(f"bench sandbox: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
