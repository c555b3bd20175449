"""What `agent-r3 eval` itself costs: an evaluation's time that is neither model, nor commands, nor tests.

A scripted model behind an endpoint of its own process answers every turn after half a second; the agents look around in
real sandboxes, apply the gold patch and submit; every patch is graded. The stages of each episode and each grading are
timed. Ours is what remains: waiting for a sandbox, the loop, the diff, removing the sandbox, writing transcript,
prediction and verdict, and what a grading does besides its tests. The first sandboxes of the run, which all start at
once, are in it. Waiting for a free place is not, which is the run's own choice of concurrency. Figures are means over
instances.

    agent-r3 bench eval --json
    python -m benchmarks.evaluation --samples 2
"""

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from agent_r3.config import Config, SandboxConfig, TasksConfig
from agent_r3.envs.build import build_tasks
from agent_r3.envs.datasets import load_tasks
from agent_r3.envs.images import ImageBuilder
from agent_r3.envs.local import open_pool
from agent_r3.envs.offline import offline_spec_path
from agent_r3.envs.sandbox import Grading
from agent_r3.errors import UserError
from agent_r3.eval.dataset import write_dataset
from agent_r3.eval.episodes import EpisodeRunner
from agent_r3.eval.folder import EvaluationFolder
from agent_r3.eval.grade_all import open_grading
from agent_r3.eval.model import open_model
from agent_r3.eval.plan import plan
from agent_r3.eval.progress import EvaluationProgress
from agent_r3.eval.report import write_report
from agent_r3.eval.resume import settle_config
from agent_r3.eval.verdicts import Verdicts
from agent_r3.types import Grade, Task
from tests.support.scripted_endpoint import FINISH, Agent, Call, Script, ScriptedEndpoint, apply_gold, bash

TASKS = (
    *("pathspec__0.12.1", "mistune__3.1.1", "humanize__4.12.3", "python-dotenv__1.1.1"),
    *("markdown__3.8__smarty", "cachetools__5.5.0", "boltons__24.1.0", "click__8.2.1"),
)
GRADINGS = 4  # at the same time
# One after the other, and over again until the turns are used up.
LOOKS: tuple[Call, ...] = (
    bash("ls -la && git status --short && git log --oneline | head -5"),
    bash("find . -name '*.py' -not -path './.venv/*' | head -60"),
    ("search", {"search_term": "def ", "path": "."}),
    bash("grep -rnE 'raise|except' --include=*.py --exclude-dir=.venv . | head -60"),
    ("file_editor", {"command": "view", "path": "/testbed"}),
    bash("wc -l $(git ls-files '*.py') | tail -20"),
    bash("sed -n 1,120p $(git ls-files '*.py' | head -1)"),
    bash(".venv/bin/python -c 'import sys, json, re; print(sys.version)'"),
    bash("git grep -n class -- '*.py' | cut -c1-120 | head -40"),
    bash(".venv/bin/python -m compileall -q $(git ls-files '*.py' | head -20) && git diff --stat"),
)


@dataclass(frozen=True, slots=True)
class Load:
    """How much is run."""

    tasks: Sequence[str] = TASKS
    samples: int = 16
    workers: int = 16
    turns: int = 30
    latency_s: float = 0.5


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of one instance."""

    episode: float  # from asking for a sandbox to the sandbox's end
    model: float
    commands: float
    sandbox: float  # waiting for it
    grading: float
    tests: float

    @property
    def all(self) -> float:
        return self.episode + self.grading

    @property
    def own(self) -> float:
        return self.all - self.model - self.commands - self.tests


@dataclass(slots=True)
class TimedGrader:
    """Grades as the other does, at most `GRADINGS` at a time, so that nobody waits for a place inside."""

    grader: Grading
    seconds: dict[tuple[str, bytes], list[tuple[float, float]]] = field(default_factory=dict)  # whole, tests
    places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(GRADINGS))

    async def grade(self, task: Task, patch: bytes) -> Grade:
        async with self.places:
            began = time.perf_counter()
            grade = await self.grader.grade(task, patch)
            whole = time.perf_counter() - began
        self.seconds.setdefault((task.id, patch), []).append((whole, grade.seconds))
        return grade


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--samples", type=int, default=Load().samples, help=f"episodes of each of {len(TASKS)} tasks")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    options = parser.parse_args()
    try:
        result = measure(Load(samples=options.samples))
    except UserError as exc:
        print(f"bench eval: {exc}", file=sys.stderr)
        raise SystemExit(2) from exc
    print(json.dumps(result) if options.json else in_words(result))


def measure(load: Load) -> dict[str, Any]:
    """One evaluation, with its report at the end."""
    before = os.getloadavg()[0]
    tasks = asyncio.run(_built(load.tasks))
    with tempfile.TemporaryDirectory(prefix="bench-eval-") as folder:
        script = Script([_agent(task, load.turns) for task in tasks], latency_s=load.latency_s)
        with ScriptedEndpoint(Path(folder) / "endpoint", script) as endpoint:
            config = _config(load, endpoint.url, Path(folder))
            with contextlib.redirect_stdout(sys.stderr), EvaluationFolder.locked(Path(folder) / "out") as into:
                settle_config(into, config)
                write_dataset(into.path, tasks, config.tasks)
                began, cpu = time.perf_counter(), time.process_time()
                timed = asyncio.run(_evaluate(config, into, tasks))
                wall, cpu = time.perf_counter() - began, time.process_time() - cpu
                began = time.perf_counter()
                write_report(into.path)
                report_s = time.perf_counter() - began
    machine = {"cpus": os.cpu_count(), "load_before": before}
    whole = {"workers": load.workers, "report_s": report_s, "load": asdict(load), "machine": machine}
    return figures(timed, wall, cpu) | whole


def figures(timed: Sequence[Timed], wall_s: float, cpu_s: float) -> dict[str, Any]:
    """Means over instances, but for the two numbers of the run as a whole. Pure."""
    own = [one.own for one in timed]
    return {
        "instances": len(timed),
        "wall_s": wall_s,
        "episode_s": fmean(one.episode for one in timed),
        "model_s": fmean(one.model for one in timed),
        "commands_s": fmean(one.commands for one in timed),
        "tests_s": fmean(one.tests for one in timed),
        "own_s_per_instance": fmean(own),
        "own_share": sum(own) / sum(one.all for one in timed),
        "own_sandbox_wait_s": fmean(one.sandbox for one in timed),
        "own_rest_of_episode_s": fmean(one.episode - one.model - one.commands - one.sandbox for one in timed),
        "own_rest_of_grading_s": fmean(one.grading - one.tests for one in timed),
        "cpu_s_per_instance": cpu_s / len(timed),
    }


async def _evaluate(config: Config, folder: EvaluationFolder, tasks: Sequence[Task]) -> list[Timed]:
    """As `agent-r3 eval` does, with a clock around each grading. Raises RuntimeError unless all is resolved."""
    work = plan(tasks, config.eval.samples, config.eval.seed, ())
    with EvaluationProgress(folder, len(work)) as progress:
        async with (
            open_grading(config, at_once=GRADINGS) as (provider, grader),
            asyncio.TaskGroup() as gradings,
            open_model(config, None, folder.path / "engine.log") as model,
        ):
            clock = TimedGrader(grader)
            verdicts = Verdicts(folder, clock, progress, gradings)
            await EpisodeRunner(config, folder, model, provider, progress, verdicts.begin).run(work)
    return _timed(folder, clock, len(work))


def _timed(folder: EvaluationFolder, clock: TimedGrader, episodes: int) -> list[Timed]:
    resolved = sum(graded.verdict == "resolved" for graded in folder.grades.values())
    if resolved != episodes:
        raise RuntimeError(f"{resolved} of {episodes} are resolved, where every agent applies the gold patch")
    found = []
    for prediction in folder.predictions.values():
        assert prediction.episode is not None
        seconds = prediction.episode.seconds
        grading, tests = clock.seconds[prediction.instance_id, prediction.patch].pop()
        stages = (seconds[name] for name in ("total", "generate", "tools", "sandbox"))
        found.append(Timed(*stages, grading=grading, tests=tests))
    return found


async def _built(ids: Sequence[str]) -> list[Task]:
    async with open_pool(SandboxConfig(), run="tasks-build") as pool:
        await build_tasks(offline_spec_path("offline"), ids, ImageBuilder(), pool, lambda *_: None)
    return load_tasks(TasksConfig(dataset="offline", include=tuple(ids)))


def _agent(task: Task, turns: int) -> Agent:
    """Looks around until two turns are left."""
    looks = [LOOKS[number % len(LOOKS)] for number in range(turns - 2)]
    return Agent(task.id, task.problem_statement, (*looks, apply_gold(task), FINISH))


def _config(load: Load, url: str, folder: Path) -> Config:
    return Config.model_validate(
        {
            "run": {"name": f"bench-eval-{os.getpid()}", "dir": str(folder)},
            "model": {"path": "scripted"},
            "tasks": {"dataset": "offline", "include": list(load.tasks)},
            "sandbox": {"memory": "512m", "warm": load.workers},
            "eval": {"endpoint": url, "samples": load.samples, "concurrency": load.workers},
        }
    )


def in_words(result: dict[str, Any]) -> str:
    load = result["load"]
    return "\n".join(
        [
            f"{result['instances']} instances, {load['workers']} workers, {load['turns']} turns of "
            f"{load['latency_s']} s: {result['wall_s']:.1f} s, and {result['report_s']:.1f} s for the report",
            f"an instance: model {result['model_s']:.2f} s, commands {result['commands_s']:.2f} s, "
            f"tests {result['tests_s']:.2f} s",
            f"ours: {result['own_s_per_instance']:.3f} s, {result['own_share']:.1%} of the run "
            f"(waiting for a sandbox {result['own_sandbox_wait_s']:.3f} s, rest of the episode "
            f"{result['own_rest_of_episode_s']:.3f} s, rest of the grading {result['own_rest_of_grading_s']:.3f} s)",
            f"CPU of this process: {result['cpu_s_per_instance']:.3f} s an instance",
        ]
    )


if __name__ == "__main__":
    main()
