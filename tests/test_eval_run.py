"""`agent-r3 eval CONFIG` as a user starts it: a scripted model behind an endpoint, real tasks, sandboxes, grading."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import pytest
import yaml

from agent_r3.eval.folder import EvaluationFolder
from agent_r3.eval.plan import plan
from agent_r3.types import Task
from tests.support.docker import containers_of
from tests.support.scripted_endpoint import Agent, Script, ScriptedEndpoint, bungler, bystander, solver
from tests.support.swe_bench import SweBenchDataset

pytestmark = [pytest.mark.docker, pytest.mark.timeout(180)]

COMMAND = [sys.executable, "-m", "agent_r3.cli"]
MODEL = "somebody/scripted"
SEED = 7


@dataclass(frozen=True)
class Bench:
    """A served script, the tasks it plays, and a config for both."""

    endpoint: ScriptedEndpoint
    tasks: Mapping[str, Task]
    config: Path
    run: str

    def command(self, out: Path, *overrides: str) -> list[str]:
        return [*COMMAND, "eval", str(self.config), *overrides, "--out", str(out)]

    def evaluate(self, out: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.command(out, *overrides), capture_output=True, text=True, timeout=120, check=False)

    @contextmanager
    def started(self, out: Path, *overrides: str) -> Iterator[subprocess.Popen[str]]:
        """The command while it goes on; it is killed at the end."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with subprocess.Popen(self.command(out, *overrides), text=True, **pipes) as process:  # type: ignore[call-overload]
            try:
                yield process
            finally:
                process.kill()

    def wait_for(self, process: subprocess.Popen[str], there: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 60
        while not there():
            assert process.poll() is None, f"ended before {what}: {process.stdout.read() if process.stdout else ''}"
            assert time.monotonic() < deadline, f"no {what} within 60 s"
            time.sleep(0.05)

    def asked(self, *turns: tuple[str, int]) -> Callable[[], bool]:
        """Whether these turns of these tasks were asked for."""
        return lambda: set(turns) <= {(request["task"], request["turn"]) for request in self.endpoint.requests()}


def half_solved(tasks: Mapping[str, Task], held: Sequence[str] = ()) -> list[Agent]:
    """Every second task is solved; of the others one is changed for nothing, and the rest are left alone."""
    agents = []
    for number, task in enumerate(tasks.values()):
        act = solver if number % 2 == 0 else bungler if number == 1 else bystander
        agents.append(act(task, held_from=1 if task.id in held else None))
    return agents


@contextmanager
def bench(folder: Path, tasks: Mapping[str, Task], held: Sequence[str] = (), /, **sections: Any) -> Iterator[Bench]:
    """A server and a config of its own; no container of the run may be left."""
    with ScriptedEndpoint(folder / "endpoint", Script(half_solved(tasks, held), model=MODEL)) as endpoint:
        run = f"test-eval-{os.getpid()}-{folder.name}"
        tree = {
            "run": {"name": run, "dir": str(folder)},
            "model": {"path": MODEL},
            "tasks": {"dataset": "offline", "include": list(tasks)},
            "sandbox": {"memory": "512m", "warm": 2},
            "agent": {"timeout_s": 60.0},
            "grading": {"timeout_s": 60.0, "concurrency": 2},
            "eval": {"endpoint": endpoint.url, "concurrency": 2, "seed": SEED},
        }
        for name, section in sections.items():
            tree.setdefault(name, {}).update(section)
        config = folder / "config.yaml"
        config.write_text(yaml.safe_dump(tree))
        yield Bench(endpoint, tasks, config, run)


@pytest.fixture(scope="module")
def half(six_tasks: Mapping[str, Task], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Six tasks, three of them solved."""
    with bench(tmp_path_factory.mktemp("half"), six_tasks) as made:
        yield made


@pytest.fixture(scope="module")
def finished(half: Bench, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an evaluation that nothing interrupted. Tests that go on with it take a copy."""
    out = tmp_path_factory.mktemp("evaluation") / "out"
    done = half.evaluate(out)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def verdicts(out: Path) -> dict[tuple[str, int], str]:
    return {key: graded.verdict for key, graded in EvaluationFolder(out).grades.items()}


def expected_verdicts(tasks: Mapping[str, Task], samples: int = 1) -> dict[tuple[str, int], str]:
    said = ["resolved", "failed", "resolved", "empty_patch", "resolved", "empty_patch"]
    return {(task, sample): verdict for sample in range(samples) for task, verdict in zip(tasks, said, strict=True)}


def timeless(out: Path) -> Any:
    """report.json without what differs from run to run."""
    report = json.loads((out / "report.json").read_text())
    del report["episodes"]["seconds"]
    for instance in report["instances"]:
        for sample in instance["samples"]:
            del sample["seconds"]
    return report


def test_half_of_the_tasks_are_solved_and_the_report_says_exactly_that(
    half: Bench, finished: Path, docker_engine: docker.APIClient
) -> None:
    lines = [json.loads(line) for line in (finished / "predictions.jsonl").read_text().splitlines()]
    assert sorted(line["instance_id"] for line in lines) == sorted(half.tasks)
    assert {line["model_name_or_path"] for line in lines} == {MODEL}
    patches = {line["instance_id"]: line["model_patch"] for line in lines}
    for number, (task_id, task) in enumerate(half.tasks.items()):
        if number % 2 == 0:
            assert changed_lines(patches[task_id]) == changed_lines(task.gold_patch)
        else:
            assert ("NOTES.txt" in patches[task_id]) == (number == 1) == bool(patches[task_id])
    assert verdicts(finished) == expected_verdicts(half.tasks)
    report = json.loads((finished / "report.json").read_text())
    assert report["pass_at_1"]["mean"] == 0.5
    said = {name: count for name, count in report["verdicts"].items() if count}
    assert said == {"resolved": 3, "failed": 1, "empty_patch": 2}
    assert report["endings"] == {"finish": 6}
    assert report["infrastructure"]["failures"] == 0
    assert (finished / "report.html").stat().st_size > 1000
    assert containers_of(docker_engine, half.run) == []


def changed_lines(patch: str) -> Counter[str]:
    return Counter(line for line in patch.splitlines() if re.match(r"[+-](?![+-])", line))


def test_the_episodes_of_an_evaluation_are_listed_and_shown_and_have_no_arrays_to_export(
    half: Bench, finished: Path
) -> None:
    solved, bungled = list(half.tasks)[:2]
    listed = subprocess.run(
        [*COMMAND, "trajectory", "list", str(finished), "--json"], capture_output=True, text=True, check=True
    )
    rows = {row["id"]: row for row in map(json.loads, listed.stdout.splitlines())}
    assert rows.keys() == {f"{task_id}.0" for task_id in half.tasks}
    assert (rows[f"{solved}.0"]["reward"], rows[f"{bungled}.0"]["reward"]) == (1.0, 0.0)
    assert (rows[f"{solved}.0"]["turns"], rows[f"{solved}.0"]["ending"]) == (3, "finish")
    shown = subprocess.run(
        [*COMMAND, "trajectory", "show", str(finished), f"{solved}.0"], capture_output=True, text=True, check=True
    )
    assert "git apply" in shown.stdout and "reward 1" in shown.stdout
    exported = subprocess.run(
        [*COMMAND, "trajectory", "export", str(finished), f"{solved}.0"], capture_output=True, text=True, check=False
    )
    assert exported.returncode == 2
    assert len(exported.stderr.splitlines()) == 1 and "no arrays" in exported.stderr


def test_a_killed_evaluation_goes_on_to_the_same_report_and_runs_no_instance_twice(
    six_tasks: Mapping[str, Task], finished: Path, tmp_path: Path, docker_engine: docker.APIClient
) -> None:
    order = [work.task.id for work in plan(list(six_tasks.values()), 1, SEED, ())]
    done, held = order[:3], order[3:]
    out = tmp_path / "out"
    with bench(tmp_path, six_tasks, held) as made:
        with made.started(out) as process:
            made.wait_for(process, lambda: len(EvaluationFolder(out).predictions) == 3, "three predictions")
            made.wait_for(process, made.asked((held[0], 1), (held[1], 1)), "two episodes under way")
            second = made.evaluate(out)
            assert second.returncode == 2
            assert "another process evaluates into" in second.stderr
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert set(EvaluationFolder(out).predictions) == {(task_id, 0) for task_id in done}
        made.endpoint.release()
        again = made.evaluate(out)
        assert again.returncode == 0, again.stdout + again.stderr
        begun = made.endpoint.begun()
        assert [begun[task_id] for task_id in order] == [1, 1, 1, 2, 2, 1]
        once_more = made.evaluate(out)
        assert once_more.returncode == 0 and made.endpoint.begun() == begun
        assert containers_of(docker_engine, made.run) == []
    assert verdicts(out) == expected_verdicts(six_tasks)
    assert timeless(out) == timeless(finished)
    grades = [json.loads(line) for line in (out / "grades.jsonl").read_text().splitlines()]
    assert len(grades) == len({grade["instance_id"] for grade in grades}) == 6, "no patch is graded twice"


def test_more_samples_are_added_to_a_finished_evaluation(half: Bench, finished: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(finished, tmp_path / "out"))
    before = half.endpoint.requests()
    added = half.evaluate(out, "eval.samples=2", "eval.concurrency=3")
    assert added.returncode == 0, added.stdout + added.stderr
    assert verdicts(out) == expected_verdicts(half.tasks, 2)
    new = half.endpoint.requests()[len(before) :]
    assert Counter(r["task"] for r in new if r["task"] and r["turn"] == 0) == dict.fromkeys(half.tasks, 1)
    first = {(r["task"], r["seed"]) for r in before if r["task"] and r["turn"] == 0}
    assert not first & {(r["task"], r["seed"]) for r in new}, "another sample has another seed"
    report = json.loads((out / "report.json").read_text())
    assert (report["samples"], report["pass_at_1"]["mean"]) == (2, 0.5)
    changed = half.evaluate(out, "eval.samples=2", "sampling.temperature=0.5")
    assert changed.returncode == 2
    assert changed.stderr.splitlines()[-1].endswith(
        "was evaluated with sampling.temperature=1.0, now it is 0.5; choose another --out"
    )


def test_ctrl_c_leaves_nothing_behind_and_the_same_command_goes_on(
    built_tasks: Mapping[str, Task], tmp_path: Path, docker_engine: docker.APIClient
) -> None:
    out = tmp_path / "out"
    with bench(tmp_path, built_tasks, list(built_tasks)) as made:
        with made.started(out) as process:
            made.wait_for(process, made.asked(*((task_id, 1) for task_id in built_tasks)), "episodes under way")
            process.send_signal(signal.SIGINT)
            said, _ = process.communicate(timeout=60)
        assert process.returncode == 130, said
        assert "interrupted: 0 of 2 episodes have a verdict; the same command goes on" in said
        assert "Traceback" not in said
        assert containers_of(docker_engine, made.run) == []
        made.endpoint.release()
        assert made.evaluate(out).returncode == 0
    assert sorted(verdicts(out).values()) == ["failed", "resolved"]


def test_an_endpoint_that_dies_is_a_failure_of_the_infrastructure_and_the_next_run_makes_up_for_it(
    six_tasks: Mapping[str, Task], tmp_path: Path
) -> None:
    order = [work.task.id for work in plan(list(six_tasks.values()), 1, SEED, ())]
    out = tmp_path / "out"
    quick = {"agent": {"timeout_s": 15.0}, "engine": {"start_timeout_s": 1.0}}
    with bench(tmp_path, six_tasks, order[2:], **quick) as made:
        with made.started(out) as process:
            made.wait_for(process, made.asked((order[2], 1), (order[3], 1)), "two episodes under way")
            made.endpoint.kill()
            said, _ = process.communicate(timeout=60)
        assert process.returncode == 1, said
        assert "the model did not answer for 1 s" in said
        assert "2 of 6 episodes have a verdict (engine 2, not begun 2); the same command tries the others again" in said
        failures = EvaluationFolder(out).failures
        assert {(failure.instance_id, failure.stage, failure.kind) for failure in failures} == {
            (task_id, "episode", "engine") for task_id in order[2:4]
        }
        assert json.loads((out / "report.json").read_text())["pass_at_1"]["samples"] == 2
        made.endpoint.start()
        made.endpoint.release()
        again = made.evaluate(out)
        assert again.returncode == 0, again.stdout + again.stderr
    assert verdicts(out) == expected_verdicts(six_tasks)
    report = json.loads((out / "report.json").read_text())
    assert (report["infrastructure"]["excluded"], report["infrastructure"]["mended"] > 0) == ([], True)


def test_rows_of_swe_bench_are_judged_by_its_own_harness_and_the_logs_are_kept(
    swe_bench_dataset: SweBenchDataset, tmp_path: Path
) -> None:
    tasks = dict(list(swe_bench_dataset.tasks.items())[:2])
    out = tmp_path / "out"
    with bench(tmp_path, tasks, tasks={"dataset": str(swe_bench_dataset.path)}) as made:
        done = made.evaluate(out)
    assert done.returncode == 0, done.stdout + done.stderr
    grades = EvaluationFolder(out).grades
    assert [grades[task_id, 0].verdict for task_id in tasks] == ["resolved", "failed"]
    for graded in grades.values():
        assert graded.log is not None
        assert ">>>>> Start Test Output" in (out / graded.log).read_text()
