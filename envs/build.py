"""Building offline tasks: sdists, images, hidden tests, and expected statuses from a real run of the fixed release."""

import asyncio
import hashlib
import json
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from agent_r3.envs.cache import cache_dir, only_one
from agent_r3.envs.commits import file_diff
from agent_r3.envs.hidden_tests import TESTS, run_hidden_tests
from agent_r3.envs.images import Environment, ImageBuilder
from agent_r3.envs.offline import TEST_COMMAND, OfflineTask, read_spec, rows_dir, rows_path
from agent_r3.envs.rows import Origin, task_from_row
from agent_r3.envs.sandbox import SandboxProvider
from agent_r3.envs.sdists import configured_index, fetch_sdist, unpack
from agent_r3.errors import AgentR3Error, DataError

_LAYOUT = 1  # of a task's folder and row; a change makes every task be built anew
_RUN_TIMEOUT_S = 300.0
_RUNS_AT_ONCE = 2  # hidden tests are CPU-bound, and some look at the clock
_PREPARED_AT_ONCE = 4

Progress = Callable[[str, str], None]  # (task id, what is being done)


@dataclass(frozen=True, slots=True)
class Built:
    """One built task: its row in R2E-Gym's schema and whether it was there already."""

    task_id: str
    row: dict[str, Any]
    reused: bool


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one task is built; the name of the folder and of the image holds a digest of everything that goes in."""

    env: str
    image: str
    folder: Path

    @property
    def row(self) -> Path:
        return self.folder / "row.json"


async def build_tasks(
    spec: Path, only: Sequence[str], builder: ImageBuilder, provider: SandboxProvider, progress: Progress
) -> list[Built]:
    """Build the tasks of a task file (all, or `only` those ids) and write its rows where `load_tasks` finds them.

    Raises the first failing task's error after the others are done; what was built stays.
    """
    tasks = read_spec(spec)
    chosen = [task for task in tasks if not only or task.task_id in only]
    if unknown := set(only) - {task.task_id for task in tasks}:
        raise DataError(
            f"{spec} has no task {', '.join(sorted(unknown))}; it has {', '.join(t.task_id for t in tasks)}"
        )
    work = _Work(tasks, builder, provider, progress)
    async with only_one("build"):  # others would make the same images and folders
        done = await asyncio.gather(*(work.build(task) for task in chosen), return_exceptions=True)
        built = [result for result in done if isinstance(result, Built)]
        _write_rows(rows_path(spec), built, tasks)
    failures = [result for result in done if isinstance(result, BaseException)]
    for failure in failures:
        if len(failures) > 1 and isinstance(failure, AgentR3Error):
            raise type(failure)(f"{len(failures)} of {len(chosen)} tasks failed; the first: {failure}") from failure
        raise failure
    return built


class _Work:
    """The shared parts of one build: one environment image for the whole task file, bounded threads and runs."""

    def __init__(
        self, tasks: Sequence[OfflineTask], builder: ImageBuilder, provider: SandboxProvider, progress: Progress
    ) -> None:
        self._environments = environments(tasks)
        self._builder = builder
        self._provider = provider
        self._progress = progress
        self._threads = asyncio.Semaphore(_PREPARED_AT_ONCE)
        self._runs = asyncio.Semaphore(_RUNS_AT_ONCE)
        self._env_builds: dict[Environment, asyncio.Task[None]] = {}

    @cached_property
    def _index(self) -> str | None:
        return configured_index()

    def place(self, task: OfflineTask) -> _Place:
        env = self._builder.env_tag(self._environments[task.task_id])
        image = self._builder.task_tag(task.task_id, env, task.model_dump(mode="json"), TEST_COMMAND, _LAYOUT)
        return _Place(env, image, cache_dir() / "tasks" / image.rpartition(":")[2])

    async def build(self, task: OfflineTask) -> Built:
        place = self.place(task)
        if place.row.is_file() and await asyncio.to_thread(self._builder.has, place.image):
            self._progress(task.task_id, "there")
            return Built(task.task_id, json.loads(place.row.read_text()), reused=True)
        env = self._build_env(self._environments[task.task_id])  # sources come over the network meanwhile
        async with self._threads:
            self._progress(task.task_id, "sources")
            await asyncio.to_thread(self._fetch, task)
        self._progress(task.task_id, "environment")
        await env
        async with self._threads:
            self._progress(task.task_id, "image")
            row = await asyncio.to_thread(self._prepare, task, place)
        async with self._runs:
            self._progress(task.task_id, "tests of the fixed release")
            row["expected_output_json"] = json.dumps(await self._run_fixed(task, place, row))
        place.row.write_text(json.dumps(row))
        self._progress(task.task_id, "built")
        return Built(task.task_id, row, reused=False)

    def _build_env(self, env: Environment) -> asyncio.Task[None]:
        if env not in self._env_builds:
            self._env_builds[env] = asyncio.create_task(asyncio.to_thread(self._builder.env, env, self._index))
        return self._env_builds[env]

    def _fetch(self, task: OfflineTask) -> list[Path]:
        return [fetch_sdist(task.pypi, version, self._index) for version in (task.version_with_bug, task.version_fixed)]

    def _prepare(self, task: OfflineTask, place: _Place) -> dict[str, Any]:
        """Image and hidden tests of one task; its row without the expected statuses."""
        with tempfile.TemporaryDirectory() as scratch:
            trees = []
            for archive in self._fetch(task):
                into = Path(scratch) / archive.parent.name
                into.mkdir()
                trees.append(unpack(archive, into))
            buggy, fixed = trees
            shutil.rmtree(place.folder, ignore_errors=True)
            (place.folder / TESTS).mkdir(parents=True)
            _copy_hidden_tests(task, fixed, place.folder / TESTS)
            self._builder.task(place.image, place.env, buggy)
            return _row(task, place, buggy, fixed)

    async def _run_fixed(self, task: OfflineTask, place: _Place, row: dict[str, Any]) -> dict[str, str]:
        draft = task_from_row(row | {"expected_output_json": '{"": "ERROR"}'}, Origin(task.task_id, 1, rows_dir()))
        sandbox = await self._provider.acquire_for_grading(draft)
        try:
            run = await run_hidden_tests(sandbox, draft, draft.gold_patch.encode(), _RUN_TIMEOUT_S)
        finally:
            await sandbox.close()
        if run.left_out:
            raise DataError(f"task {task.task_id}: no patch may change {', '.join(run.left_out)}; see src_files")
        if run.outcome is not None:
            raise DataError(f"task {task.task_id}: the tests of the fixed release: {run.outcome}: {run.problem}")
        found = dict(run.statuses)
        counts = dict(Counter(found.values()))
        unfixed = [name for name in task.f2p if found.get(name) != "PASSED"]
        if len(found) != task.n_tests or counts != task.status_counts or unfixed:
            raise DataError(
                f"task {task.task_id}: the fixed release gives {len(found)} tests {counts}, the task file says "
                f"{task.n_tests} {task.status_counts}; not passing of f2p: {', '.join(unfixed) or 'none'}; "
                f"exit status {run.exit_code}; log ends: {' '.join(run.output.split())[-400:]}"
            )
        return found


def environments(tasks: Sequence[OfflineTask]) -> dict[str, Environment]:
    """The environment of each task id: one for all, but for tasks that require the project of another task.

    Those get their own, since what they install would hand the other task its fix. Pure.
    """
    projects = {canonical(task.pypi) for task in tasks}
    apart = {task.task_id for task in tasks if projects & {canonical(item) for item in task.requirements}}
    shared = Environment(
        tuple(sorted({item for task in tasks if task.task_id not in apart for item in task.requirements})),
        tuple(sorted({canonical(task.pypi) for task in tasks if task.task_id not in apart})),
    )
    return {
        task.task_id: Environment(tuple(sorted(task.requirements)), (canonical(task.pypi),))
        if task.task_id in apart
        else shared
        for task in tasks
    }


def canonical(requirement: str) -> str:
    """The normalized project name of a requirement (PEP 503)."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement.strip())[0]).lower()


def _copy_hidden_tests(task: OfflineTask, fixed: Path, into: Path) -> None:
    names = {source: f"test_{number}.py" for number, source in enumerate(task.test_files, start=1)}
    names |= {source: Path(source).name for source in task.support}
    for source, name in names.items():
        path = fixed / source
        if path.is_dir():
            shutil.copytree(path, into / name)
        elif path.is_file():
            shutil.copyfile(path, into / name)
        else:
            raise DataError(f"task {task.task_id}: {task.pypi} {task.version_fixed} has no {source}")


def _row(task: OfflineTask, place: _Place, buggy: Path, fixed: Path) -> dict[str, Any]:
    diffs = [file_diff(name, _text(buggy / name), _text(fixed / name)) for name in task.src_files]
    changed = sum(
        line["type"] in ("added", "deleted")
        for diff in diffs
        for hunk in diff["hunks"]
        for line in hunk["line_group"]["all_lines"]
    )
    commit_hash = hashlib.sha1(place.image.encode(), usedforsecurity=False).hexdigest()
    commit = {
        "file_diffs": diffs,
        "old_commit_hash": f"{commit_hash}^",
        "new_commit_hash": commit_hash,
        "commit_message": f"{task.pypi} {task.version_with_bug} -> {task.version_fixed}",
        "commit_date": "2000-01-01T00:00:00Z",
        "metadata": {},
    }
    statement = f"[ISSUE]\n{task.problem_statement}\n[/ISSUE]"
    return {
        "repo_name": task.pypi.lower(),
        "docker_image": place.image,
        "commit_hash": commit_hash,
        "parsed_commit_content": json.dumps(commit),
        "execution_result_content": "{}",
        "modified_files": list(task.src_files),
        "modified_entity_summaries": [],
        "relevant_files": list(task.src_files),
        "num_non_test_files": len(task.src_files),
        "num_non_test_func_methods": 0,
        "num_non_test_lines": changed,
        "prompt": statement,
        "problem_statement": statement,
        "instance_id": task.task_id,
        "test_command": TEST_COMMAND,
        "hidden_tests_dir": f"../tasks/{place.folder.name}/{TESTS}",
        "test_timeout_s": task.test_timeout_s,
    }


def _text(path: Path) -> str | None:
    return path.read_bytes().decode() if path.is_file() else None


def _write_rows(path: Path, built: Sequence[Built], tasks: Sequence[OfflineTask]) -> None:
    """Put the rows just built beside those of earlier builds, in the task file's order."""
    rows = {}
    for line in path.read_text().splitlines() if path.is_file() else ():
        row = json.loads(line)
        if (path.parent / row["hidden_tests_dir"]).is_dir():
            rows[row["instance_id"]] = row
    rows |= {task.task_id: task.row for task in built}
    scratch = path.with_suffix(".part")
    scratch.write_text("".join(json.dumps(rows[task.task_id]) + "\n" for task in tasks if task.task_id in rows))
    scratch.replace(path)
