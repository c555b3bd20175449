"""What is Docker's own: the limits of a container, a frozen one, and images that cannot be used."""

import ast
import inspect
import time

import docker
import pytest

from agent_r3.config import SandboxConfig
from agent_r3.envs import runner
from agent_r3.envs.local import open_pool
from agent_r3.envs.pool import SandboxPool
from agent_r3.envs.runner_sandbox import RunnerSandbox
from agent_r3.errors import DataError, SandboxError
from agent_r3.types import Task
from tests.support.docker import containers_of, make_task

pytestmark = pytest.mark.docker


async def test_a_command_beyond_the_memory_limit_is_killed_and_the_sandbox_lives(
    run_name: str, sandbox_task: Task
) -> None:
    async with open_pool(SandboxConfig(memory="64m"), run=run_name) as pool:
        sandbox = await pool.acquire(sandbox_task)
        result = await sandbox.exec("python3 -c 'bytearray(200 << 20)'", timeout_s=60)
        assert result.exit_code == 137
        assert (await sandbox.exec("echo alive", timeout_s=20)).output == b"alive\n"


async def test_used_up_processes_end_with_their_command(run_name: str, sandbox_task: Task) -> None:
    async with open_pool(SandboxConfig(pids=32), run=run_name) as pool:
        sandbox = await pool.acquire(sandbox_task)
        await sandbox.put("/tmp/forks.py", b"import os, time\nwhile os.fork():\n    pass\ntime.sleep(1000)\n")
        result = await sandbox.exec("python3 /tmp/forks.py", timeout_s=20)
        assert result.exit_code == 1 and b"Resource temporarily unavailable" in result.output
        assert (await sandbox.exec("echo alive", timeout_s=20)).output == b"alive\n"


async def test_limits_and_isolation(sandbox: RunnerSandbox, docker_engine: docker.APIClient) -> None:
    status = (await sandbox.exec("cat /proc/self/status; cat /proc/net/route | wc -l", timeout_s=20)).text
    assert "CapEff:\t0000000000000000" in status and "CapBnd:\t0000000000000000" in status
    assert "NoNewPrivs:\t1" in status and "Seccomp:\t2" in status
    assert status.endswith("\n1\n")  # the table's head, no route
    assert (await sandbox.exec("ls /sys/class/net", timeout_s=20)).output == b"lo\n"
    host = docker_engine.inspect_container(sandbox.id)["HostConfig"]
    assert host["Memory"] == host["MemorySwap"] == 1 << 30
    assert (host["PidsLimit"], host["NanoCpus"], host["LogConfig"]["Type"]) == (256, 10**9, "none")
    assert (await sandbox.exec("truncate -s 1024M /tmp/large", timeout_s=20)).exit_code == 0
    assert (await sandbox.exec("truncate -s 1025M /tmp/larger", timeout_s=20)).exit_code == 153


async def test_a_frozen_container_is_an_infrastructure_failure_at_the_host_deadline(
    sandbox: RunnerSandbox, docker_engine: docker.APIClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_r3.envs.runner_sandbox._GRACE_S", 1.0)
    docker_engine.pause(sandbox.id)
    started = time.monotonic()
    with pytest.raises(SandboxError, match="no answer within"):
        await sandbox.exec("echo", timeout_s=0.5)
    assert time.monotonic() - started < 10
    with pytest.raises(SandboxError):
        await sandbox.exec("echo", timeout_s=0.5)


async def test_an_image_without_git_or_workdir_is_the_users_to_mend(
    pool: SandboxPool, image_without_git: str, sandbox_image: str
) -> None:
    with pytest.raises(DataError, match="no git"):
        await pool.acquire(make_task(image_without_git))
    with pytest.raises(DataError, match="no folder /elsewhere"):
        await pool.acquire(make_task(sandbox_image, workdir="/elsewhere"))


async def test_a_missing_image_is_the_users_to_mend(
    pool: SandboxPool, run_name: str, docker_engine: docker.APIClient
) -> None:
    task = make_task("agent-r3-test/not-built:latest", name="some__task")
    for attempt in (pool.prefetch([task]), pool.acquire(task), pool.acquire_for_grading(task)):
        with pytest.raises(DataError, match=r"not-built.*some__task.*agent-r3 tasks build offline"):
            await attempt
    assert containers_of(docker_engine, run_name) == []


def test_the_runner_is_python_3_6_and_needs_nothing_but_the_standard_library() -> None:
    tree = ast.parse(inspect.getsource(runner), feature_version=(3, 6))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported <= {"os", "select", "time", "_signal", "_ctypes"}
