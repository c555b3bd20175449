"""Our sandboxes: round trips of commands, cold and warm starts, memory, many episodes at once, grading."""

import asyncio
import contextlib
import statistics
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple, TypeVar

import docker
import psutil

from agent_r3.config import GradingConfig, SandboxConfig
from agent_r3.envs.docker import RUN_LABEL, connect
from agent_r3.envs.grading import Grader
from agent_r3.envs.local import open_pool
from agent_r3.envs.pool import SandboxPool
from agent_r3.envs.runner_sandbox import RunnerSandbox
from agent_r3.envs.sandbox import Sandbox
from agent_r3.errors import InfraError
from agent_r3.types import Task

T = TypeVar("T")

_LIMIT_S = 60.0


class Episodes(NamedTuple):
    """Many episodes at once."""

    errors: int
    commands_per_s: float  # while every episode has its container
    seconds: float  # in all, with start and removal of the containers


class Grading(NamedTuple):
    """Medians, in seconds."""

    graded: float
    bare: float


class Ours:
    """Sandboxes of ours, to be measured beside others. `async with Ours(task, 32) as ours`."""

    def __init__(self, task: Task, containers: int) -> None:
        self._task = task
        self._count = containers
        self._pool = open_pool(_config(), run=_run_name())
        self._sandboxes: list[RunnerSandbox] = []

    async def __aenter__(self) -> "Ours":
        try:
            self._sandboxes += await asyncio.gather(*(self._pool.acquire(self._task) for _ in range(self._count)))
        except BaseException:
            await self._pool.close()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._pool.close()

    async def measure(self, kind: str, containers: int, commands: int) -> list[float]:
        """Milliseconds of each `true`, in a `fresh` bash or in a `session`: one whose state stays."""

        async def one(sandbox: RunnerSandbox) -> list[float]:
            taken = []
            for _ in range(commands):
                began = time.perf_counter()
                result = await sandbox.exec("true", timeout_s=_LIMIT_S, persistent=kind == "session")
                taken.append((time.perf_counter() - began) * 1e3)
                if result.exit_code:
                    raise RuntimeError(f"{sandbox.id}: {result}")
            return taken

        return [ms for part in await asyncio.gather(*map(one, self._sandboxes[:containers])) for ms in part]


async def starts(task: Task, count: int) -> tuple[list[float], list[float]]:
    """Milliseconds until an agent has its sandbox, set up: cold ones, and ones that were started ahead of need."""
    cold: list[float] = []
    warm: list[float] = []
    async with open_pool(_config(), run=_run_name()) as pool:
        for _ in range(count):
            taken, sandbox = await _timed(lambda: pool.acquire(task))
            cold.append(taken * 1e3)
            await sandbox.close()
    while len(warm) < count:
        run, batch = _run_name(), min(10, count - len(warm))
        async with open_pool(_config(warm=batch), run=run) as pool:
            await _prefetched(pool, run, task, batch)
            for _ in range(batch):
                taken, _ = await _timed(lambda: pool.acquire(task))
                warm.append(taken * 1e3)
    return cold, warm


async def memory(task: Task, count: int) -> float | None:
    """MiB that each of `count` idle sandboxes costs this host: its shim and its runner, shared pages divided by users.

    None where /proc does not tell: the engine's processes are root's.
    """
    run = _run_name()
    async with open_pool(_config(), run=run) as pool:
        for _ in range(count):
            await pool.acquire(task)
        await asyncio.sleep(1.0)
        total = await asyncio.to_thread(_process_memory, run)
        return None if total is None else total / count / 2**20


async def episodes(task: Task, count: int, commands: int) -> Episodes:
    """`count` episodes at the same time, each `commands` commands in a container of its own, every output checked."""
    errors = 0
    began = time.perf_counter()
    everyone_there = asyncio.Barrier(count)
    spans: list[tuple[float, float]] = []

    async def one(number: int, pool: SandboxPool) -> None:
        nonlocal errors
        try:
            sandbox = await pool.acquire(task)
        except InfraError:
            errors += 1
            await everyone_there.wait()
            return
        await everyone_there.wait()
        first = time.perf_counter()
        try:
            for turn in range(commands):
                result = await sandbox.exec(f"echo {number}-{turn}", timeout_s=_LIMIT_S)
                errors += result.output != f"{number}-{turn}\n".encode() or result.exit_code != 0
        except InfraError:
            errors += 1
        finally:
            spans.append((first, time.perf_counter()))
            await sandbox.close()

    async with open_pool(_config(), run=_run_name()) as pool:
        await asyncio.gather(*(one(number, pool) for number in range(count)))
    seconds = time.perf_counter() - began
    busy = max(last for _, last in spans) - min(first for first, _ in spans)
    return Episodes(errors, len(spans) * commands / busy, seconds)


async def grading(task: Task, count: int) -> Grading:
    """Grades of the gold patch from a warm pool, against its bare test command in the same kind of container."""
    run = _run_name()
    graded, bare = [], []
    async with open_pool(_config(warm=2), run=run) as pool:
        grader = Grader(pool, GradingConfig(reuse=False))
        for _ in range(count):
            await _prefetched(pool, run, task, 2)
            taken, grade = await _timed(lambda: grader.grade(task, task.gold_patch.encode()))
            if grade.reward != 1:
                raise RuntimeError(f"the gold patch of {task.id} earned {grade.reward}: {grade.reason}")
            graded.append(taken)
            async with _ready_to_test(pool, task) as sandbox:
                taken, result = await _timed(
                    lambda box=sandbox: box.exec(task.test_command, timeout_s=300)  # type: ignore[misc]
                )
            if result.exit_code:
                raise RuntimeError(f"the bare tests of {task.id} ended with {result.exit_code}: {result.text[-500:]}")
            bare.append(taken)
    return Grading(statistics.median(graded), statistics.median(bare))


@asynccontextmanager
async def _ready_to_test(pool: SandboxPool, task: Task) -> AsyncIterator[Sandbox]:
    """A grading container with the gold patch and the hidden tests in it."""
    sandbox = await pool.acquire_for_grading(task)
    try:
        await sandbox.put("/tmp/gold.patch", task.gold_patch.encode())
        result = await sandbox.exec("git apply /tmp/gold.patch && mkdir -p r2e_tests", timeout_s=_LIMIT_S)
        if result.exit_code:
            raise RuntimeError(f"gold patch of {task.id}: {result.text}")
        if task.hidden_tests_dir is None:
            raise RuntimeError(f"{task.id} keeps its tests in its image")
        for path in task.hidden_tests_dir.rglob("*"):
            if path.is_file():
                name = path.relative_to(task.hidden_tests_dir)
                await sandbox.put(f"{task.workdir}/r2e_tests/{name}", path.read_bytes())
        yield sandbox
    finally:
        await sandbox.close()


async def _timed(call: Callable[[], Awaitable[T]]) -> tuple[float, T]:
    began = time.perf_counter()
    result = await call()
    return time.perf_counter() - began, result


async def _prefetched(pool: SandboxPool, run: str, task: Task, count: int) -> None:
    """Return when what stands ready for a plan of `count` has come to rest: the same containers for 1.5 s."""
    await pool.prefetch([task] * count)
    with contextlib.closing(connect()) as api:
        there: set[str] = set()
        since = time.monotonic()
        deadline = since + _LIMIT_S
        while len(there) < count or time.monotonic() < since + 1.5:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{len(there)} containers stand ready instead of {count} after {_LIMIT_S:g} s")
            await asyncio.sleep(0.1)
            if (now := set(await asyncio.to_thread(_containers, api, run))) != there:
                there, since = now, time.monotonic()


def _containers(api: docker.APIClient, run: str) -> list[str]:
    return [found["Id"] for found in api.containers(all=True, filters={"label": f"{RUN_LABEL}={run}"})]


def _process_memory(run: str) -> int | None:
    """Bytes of all shims and runners of a run: each page is divided among the processes that share it."""
    with contextlib.closing(connect()) as api:
        ids = _containers(api, run)
        pids = {int(api.inspect_container(container)["State"]["Pid"]) for container in ids}
    total = 0
    try:
        for process in psutil.process_iter(["pid", "cmdline"]):
            command = process.info["cmdline"] or []
            if process.info["pid"] in pids or ("-id" in command and command[command.index("-id") + 1] in ids):
                total += int(process.memory_full_info().pss)
    except psutil.AccessDenied:
        return None
    return total


def _config(warm: int = 0) -> SandboxConfig:
    return SandboxConfig(kind="docker", warm=warm)


def _run_name() -> str:
    return f"bench-{uuid.uuid4().hex[:12]}"
