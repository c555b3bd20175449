"""The Docker host under fire: an engine that refuses, dies or breaks, containers that outgrow their limits."""

import asyncio
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import docker
import pytest

from agent_r3.config import SandboxConfig
from agent_r3.envs.docker_faults import Threads
from agent_r3.envs.docker_removal import Removals
from agent_r3.envs.local import open_pool
from agent_r3.envs.pool import SandboxPool
from agent_r3.envs.runner_sandbox import RunnerSandbox
from agent_r3.errors import ConfigError, DaemonError, DataError, DiskFullError, SandboxDeadError, SandboxError
from agent_r3.types import Task
from tests.support.docker import containers_of, make_task
from tests.support.private_engine import PrivateEngine, small_disk
from tests.support.refusing_engine import RefusingEngine
from tests.support.tiny_image import make_tiny_image

pytestmark = pytest.mark.docker


@pytest.fixture
def tiny_task(private_engine: PrivateEngine, monkeypatch: pytest.MonkeyPatch) -> Task:
    """A task on the private engine, to which DOCKER_HOST leads; it cannot be set up for an agent."""
    monkeypatch.setenv("DOCKER_HOST", private_engine.url)
    client = private_engine.client()
    make_tiny_image(client, "agent-r3-test/tiny:latest")
    client.close()
    return make_task("agent-r3-test/tiny:latest", workdir="/testbed")


async def until_gone(api: docker.APIClient, run: str, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while left := containers_of(api, run):
        assert time.monotonic() < deadline, f"{len(left)} containers are left"
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("what", ["POST .*/containers/create", "POST .*/start"])
async def test_an_overloaded_engine_is_asked_again(
    run_name: str, sandbox_task: Task, refusing_engine: RefusingEngine, what: str
) -> None:
    refusing_engine.what = what
    async with open_pool(SandboxConfig(), run=run_name) as pool:
        refusing_engine.refusals = [429, 500, 503]
        sandbox = await pool.acquire_for_grading(sandbox_task)
        assert (await sandbox.exec("echo up", timeout_s=20)).output == b"up\n"
    assert refusing_engine.asked == 4


async def test_an_engine_that_stays_overloaded_is_given_up_in_time(
    run_name: str, sandbox_task: Task, refusing_engine: RefusingEngine
) -> None:
    refusing_engine.refusals = [503] * 100
    async with open_pool(SandboxConfig(start_timeout_s=1.5), run=run_name) as pool:
        began = time.monotonic()
        with pytest.raises(DaemonError, match="try again later"):
            await pool.acquire_for_grading(sandbox_task)
        assert time.monotonic() - began < 30 and refusing_engine.asked >= 2


@pytest.mark.parametrize(
    ("status", "message", "error"),
    [
        (400, "bad parameter", DaemonError),
        (409, "conflict", DaemonError),
        (500, "no space left on device", DiskFullError),
    ],
)
async def test_what_will_not_pass_is_not_tried_again(
    run_name: str,
    sandbox_task: Task,
    refusing_engine: RefusingEngine,
    status: int,
    message: str,
    error: type[SandboxError],
) -> None:
    refusing_engine.message = message
    refusing_engine.refusals = [status] * 5
    async with open_pool(SandboxConfig(), run=run_name) as pool:
        with pytest.raises(error, match=message):
            await pool.acquire_for_grading(sandbox_task)
    assert refusing_engine.asked == 1


async def test_a_container_that_is_gone_before_its_start_is_replaced(
    run_name: str, sandbox_task: Task, refusing_engine: RefusingEngine
) -> None:
    refusing_engine.what = "POST .*/start"
    refusing_engine.message = "No such container: x"
    async with open_pool(SandboxConfig(), run=run_name) as pool:
        refusing_engine.refusals = [404]
        assert (await pool.acquire_for_grading(sandbox_task)).alive
    assert refusing_engine.asked == 2


async def test_a_failing_oci_runtime_is_the_engines_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = ("--add-runtime", "broken=/bin/false", "--default-runtime", "broken")
    with PrivateEngine(Path(tempfile.mkdtemp(prefix="engine-")), *broken) as engine:
        monkeypatch.setenv("DOCKER_HOST", engine.url)
        client = engine.client()
        make_tiny_image(client, "agent-r3-test/tiny:latest")
        async with open_pool(SandboxConfig()) as pool:
            with pytest.raises(DaemonError, match="OCI runtime create failed"):
                await pool.acquire_for_grading(make_task("agent-r3-test/tiny:latest"))
        assert client.containers(all=True) == []
        client.close()


@pytest.mark.parametrize(
    ("shell", "without", "reason"),
    [("bash", "dd", "no dd"), ("dash", "bash", "no bash"), ("missing", "missing", "no /bin/sh")],
)
async def test_an_image_in_which_no_runner_runs_is_the_users_to_mend(
    private_engine: PrivateEngine, monkeypatch: pytest.MonkeyPatch, shell: str, without: str, reason: str
) -> None:
    monkeypatch.setenv("DOCKER_HOST", private_engine.url)
    client = private_engine.client()
    make_tiny_image(client, "agent-r3-test/lacking:latest", shell=shell, without=without)
    async with open_pool(SandboxConfig(), run="lacking") as pool:
        with pytest.raises(DataError, match=rf"lacking.*cannot be used.*{reason}"):
            await pool.acquire_for_grading(make_task("agent-r3-test/lacking:latest"))
    assert containers_of(client, "lacking") == []
    client.close()


@pytest.mark.parametrize("kill", [False, True], ids=["stopped", "killed"])
async def test_a_restarted_engine_ends_its_sandboxes_and_gives_new_ones(
    private_engine: PrivateEngine, tiny_task: Task, kill: bool
) -> None:
    config = SandboxConfig(warm=2, watch_s=0.5)
    run = f"restart-{kill}"
    async with open_pool(config, run=run) as pool:
        running = await pool.acquire_for_grading(tiny_task)
        idle = await pool.acquire_for_grading(tiny_task)
        command = asyncio.create_task(running.exec("sleep 1000", timeout_s=1000))
        await asyncio.sleep(0.5)
        await asyncio.to_thread(private_engine.kill if kill else private_engine.stop)
        with pytest.raises(SandboxDeadError):
            await command
        with pytest.raises(SandboxDeadError):
            await idle.exec("true", timeout_s=20)
        waiting = asyncio.create_task(pool.acquire_for_grading(tiny_task))
        await asyncio.sleep(1.0)
        assert not waiting.done()
        await asyncio.to_thread(private_engine.start)
        fresh = await waiting
        assert (await fresh.exec("echo up", timeout_s=20)).output == b"up\n"
    client = private_engine.client()
    assert client.containers(all=True) == []
    client.close()


async def test_an_engine_that_hangs_is_given_up_in_time(private_engine: PrivateEngine, tiny_task: Task) -> None:
    async with open_pool(SandboxConfig(start_timeout_s=2.0), run="frozen") as pool:
        running = await pool.acquire_for_grading(tiny_task)
        private_engine.freeze()
        try:
            began = time.monotonic()
            with pytest.raises(DaemonError, match="timed out"):
                await pool.acquire_for_grading(tiny_task)
            assert time.monotonic() - began < 20
        finally:
            private_engine.thaw()
        assert (await running.exec("echo alive", timeout_s=20)).output == b"alive\n"
        assert (await pool.acquire_for_grading(tiny_task)).alive
    client = private_engine.client()
    assert containers_of(client, "frozen") == []
    client.close()


async def test_closing_does_not_wait_for_an_engine_that_is_away(private_engine: PrivateEngine, tiny_task: Task) -> None:
    pool = open_pool(SandboxConfig(), run="away")
    assert (await pool.acquire_for_grading(tiny_task)).alive
    private_engine.stop()
    waiting = asyncio.create_task(pool.acquire_for_grading(tiny_task))
    try:
        await asyncio.sleep(0.5)
        closing = asyncio.create_task(pool.close())
        with pytest.raises(DaemonError):
            await asyncio.wait_for(waiting, 20)
    finally:
        private_engine.start()
    await asyncio.wait_for(closing, 20)


async def test_a_removal_that_failed_is_tried_until_the_container_is_gone(
    private_engine: PrivateEngine, tiny_task: Task
) -> None:
    client = private_engine.client()
    name = "to-be-removed"
    client.create_container(tiny_task.image, command=["x"], entrypoint=["/bin/sh"], name=name)
    threads = Threads(2, "test")
    removals = Removals(client, threads, finish_s=1.0)
    private_engine.stop()
    try:
        removals.remove(name, force=True)
        await removals.finish()
        assert len(removals) == 1
    finally:
        private_engine.start()
    removals.again()
    await removals.finish()
    assert len(removals) == 0 and client.containers(all=True) == []
    threads.close()
    client.close()


async def test_a_sandbox_above_its_disk_is_ended_as_an_infrastructure_failure(
    run_name: str, sandbox_task: Task, docker_engine: docker.APIClient
) -> None:
    async with open_pool(SandboxConfig(disk="20m", watch_s=0.2), run=run_name) as pool:
        modest = await pool.acquire_for_grading(sandbox_task)
        await modest.exec("head -c 10M /dev/zero >/var/tmp/some", timeout_s=20)
        greedy = await pool.acquire_for_grading(sandbox_task)
        with pytest.raises(DiskFullError, match=r"task task wrote \d+ MiB; sandbox.disk is 20m"):
            await greedy.exec("head -c 40M /dev/zero >/var/tmp/much; sleep 100", timeout_s=100)
        with pytest.raises(DiskFullError):
            await greedy.exec("true", timeout_s=20)
        assert (await modest.exec("echo alive", timeout_s=20)).output == b"alive\n"
        while len(containers_of(docker_engine, run_name)) > 1:
            await asyncio.sleep(0.1)


async def test_a_single_file_above_its_limit_is_the_commands_failure(run_name: str, sandbox_task: Task) -> None:
    async with open_pool(SandboxConfig(file_size="1m"), run=run_name) as pool:
        sandbox = await pool.acquire_for_grading(sandbox_task)
        result = await sandbox.exec("head -c 2M /dev/zero >/var/tmp/file; stat -c %s /var/tmp/file", timeout_s=20)
        assert b"1048576\n" in result.output and b"File size limit" in result.output


async def test_a_full_disk_is_an_infrastructure_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    with small_disk("64m") as folder, PrivateEngine(folder / "e") as engine:
        monkeypatch.setenv("DOCKER_HOST", engine.url)
        client = engine.client()
        make_tiny_image(client, "agent-r3-test/tiny:latest")
        task = make_task("agent-r3-test/tiny:latest")
        async with open_pool(SandboxConfig(disk_floor="1g")) as pool:
            with pytest.raises(DiskFullError, match=r"\d+ MiB are free at .*sandbox.disk_floor \(1024 MiB\)"):
                await pool.acquire_for_grading(task)
        async with open_pool(SandboxConfig(disk_floor="0")) as pool:
            assert (await pool.acquire_for_grading(task)).alive
            with pytest.raises(OSError, match="No space left"), (folder / "filler").open("wb") as filler:
                while True:
                    filler.write(bytes(1 << 16))
            with pytest.raises(DiskFullError, match="no space left on device"):
                await pool.acquire_for_grading(task)
            (folder / "filler").unlink()
            assert (await pool.acquire_for_grading(task)).alive
        assert client.containers(all=True) == []
        client.close()


async def test_left_over_containers_of_any_run_are_removed_while_a_pool_is_open(
    run_name: str, sandbox_task: Task, docker_engine: docker.APIClient
) -> None:
    def leave(number: int) -> None:
        labels = {"agent_r3.run": f"{run_name}-old-{number}", "agent_r3.owner": "worker@gone:1:1"}
        docker_engine.create_container(
            sandbox_task.image, command=["true"], labels={**labels, "agent_r3.deadline": "1"}
        )

    for number in range(20):
        leave(number)
    async with open_pool(SandboxConfig(watch_s=0.3), run=run_name) as pool:
        await pool.acquire_for_grading(sandbox_task)
        await asyncio.gather(*(until_gone(docker_engine, f"{run_name}-old-{number}") for number in range(20)))
        leave(20)
        await until_gone(docker_engine, f"{run_name}-old-20")


async def test_a_network_is_for_tasks_that_ask_where_the_config_allows_it(run_name: str, sandbox_task: Task) -> None:
    asking = replace(sandbox_task, id="asks", network=True)
    look = "ls /sys/class/net"
    async with open_pool(SandboxConfig(network=True), run=run_name) as pool:
        with_network = await pool.acquire_for_grading(asking)
        without = await pool.acquire_for_grading(sandbox_task)
        assert "eth0" in (await with_network.exec(look, timeout_s=20)).text
        assert "eth0" not in (await without.exec(look, timeout_s=20)).text
    async with open_pool(SandboxConfig(), run=run_name) as pool:
        for attempt in (pool.prefetch([asking]), pool.acquire(asking), pool.acquire_for_grading(asking)):
            with pytest.raises(DataError, match=r"task asks asks for a network; set sandbox\.network"):
                await attempt


async def test_a_stream_that_nobody_drains_holds_up_nothing(pool: SandboxPool, sandbox: RunnerSandbox) -> None:
    flood = asyncio.create_task(sandbox.exec("head -c 60M /dev/zero", timeout_s=60, max_output_bytes=50_000_000))
    await asyncio.sleep(0.1)
    time.sleep(1.0)  # nobody reads: the loop itself stands still
    flood.cancel()
    began = time.monotonic()
    assert (await sandbox.exec("echo next", timeout_s=20)).output == b"next\n"
    assert time.monotonic() - began < 15


async def test_output_split_within_a_character_is_decoded_whole(sandbox: RunnerSandbox) -> None:
    halves = "printf '\\xe2\\x82'; sleep 0.3; printf '\\xac\\n'; printf '\\xff\\xfe'"
    assert (await sandbox.exec(halves, timeout_s=20)).text == "€\n��"


async def test_pid_1_collects_what_ends_without_a_parent(sandbox: RunnerSandbox) -> None:
    orphans = "for i in $(seq 50); do (sleep 0.01 &) ; done; sleep 1; ps -eo stat= | grep -c Z || true"
    assert (await sandbox.exec(orphans, timeout_s=60)).output == b"0\n"


async def test_limits_leave_ordinary_work_alone(sandbox: RunnerSandbox) -> None:
    work = (
        "git checkout -q -b work && echo x >>plain.py && git add -A && git commit -q -m x && git log --oneline | wc -l"
        " && python3 -c 'import subprocess, tempfile, threading; print(subprocess.run([\"true\"]).returncode)'"
        " && chmod 700 tool.sh && ./tool.sh && tar cf /tmp/x.tar . && tar tf /tmp/x.tar >/dev/null && echo packed"
    )
    assert (await sandbox.exec(work, timeout_s=60)).output == b"2\n0\nran\npacked\n"


@pytest.mark.parametrize("key", ["memory", "file_size", "disk", "disk_floor"])
def test_a_size_that_is_none_is_the_users_to_mend(docker_engine: docker.APIClient, key: str) -> None:
    with pytest.raises(ConfigError, match=f"sandbox.{key}: `much` is not a size"):
        open_pool(SandboxConfig(kind="docker").model_copy(update={key: "much"}))
