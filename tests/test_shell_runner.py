"""The runner in bash, for images without Python, beyond what the protocol suite asks of every backend."""

import asyncio

import pytest

from agent_r3.envs.pool import SandboxPool
from agent_r3.envs.runner_sandbox import RunnerSandbox
from agent_r3.errors import SandboxDeadError
from tests.support.docker import make_task

pytestmark = pytest.mark.docker


@pytest.fixture
async def sandbox(pool: SandboxPool, image_without_python: str) -> RunnerSandbox:
    return await pool.acquire(make_task(image_without_python))


async def test_all_that_a_command_wrote_arrives_whoever_lives_on(sandbox: RunnerSandbox) -> None:
    expected = b"".join(b"%d\n" % number for number in range(1, 20_001))
    for _ in range(8):
        result = await sandbox.exec(
            "(sleep 100 &) ; seq 1 20000; seq 1 20000 >&3", timeout_s=30, max_report_bytes=200_000
        )
        assert result.output == expected and result.report == expected and not result.timed_out
    late = await sandbox.exec("seq 1 20000; sleep 100", timeout_s=1)
    assert late.output == expected and late.timed_out


async def test_a_command_finds_its_own_descriptors_and_surroundings_only(sandbox: RunnerSandbox) -> None:
    assert (await sandbox.exec("ls /proc/self/fd", timeout_s=20)).output == b"0\n1\n2\n3\n"  # 3 is the folder
    names = (await sandbox.exec("compgen -e | sort", timeout_s=20)).text.split()
    assert not {"LC_ALL", "OLDPWD", "command", "fields", "dir"} & set(names) and "PATH" in names
    ignored = await sandbox.exec("grep SigIgn /proc/self/status", timeout_s=20)
    own_to_libc = 1 << (32 - 1)  # no shell can reset signal 32: a process under an engine that ignores it inherits that
    assert int(ignored.text.split()[1], 16) & ~own_to_libc == 0
    assert (await sandbox.exec("cut -d' ' -f6 /proc/$$/stat; echo $$", timeout_s=20)).text.split()[0] != "1"  # session


@pytest.mark.parametrize(
    "harm",
    [
        "rm -rf /tmp /var/tmp",
        "rm -rf /var/tmp/* /tmp/*; mkdir -p /var/tmp/agent-r3-runner; mkfifo /var/tmp/agent-r3-runner/file",
        "kill -9 $(pidof cat); echo lost",
    ],
    ids=["no-folder", "fifo-for-a-file", "no-collector"],
)
async def test_harm_to_its_files_and_helpers_passes_with_the_command(sandbox: RunnerSandbox, harm: str) -> None:
    await sandbox.exec(harm, timeout_s=20)
    assert (await sandbox.exec("echo alive; mkdir -p /tmp /var/tmp", timeout_s=20)).output == b"alive\n"
    await sandbox.put("/tmp/file", b"data")
    assert await sandbox.get("/tmp/file") == b"data"


async def test_it_ends_with_its_host_in_the_middle_of_a_command(sandbox: RunnerSandbox, pool: SandboxPool) -> None:
    running = asyncio.create_task(sandbox.exec("trap '' TERM HUP; sleep 1000", timeout_s=1000))
    await asyncio.sleep(0.5)
    await sandbox.close()
    with pytest.raises(SandboxDeadError):
        await running
