"""The pool: warm containers, bounded starts, and that nothing is ever left behind."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import docker
import pytest

from agent_r3.config import SandboxConfig
from agent_r3.envs.docker import docker_problem, reap, require_docker
from agent_r3.envs.local import open_pool
from agent_r3.envs.owners import owner_label
from agent_r3.envs.pool import SandboxPool
from agent_r3.errors import SandboxError, UserError
from agent_r3.types import Task
from tests.support.docker import containers_of, make_task

pytestmark = pytest.mark.docker

ENGINE = Path(__file__).parents[1] / "docker" / "engine.sh"

WORKER = """
import asyncio, sys
from agent_r3.config import SandboxConfig
from agent_r3.envs.local import open_pool
from agent_r3.envs.pool import SandboxPool
from tests.support.docker import make_task

async def main():
    pool = open_pool(SandboxConfig(), run=sys.argv[1])
    sandbox = await pool.acquire(make_task(sys.argv[2]))
    print("up", flush=True)
    await sandbox.exec("trap '' TERM; sleep 1000", timeout_s=1000)

asyncio.run(main())
"""


async def until(condition: str, holds: Callable[[], bool], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {condition}"
        await asyncio.sleep(0.1)


def own(api: docker.APIClient, run: str) -> list[dict[str, Any]]:
    return list(api.containers(filters={"label": f"agent_r3.run={run}"}))


def running(api: docker.APIClient, run: str) -> int:
    return len(own(api, run))


async def test_upcoming_containers_are_started_ahead_and_handed_out(
    run_name: str, sandbox_task: Task, docker_engine: docker.APIClient
) -> None:
    async with open_pool(SandboxConfig(warm=3), run=run_name) as pool:
        await pool.prefetch([sandbox_task] * 5)
        await until("3 warm, 1 for grading", lambda: running(docker_engine, run_name) == 4)
        first = {(await pool.acquire(sandbox_task)).id for _ in range(3)}
        await until("2 more", lambda: running(docker_engine, run_name) == 6)
        later = [await pool.acquire(replace(sandbox_task, id=f"{number}")) for number in range(3)]
        assert len(first | {sandbox.id for sandbox in later}) == 6  # single use, and the sixth was started on demand
        assert [sandbox.task.id for sandbox in later] == ["0", "1", "2"]
        assert (await later[0].exec("ls -d /r2e_tests", timeout_s=20)).exit_code != 0
        assert running(docker_engine, run_name) == 7


async def test_a_container_for_the_grading_of_an_agent_at_work_is_started_ahead(
    run_name: str, sandbox_task: Task, docker_engine: docker.APIClient
) -> None:
    async with open_pool(SandboxConfig(warm=1), run=run_name) as pool:
        agent = await pool.acquire(sandbox_task)
        await until("1 for the agent, 1 for grading", lambda: running(docker_engine, run_name) == 2)
        waiting = {name.lstrip("/") for found in own(docker_engine, run_name) for name in found["Names"]} - {agent.id}
        grading = await pool.acquire_for_grading(replace(sandbox_task, id="graded"))
        assert {grading.id} == waiting and grading.task.id == "graded"
        assert (await grading.exec("ls -d /r2e_tests", timeout_s=20)).output == b"/r2e_tests\n"
        await until("the next one", lambda: running(docker_engine, run_name) == 3)


async def test_warm_containers_that_died_are_replaced(
    run_name: str, sandbox_task: Task, docker_engine: docker.APIClient
) -> None:
    async with open_pool(SandboxConfig(warm=1), run=run_name) as pool:
        await pool.prefetch([sandbox_task])
        await until("2 warm", lambda: running(docker_engine, run_name) == 2)
        for dead in containers_of(docker_engine, run_name):
            docker_engine.kill(dead)
        await until("they are gone", lambda: not containers_of(docker_engine, run_name))
        for sandbox in (await pool.acquire(sandbox_task), await pool.acquire_for_grading(sandbox_task)):
            assert (await sandbox.exec("echo alive", timeout_s=20)).output == b"alive\n"


async def test_containers_of_an_older_plan_wait_a_while_and_then_make_room(
    run_name: str, sandbox_task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_task(sandbox_task.image, name="other", workdir="/testbed/pkg")
    async with open_pool(SandboxConfig(warm=1), run=run_name) as pool:
        await pool.prefetch([sandbox_task])
        await pool.prefetch([other])
        waiting = await pool.acquire(sandbox_task)
        taken = await pool.acquire(other)
        assert (await taken.exec("pwd", timeout_s=20)).output == b"/testbed/pkg\n"
        assert waiting.alive

        monkeypatch.setattr("agent_r3.envs.warm.STALE_S", 0.0)
        await pool.prefetch([sandbox_task])
        await pool.prefetch([other])
        assert [(await warm.start).task.id for warm in pool._ready._warm] == ["other"]


async def test_starts_are_bounded(run_name: str, sandbox_task: Task, docker_engine: docker.APIClient) -> None:
    async with open_pool(SandboxConfig(max_starting=2), run=run_name) as pool:
        made = asyncio.gather(*(pool.acquire_for_grading(sandbox_task) for _ in range(8)))
        most = 0
        while not made.done():
            starting = {"label": f"agent_r3.run={run_name}", "status": "created"}
            most = max(most, len(docker_engine.containers(all=True, filters=starting)))
            await asyncio.sleep(0.01)
        assert 1 <= most <= 2 and len({sandbox.id for sandbox in await made}) == 8


async def test_a_cancelled_acquire_leaves_nothing(
    run_name: str, sandbox_task: Task, docker_engine: docker.APIClient
) -> None:
    async with open_pool(SandboxConfig(max_starting=1), run=run_name) as pool:
        for wait in (0.0, 0.05, 0.3):
            asking = [asyncio.create_task(pool.acquire(sandbox_task)) for _ in range(2)]
            await asyncio.sleep(wait)
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        await until("all gone", lambda: not pool._starts and not containers_of(docker_engine, run_name))
        assert (await (await pool.acquire(sandbox_task)).exec("echo ok", timeout_s=20)).output == b"ok\n"


async def test_close_removes_everything_twice_and_when_cancelled(
    run_name: str, sandbox_task: Task, docker_engine: docker.APIClient
) -> None:
    pool = open_pool(SandboxConfig(warm=2), run=run_name)
    await pool.prefetch([sandbox_task] * 4)
    sandbox = await pool.acquire(sandbox_task)
    starting = asyncio.create_task(pool.acquire(sandbox_task))
    await asyncio.sleep(0)
    closing = asyncio.create_task(pool.close())
    await asyncio.sleep(0.01)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert containers_of(docker_engine, run_name) == []
    with pytest.raises(SandboxError):
        await (await starting).exec("true", timeout_s=5)
    await pool.close()
    await sandbox.close()
    with pytest.raises(SandboxError):
        await sandbox.exec("true", timeout_s=5)
    with pytest.raises(SandboxError, match="closed"):
        await pool.acquire(sandbox_task)


async def test_two_pools_do_not_touch_each_other(
    run_name: str, sandbox_task: Task, docker_engine: docker.APIClient
) -> None:
    async with open_pool(SandboxConfig(), run=run_name, owner="a") as first:
        kept = await first.acquire(sandbox_task)
        async with open_pool(SandboxConfig(), run=run_name, owner="b") as second:
            await second.acquire(sandbox_task)
            assert reap(run_name) == 0  # both owners live
        assert len(containers_of(docker_engine, run_name)) == 1
        assert (await kept.exec("echo alive", timeout_s=20)).output == b"alive\n"


async def test_a_killed_worker_leaves_nothing(
    run_name: str, sandbox_image: str, docker_engine: docker.APIClient
) -> None:
    command = [sys.executable, "-c", WORKER, run_name, sandbox_image]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[1])
    assert worker.stdout is not None and worker.stdout.readline() == b"up\n"
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    worker.stdout.close()
    await until("gone by itself", lambda: not containers_of(docker_engine, run_name))


def test_reap_removes_what_has_no_living_owner_or_is_overdue(
    run_name: str, sandbox_image: str, docker_engine: docker.APIClient
) -> None:
    def leave(owner: str, deadline: float) -> str:
        labels = {"agent_r3.run": run_name, "agent_r3.owner": owner, "agent_r3.deadline": str(int(deadline))}
        return str(docker_engine.create_container(sandbox_image, command=["true"], labels=labels)["Id"])

    ended, _, _ = owner_label("worker").rpartition(":")  # this pid, but of an earlier process
    leave(f"{ended}:1", time.time() + 1000)
    leave("worker@another-host/1:1:1", time.time() - 1)
    kept = {
        leave(owner_label("worker"), time.time() + 1000),
        leave("worker@another-host/1:1:1", time.time() + 1000),
        leave(f"worker@{os.uname().nodename}/1:1:1", time.time() + 1000),  # of another container with our host's name
    }
    assert reap(run_name + "-other") == 0
    reap(run_name)
    left = containers_of(docker_engine, run_name)
    for container in left:
        docker_engine.remove_container(container)
    assert set(left) == kept


async def test_descriptors_do_not_pile_up(pool: SandboxPool, sandbox_task: Task) -> None:
    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    async def use() -> None:
        sandbox = await pool.acquire(sandbox_task)
        await sandbox.close()

    await use()
    await until("first one closed", lambda: not pool._host._removals)
    before = count()
    for _ in range(4):
        await use()
    await until("all closed", lambda: not pool._host._removals)
    assert count() <= before


async def test_sixteen_at_once(run_name: str, sandbox_task: Task) -> None:
    async def episode(pool: SandboxPool, number: int) -> bytes:
        sandbox = await pool.acquire(sandbox_task)
        for _ in range(3):
            result = await sandbox.exec(f"echo {number} >>mine; cat mine", timeout_s=60)
        await sandbox.close()
        return result.output

    async with open_pool(SandboxConfig(), run=run_name) as pool:
        outputs = await asyncio.gather(*(episode(pool, number) for number in range(16)))
    assert outputs == [f"{number}\n".encode() * 3 for number in range(16)]


def test_without_an_engine_one_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nothing.sock")
    problem = docker_problem()
    assert problem is not None and "docker/engine.sh" in problem and "\n" not in problem
    with pytest.raises(UserError, match="no Docker engine"):
        require_docker()
    with pytest.raises(UserError, match="no Docker engine"):
        open_pool(SandboxConfig(kind="docker"))
    assert reap(None) == 0
    monkeypatch.setenv("DOCKER_HOST", "https://127.0.0.1:1")
    assert "\n" not in (docker_problem() or "\n")


def test_with_an_engine_there_is_no_problem(docker_engine: docker.APIClient) -> None:
    assert docker_problem() is None
    require_docker()


def test_engine_script_does_nothing_where_an_engine_answers(docker_engine: docker.APIClient) -> None:
    before = docker_engine.info()["ID"]
    done = subprocess.run([str(ENGINE)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert docker_engine.info()["ID"] == before


def test_engine_script_tells_a_user_without_rights_what_to_do(docker_engine: docker.APIClient) -> None:
    with ENGINE.open() as script:
        command = ["bash", "-s"]
        done = subprocess.run(command, stdin=script, capture_output=True, text=True, timeout=60, user=65534, cwd="/")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and "as root" in done.stderr
