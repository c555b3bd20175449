"""bwrap sandboxes beyond the common protocol: what they cannot see or do, their limits, and what is never left over."""

import asyncio
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import docker
import pytest

from agent_r3.cli.main import main
from agent_r3.config import GradingConfig, SandboxConfig
from agent_r3.envs.bwrap import bwrap_problem
from agent_r3.envs.bwrap_host import BwrapHost, limits_found
from agent_r3.envs.cgroups import writable_parents
from agent_r3.envs.grading import Grader
from agent_r3.envs.local import local_kind, open_pool, reap, require_backend
from agent_r3.envs.pool import SandboxPool
from agent_r3.envs.rootfs import RootfsStore
from agent_r3.envs.runner_sandbox import RunnerSandbox
from agent_r3.envs.scratch import bytes_written, scratch_root
from agent_r3.errors import DataError, DiskFullError, SandboxDeadError, SandboxError, UserError
from agent_r3.types import Task
from tests.support.bwrap import as_plain_user, groups_of, left_of, processes_of, shared_folder
from tests.support.docker import make_task
from tests.test_rootfs import layer, saved

pytestmark = pytest.mark.docker  # an engine makes the image that is unpacked


@pytest.fixture
async def sandbox(bwrap_pool: SandboxPool, sandbox_task: Task) -> RunnerSandbox:
    return await bwrap_pool.acquire(sandbox_task)


async def output(sandbox: RunnerSandbox, command: str) -> str:
    return (await sandbox.exec(command, timeout_s=30)).text


async def test_nothing_of_the_host_can_be_seen(
    bwrap_pool: SandboxPool, sandbox_task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOST_SECRET", "hush")
    one, other = [await bwrap_pool.acquire_for_grading(sandbox_task) for _ in range(2)]
    await other.put("/tmp/of-the-other", b"")
    assert await output(one, "env | grep -c hush; ls /tmp/of-the-other /var/tmp/agent-r3-* /work 2>/dev/null") == "0\n"
    assert await output(one, "find / -xdev -type s; find /sys /home /root /run -mindepth 1; hostname") == f"{one.id}\n"
    assert await output(one, "ps -e -o pid= | wc -l") == "4\n"  # PID 1, the shell, ps and wc
    sources = await output(one, "awk '$3 !~ /^(proc|tmpfs|devtmpfs|devpts)$/ {print $1, $2}' /proc/mounts")
    assert sources == "overlay /\n"
    for escape in ("/proc/1/root", "/proc/1/cwd", "/proc/1/environ", "/proc/1/mem"):
        assert (await one.exec(f"head -c1 {escape} || ls {escape}/", timeout_s=30)).exit_code != 0, escape


async def test_the_only_network_is_its_own_loopback(sandbox: RunnerSandbox) -> None:
    abstract = f"\0agent-r3-test-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(abstract)
        unix.listen()
        connect = f"""
import socket
def reach(family, address):
    try:
        socket.socket(family).connect(address)
        return "reached"
    except OSError as exc:
        return exc.strerror
print(reach(socket.AF_INET, ("127.0.0.1", {tcp.getsockname()[1]})), reach(socket.AF_UNIX, {abstract!r}), sep="; ")
print(reach(socket.AF_INET, ("192.0.2.1", 80)))
server = socket.create_server(("localhost", 0))
print(reach(socket.AF_INET, ("localhost", server.getsockname()[1])))
"""
        await sandbox.put("/tmp/connect.py", connect.encode())
        found = await output(sandbox, "python3 /tmp/connect.py; tail -n +3 /proc/net/dev | cut -d: -f1")
    assert found.split("\n") == [
        "Connection refused; Connection refused", "Network is unreachable", "reached", "    lo", "",
    ]  # fmt: skip


async def test_root_inside_is_nobody_outside_and_cannot_become_more(sandbox: RunnerSandbox) -> None:
    status = await output(sandbox, "id -u; grep -hE '^(CapEff|CapPrm|NoNewPrivs|Seccomp):' /proc/self/status")
    assert status.split() == ["0", "CapPrm:", "0" * 16, "CapEff:", "0" * 16, "NoNewPrivs:", "1", "Seccomp:", "2"]
    for pid in processes_of(sandbox.id):
        uids = Path(f"/proc/{pid}/status").read_text().partition("Uid:")[2].split()[:4]
        assert "0" not in uids
    refused = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
def call(*args):
    return errno.errorcode[ctypes.get_errno()] if libc.syscall(*args) < 0 else "done"
if os.uname().machine == "x86_64":
    # unshare(NEWUSER), keyctl, bpf, mount, io_uring_setup, clone3, clone(NEWUSER), unshare in the x32 set
    print(*[call(*args) for args in ((272, 0x10000000), (250, 0, 0), (321, 0, 0, 0), (165, 0, 0, 0, 0, 0), (425, 1, 0),
        (435, 0, 0), (56, 0x10000000, 0, 0, 0, 0), (0x40000000 + 272, 0))])
"""
    await sandbox.put("/tmp/refused.py", refused.encode())
    if os.uname().machine == "x86_64":
        found = await output(sandbox, "python3 /tmp/refused.py")
        assert found.split() == ["EPERM", "EPERM", "EPERM", "EPERM", "EPERM", "ENOSYS", "EPERM", "ENOSYS"]
    assert (await sandbox.exec("unshare --user true", timeout_s=30)).exit_code != 0
    assert (await sandbox.exec("echo x >/proc/sys/kernel/core_pattern", timeout_s=30)).exit_code != 0
    assert (await sandbox.exec("touch /dev/file", timeout_s=30)).exit_code != 0


MEMORY_HOG = "python3 -c 'x = bytearray(1 << 30)'"
SHM_HOG = "head -c 100M /dev/zero >/dev/shm/full"
FORK_BOMB = "bomb() { bomb | bomb & }; bomb; sleep 0.5"


async def test_hogs_are_contained_and_the_sandbox_lives_on(
    bwrap_run: str, sandbox_task: Task, unpacked_image: str
) -> None:
    config = SandboxConfig(kind="bwrap", memory="200m", file_size="20m", pids=64)
    async with open_pool(config, run=bwrap_run) as pool:
        sandbox = await pool.acquire(sandbox_task)
        assert (await sandbox.exec(MEMORY_HOG, timeout_s=60)).exit_code != 0
        assert (await sandbox.exec(SHM_HOG, timeout_s=60)).exit_code != 0
        assert (await sandbox.exec("head -c 21M /dev/zero >/tmp/big", timeout_s=60)).exit_code == 153
        bomb = await sandbox.exec(FORK_BOMB, timeout_s=5)
        assert "Resource temporarily unavailable" in bomb.text
        assert await output(sandbox, "echo alive") == "alive\n"


async def test_control_groups_hold_the_limits_where_they_can_be_made(sandbox: RunnerSandbox) -> None:
    if os.geteuid() != 0:
        return  # what a user may write differs from machine to machine
    groups = groups_of(sandbox.id)
    assert len(groups) == len(writable_parents()) > 0
    names = {"memory.max", "memory.limit_in_bytes", "pids.max"}
    values = {(group / name).read_text().strip() for group in groups for name in names if (group / name).exists()}
    assert values == {str(1 << 30), "257"}
    assert "memory: cgroup; processes: cgroup" in limits_found()


async def test_a_sandbox_that_fills_the_disk_is_ended_and_none_is_started_below_the_floor(
    bwrap_run: str, unpacked_image: str, sandbox_task: Task
) -> None:
    config = SandboxConfig(kind="bwrap", disk="20m", watch_s=0.1)
    async with open_pool(config, run=bwrap_run) as pool:
        sandbox = await pool.acquire(sandbox_task)
        hidden = "mkdir /tmp/d; head -c 18M /dev/urandom >/tmp/d/big; chmod 0 /tmp/d"
        with pytest.raises(DiskFullError, match=r"wrote \d+ MiB; sandbox\.disk is 20m"):
            await sandbox.exec(f"{hidden}; head -c 4M /dev/urandom >/tmp/more; sleep 30", timeout_s=40)
        with pytest.raises(DiskFullError):
            await sandbox.exec("true", timeout_s=5)
    async with open_pool(config.model_copy(update={"disk_floor": "100000g"}), run=bwrap_run) as pool:
        with pytest.raises(DiskFullError, match=r"below sandbox\.disk_floor"):
            await pool.acquire(sandbox_task)


async def test_where_overlays_are_refused_the_image_is_copied(
    bwrap_run: str, unpacked_image: str, sandbox_task: Task
) -> None:
    config = SandboxConfig(kind="bwrap")
    async with SandboxPool(BwrapHost(config, bwrap_run, "test", overlay=False), config) as pool:
        sandbox = await pool.acquire(sandbox_task)
        assert "overlay" not in await output(sandbox, "cat /proc/mounts; echo changed >plain.py; rm noend.py")
        diff = await sandbox.diff()
        assert b"+changed" in diff and b"deleted file" in diff
    found = RootfsStore(None).require(sandbox_task)
    assert (found.folder / "rootfs/testbed/plain.py").read_bytes() == b"one\ntwo\nthree\n"


async def test_a_sandbox_changes_nothing_for_the_next_one(bwrap_pool: SandboxPool, sandbox_task: Task) -> None:
    sandbox = await bwrap_pool.acquire(sandbox_task)
    await output(
        sandbox, "echo changed >plain.py; chmod 777 tool.sh; rm -rf /usr/lib /etc; touch -d 2001-01-01 crlf.txt"
    )
    await sandbox.close()
    fresh = await bwrap_pool.acquire_for_grading(sandbox_task)
    assert (
        await output(fresh, "cat plain.py; stat -c %a tool.sh; ls /etc/passwd") == "one\ntwo\nthree\n755\n/etc/passwd\n"
    )


async def test_what_is_closed_is_gone_from_the_machine(bwrap_run: str, unpacked_image: str, sandbox_task: Task) -> None:
    async with open_pool(SandboxConfig(kind="bwrap"), run=bwrap_run) as pool:
        sandboxes = await asyncio.gather(*(pool.acquire(sandbox_task) for _ in range(3)))
        names = [sandbox.id for sandbox in sandboxes]
        assert sorted(left_of(bwrap_run)) == sorted(names) and all(processes_of(name) for name in names)
        # What an unprivileged user could not remove: folders without permissions.
        await sandboxes[0].exec("mkdir -p /tmp/a/b/c; chmod 0 /tmp/a/b/c /tmp/a/b /tmp/a", timeout_s=20)
        sleeping = asyncio.create_task(sandboxes[1].exec("setsid sleep 300 & sleep 300", timeout_s=300))
        await asyncio.sleep(0.3)
        await sandboxes[1].close()
        with pytest.raises(SandboxDeadError):
            await sleeping
    assert not left_of(bwrap_run) and not any(processes_of(name) or groups_of(name) for name in names)


WORKER = """
import asyncio, sys
from agent_r3.config import SandboxConfig
from agent_r3.envs.local import open_pool
from tests.support.docker import make_task

async def main():
    async with open_pool(SandboxConfig(kind="bwrap"), run=sys.argv[1]) as pool:
        sandbox = await pool.acquire(make_task(sys.argv[2]))
        print(sandbox.id, flush=True)
        await sandbox.exec("setsid sleep 300 & trap '' TERM; sleep 300", timeout_s=300)

asyncio.run(main())
"""


def test_a_killed_worker_leaves_no_process_and_the_reaper_takes_the_rest(bwrap_run: str, unpacked_image: str) -> None:
    command = [sys.executable, "-c", WORKER, bwrap_run, unpacked_image]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]) as worker:
        assert worker.stdout is not None
        name = worker.stdout.readline().strip()
        assert reap(SandboxConfig(kind="bwrap"), bwrap_run) == 0 and left_of(bwrap_run) == [name]  # its owner lives
        worker.send_signal(signal.SIGKILL)
    for _ in range(100):
        if not processes_of(name):
            break
        time.sleep(0.02)
    assert not processes_of(name)
    assert left_of(bwrap_run) == [name]
    assert reap(SandboxConfig(kind="bwrap"), bwrap_run + "-other") == 0
    assert reap(SandboxConfig(kind="auto"), bwrap_run) == 1
    assert not left_of(bwrap_run) and not groups_of(name)


async def test_the_watch_takes_what_killed_workers_of_other_runs_left(
    unpacked_image: str, sandbox_task: Task, bwrap_run: str
) -> None:
    config = SandboxConfig(kind="bwrap", watch_s=0.1)
    async with SandboxPool(BwrapHost(config, bwrap_run, "test"), config) as pool:
        sandbox = await pool.acquire(sandbox_task)
        folder = scratch_root() / sandbox.id
        record = json.loads((folder / "owner.json").read_text())
        owner, _, ticks = record["owner"].rpartition(":")
        record |= {"owner": f"{owner}:{int(ticks) + 1}", "run": "another", "groups": []}  # its pid was used again
        dead, making = (scratch_root() / f"{kind}-{bwrap_run}" for kind in ("dead", "making"))
        making.mkdir()
        dead.mkdir()
        (dead / "owner.json").write_text(json.dumps(record))
        for _ in range(100):
            if not dead.exists():
                break
            await asyncio.sleep(0.1)
        assert not dead.exists() and making.exists() and folder.exists() and sandbox.alive
        making.rmdir()


async def test_a_sandbox_that_does_not_start_in_time_is_an_infrastructure_failure_and_leaves_nothing(
    unpacked_image: str, sandbox_task: Task, bwrap_run: str
) -> None:
    config = SandboxConfig(kind="bwrap", start_timeout_s=0.001)
    async with SandboxPool(BwrapHost(config, bwrap_run, "test"), config) as pool:
        with pytest.raises(SandboxError, match="no answer within"):
            await pool.acquire(sandbox_task)
    assert not left_of(bwrap_run)


async def test_an_image_without_python_runs_under_the_runner_in_bash(
    docker_engine: docker.APIClient, image_without_python: str, bwrap_run: str
) -> None:
    RootfsStore(None).unpack_images(docker_engine, [image_without_python])
    async with open_pool(SandboxConfig(kind="bwrap"), run=bwrap_run) as pool:
        sandbox = await pool.acquire_for_grading(make_task(image_without_python, workdir="/tmp"))
        assert not sandbox.protected
        assert await output(sandbox, "sleep 100 & id -u") == "0\n"
        assert await output(sandbox, "ps -e -o comm= | grep -c sleep") == "0\n"


def test_a_user_without_privileges_gets_the_same_and_rlimits(
    docker_engine: docker.APIClient, sandbox_image: str
) -> None:
    with shared_folder() as folder:
        archive = folder / "image.tar"
        with archive.open("wb") as file:
            for chunk in docker_engine.get_image(sandbox_image):
                file.write(chunk)
        archive.chmod(0o644)

        async def body() -> None:
            os.environ["DOCKER_HOST"] = "unix:///nowhere/docker.sock"
            config = SandboxConfig(rootfs=folder / "rootfs", pids=64, memory="200m")
            assert local_kind(config) == "bwrap"
            store = RootfsStore(config.rootfs)
            store.unpack_archive(archive)
            async with open_pool(config, run="plain-user") as pool:
                sandbox = await pool.acquire(make_task(sandbox_image))
                assert sandbox.protected
                assert await output(sandbox, "id -u; echo new >>plain.py; rm -r pkg; echo done") == "0\ndone\n"
                assert b"+new" in await sandbox.diff()
                assert (await sandbox.exec(MEMORY_HOG, timeout_s=60)).exit_code != 0
                bomb = await sandbox.exec(FORK_BOMB, timeout_s=5)
                assert "Resource temporarily unavailable" in bomb.text
                assert (await sandbox.exec("chown 1:1 plain.py", timeout_s=20)).exit_code != 0
                hidden = "mkdir -p /tmp/a/b; head -c 10M /dev/urandom >/tmp/a/b/big; chmod 0 /tmp/a/b /tmp/a"
                await sandbox.exec(hidden, timeout_s=20)
                place = scratch_root() / sandbox.id
                assert (await bytes_written([place]))[place] > 10 << 20
            assert not left_of("plain-user")

        as_plain_user(body)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (layer(("etc", "/")), "it has no /bin/sh that runs"),
        (layer(("bin", "-> usr/bin"), ("usr/bin/sh", b"#!/usr/bin/missing\n")), "it has no /bin/sh that runs"),
    ],
    ids=["no-shell", "broken-shell"],
)
async def test_an_image_that_cannot_run_is_a_data_error(
    tmp_path: Path, bwrap_run: str, content: bytes, complaint: str
) -> None:
    RootfsStore(tmp_path / "store").unpack_archive(saved(tmp_path / "a.tar", content, name="odd:1"))
    async with open_pool(SandboxConfig(kind="bwrap", rootfs=tmp_path / "store"), run=bwrap_run) as pool:
        with pytest.raises(DataError, match=f"image odd:1 of task task cannot be used: {complaint}"):
            await pool.acquire(make_task("odd:1"))


async def test_an_image_that_is_not_unpacked_and_a_wish_for_a_network_are_refused(
    tmp_path: Path, bwrap_run: str, sandbox_task: Task
) -> None:
    config = SandboxConfig(kind="bwrap", rootfs=tmp_path)
    with pytest.raises(DataError, match=f"`agent-r3 tasks rootfs {sandbox_task.image} {tmp_path}`"):
        require_backend(config, [sandbox_task])
    async with open_pool(config, run=bwrap_run) as pool:
        with pytest.raises(DataError, match="is not unpacked"):
            await pool.prefetch([sandbox_task])
    with pytest.raises(DataError, match="asks for a network"):
        require_backend(config, [dataclasses.replace(sandbox_task, network=True)])


def test_auto_takes_docker_then_bwrap_then_says_how_to_get_either(monkeypatch: pytest.MonkeyPatch) -> None:
    assert local_kind(SandboxConfig()) == "docker"
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    assert local_kind(SandboxConfig()) == "bwrap"
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError) as found:
        local_kind(SandboxConfig())
    words = str(found.value)
    assert "\n" not in words and "docker/engine.sh" in words and "install bubblewrap" in words
    with pytest.raises(UserError, match="no bwrap on PATH"):
        open_pool(SandboxConfig(kind="bwrap"))


def test_a_bwrap_that_fails_is_named_with_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with shared_folder() as folder:
        (folder / "bwrap").write_text("#!/bin/sh\necho bwrap: no luck here >&2\nexit 1\n")
        (folder / "bwrap").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        problem = bwrap_problem()
    assert problem is not None and "(bwrap: no luck here)" in problem and "user.max_user_namespaces" in problem


def test_the_command_unpacks_the_images_of_a_dataset_once(
    docker_engine: docker.APIClient,
    sandbox_task: Task,
    pathspec_task: Task,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def rootfs(*arguments: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["agent-r3", "tasks", "rootfs", *arguments, "--json"])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return json.loads(out) if ended.value.code in (0, None) else {"code": ended.value.code, "error": err}

    rootfs("--for", "offline", "--only", pathspec_task.id)
    again = rootfs("--for", "offline", "--only", pathspec_task.id, str(RootfsStore(None).folder))
    assert (again["unpacked"], again["reused"]) == ([], [pathspec_task.image])
    assert RootfsStore(None).require(pathspec_task).environment["VIRTUAL_ENV"] == "/testbed/.venv"
    for arguments, complaint in (
        ((), "give IMAGE"),
        (("image", "dir", "--for", "offline"), "not both"),
        (("no-such-image:1",), "image no-such-image:1 is not on this Docker engine"),
        (("missing.tar",), "read image archive missing.tar"),
    ):
        refused = rootfs(*arguments)
        assert refused["code"] == 2 and complaint in refused["error"] and refused["error"].count("\n") == 1


async def test_grading_gives_what_it_gives_with_docker(
    bwrap_run: str, pathspec_task: Task, docker_engine: docker.APIClient
) -> None:
    RootfsStore(None).unpack_images(docker_engine, [pathspec_task.image])
    async with open_pool(SandboxConfig(kind="bwrap"), run=bwrap_run) as pool:
        grader = Grader(pool, GradingConfig())
        nothing, gold = await asyncio.gather(
            grader.grade(pathspec_task, b""), grader.grade(pathspec_task, pathspec_task.gold_patch.encode())
        )
    assert (nothing.reward, gold.reward) == (0.0, 1.0)
