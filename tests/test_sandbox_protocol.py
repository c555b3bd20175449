"""What every backend must do alike, whatever runs the sandbox: see tests/support/protocol.py for the backends."""

import asyncio
import time

import pytest

from agent_r3.envs.sandbox import FileMissingError, Sandbox
from agent_r3.errors import SandboxError
from tests.support.protocol import ProtocolBackend


@pytest.fixture
async def sandbox(protocol_backend: ProtocolBackend) -> Sandbox:
    """A sandbox set up for the agent, on each backend in turn. It goes when its provider is closed."""
    return await protocol_backend.provider.acquire(protocol_backend.task)


async def processes(sandbox: Sandbox) -> list[str]:
    """Commands of the processes in the sandbox, without the runner and the one that looks."""
    result = await sandbox.exec("exec ps -eo pid=,args=", timeout_s=20)
    lines = [line.split(None, 1) for line in result.text.splitlines() if len(line.split()) > 1]  # one in exec has none
    own = ("ps -eo", "cat", "bash --norc")  # the runner in bash has a cat, which begins as itself
    return [args for pid, args in lines if pid != "1" and not args.startswith(own)]


async def test_a_command_gives_its_output_and_exit_code(sandbox: Sandbox) -> None:
    result = await sandbox.exec("pwd; echo err >&2; exit 3", timeout_s=20)
    assert (result.output, result.exit_code, result.total_bytes) == (b"/testbed\nerr\n", 3, 13)
    assert not result.timed_out and not result.truncated and 0 < result.seconds < 20


async def test_every_command_has_a_fresh_shell(sandbox: Sandbox) -> None:
    await sandbox.exec("cd /tmp; export MARK=1; alias x=y", timeout_s=20)
    assert (await sandbox.exec("pwd; echo [$MARK]", timeout_s=20)).output == b"/testbed\n[]\n"
    assert (await sandbox.exec("pwd", timeout_s=20, cwd="/usr")).output == b"/usr\n"


@pytest.mark.parametrize(
    ("command", "exit_code", "part"),
    [
        ("if then (", 2, b"syntax error"),
        ("no_such_command_at_all", 127, b"not found"),
        ("kill -9 $$", 137, b""),
        ("echo a\0b", 126, b"null byte"),
        (": " + "x" * 200_000, 126, b"Argument list too long"),
        ("cat; echo end", 0, b"end"),
        ("exec >&- 2>&-; sleep 0.2; exit 7", 7, b""),
    ],
    ids=["syntax", "unknown", "killed", "nul", "too-long", "reads-stdin", "closes-its-output"],
)
async def test_a_failing_command_is_a_result(sandbox: Sandbox, command: str, exit_code: int, part: bytes) -> None:
    result = await sandbox.exec(command, timeout_s=20)
    assert result.exit_code == exit_code
    assert part in result.output


async def test_a_missing_working_directory_is_a_result(sandbox: Sandbox) -> None:
    result = await sandbox.exec("true", timeout_s=20, cwd="/nowhere")
    assert result.exit_code != 0 and b"/nowhere" in result.output


@pytest.mark.parametrize(
    "command",
    [
        "trap '' TERM; while :; do sleep 1000; done",
        "(setsid sh -c 'trap \"\" TERM HUP; sleep 1001 & sleep 1002' &) ; sleep 1003",
        "b() { b | b & }; b; sleep 1004",
    ],
    ids=["ignores-TERM", "double-forked", "fork-bomb"],
)
async def test_at_the_deadline_every_descendant_dies(sandbox: Sandbox, command: str) -> None:
    started = time.monotonic()
    result = await sandbox.exec(command, timeout_s=0.7)
    assert (result.exit_code, result.timed_out) == (124, True)
    assert time.monotonic() - started < 10
    assert await processes(sandbox) == []


async def test_what_a_finished_command_leaves_running_dies_too(sandbox: Sandbox) -> None:
    started = time.monotonic()
    result = await sandbox.exec("setsid sleep 1000 & (setsid yes >/dev/null &) ; yes & echo started", timeout_s=20)
    assert result.exit_code == 0 and not result.timed_out and b"started" in result.output
    assert time.monotonic() - started < 10
    assert await processes(sandbox) == []


async def test_output_keeps_head_and_tail_and_counts_all(sandbox: Sandbox) -> None:
    command = "echo first; head -c 40000000 /dev/zero | tr '\\0' a; echo last"
    result = await sandbox.exec(command, timeout_s=60, max_output_bytes=1000)
    assert result.truncated and result.total_bytes == 40_000_011
    assert result.output.startswith(b"first\n") and result.output.endswith(b"last\n")
    assert b"39999011 bytes left out" in result.output and len(result.output) < 1100


async def test_output_just_below_the_cap_is_whole(sandbox: Sandbox) -> None:
    result = await sandbox.exec("printf 0123456789", timeout_s=20, max_output_bytes=10)
    assert result.output == b"0123456789" and not result.truncated


async def test_output_without_end_is_ended(sandbox: Sandbox) -> None:
    result = await sandbox.exec("yes", timeout_s=120)
    assert (result.exit_code, result.timed_out, result.truncated) == (153, False, True)


async def test_binary_output_arrives_as_it_is(sandbox: Sandbox) -> None:
    data = bytes(range(256)) * 300
    await sandbox.put("/tmp/data", data)
    assert (await sandbox.exec("cat /tmp/data", timeout_s=20)).output == data


async def test_there_is_no_network_but_localhost_works(sandbox: Sandbox) -> None:
    assert "unreachable" in (await sandbox.exec(": >/dev/tcp/192.0.2.1/80", timeout_s=20)).text
    assert "refused" in (await sandbox.exec(": >/dev/tcp/localhost/9", timeout_s=20)).text


async def test_files_go_in_and_come_out_whole(sandbox: Sandbox) -> None:
    data = bytes(range(256)) * 20_000
    await sandbox.put("/tmp/new/folder/ü file", data, mode=0o750)
    assert await sandbox.get("/tmp/new/folder/ü file") == data
    assert (await sandbox.exec("stat -c %a /tmp/new/folder/*", timeout_s=20)).output == b"750\n"
    await sandbox.put("/tmp/new/folder/ü file", b"")
    assert await sandbox.get("/tmp/new/folder/ü file") == b""
    assert b"PPid" in await sandbox.get("/proc/self/status")  # says size 0


async def test_writing_keeps_mode_and_link_of_an_existing_file(sandbox: Sandbox) -> None:
    await sandbox.exec("ln -s tool.sh link.sh", timeout_s=20)
    await sandbox.put("/testbed/link.sh", b"#!/bin/sh\necho changed\n")
    result = await sandbox.exec("./tool.sh; test -L link.sh && echo link", timeout_s=20)
    assert result.output == b"changed\nlink\n"


async def test_bad_paths_are_the_callers_errors(sandbox: Sandbox) -> None:
    await sandbox.exec("mkfifo /tmp/fifo; mkdir /tmp/dir; echo 12345 >/tmp/five", timeout_s=20)
    for path in ("/nowhere", "/tmp/dir", "/tmp/fifo", "/tmp/five/below", "/dev/null"):
        with pytest.raises(FileMissingError):
            await sandbox.get(path)
    with pytest.raises(OSError, match="larger than 5 bytes"):
        await sandbox.get("/tmp/five", max_bytes=5)
    assert await sandbox.get("/tmp/five", max_bytes=6) == b"12345\n"
    for path in ("/tmp/dir", "/tmp/fifo", "/tmp/five/below", "/proc/nothing", "relative", "/tmp/nul\0"):
        with pytest.raises(OSError):
            await sandbox.put(path, b"x")
    assert (await sandbox.exec("echo alive", timeout_s=20)).output == b"alive\n"


async def test_signals_from_inside_do_not_reach_the_runner(sandbox: Sandbox) -> None:
    await sandbox.exec("for s in INT TERM HUP QUIT KILL STOP; do kill -$s 1; done; kill -9 -1", timeout_s=20)
    assert (await sandbox.exec("echo alive", timeout_s=20)).output == b"alive\n"


async def test_a_cancelled_command_dies_and_the_sandbox_stays_usable(sandbox: Sandbox) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await sandbox.exec("sleep 1000", timeout_s=1000)
    started = time.monotonic()
    assert await processes(sandbox) == []
    assert time.monotonic() - started < 10


async def test_a_cancelled_wait_for_its_turn_stops_nobody_else(sandbox: Sandbox) -> None:
    first = asyncio.create_task(sandbox.exec("sleep 1; echo first", timeout_s=20))
    await asyncio.sleep(0.2)
    second = asyncio.create_task(sandbox.exec("echo second > /tmp/second", timeout_s=20))
    await asyncio.sleep(0.2)
    second.cancel()
    assert (await first).output == b"first\n"
    with pytest.raises(FileMissingError):
        await sandbox.get("/tmp/second")


async def test_concurrent_requests_get_their_own_answers(sandbox: Sandbox) -> None:
    results = await asyncio.gather(*(sandbox.exec(f"echo {i}", timeout_s=60) for i in range(20)))
    assert [int(result.output) for result in results] == list(range(20))


async def test_a_killed_sandbox_is_an_infrastructure_failure(
    protocol_backend: ProtocolBackend, sandbox: Sandbox
) -> None:
    running = asyncio.create_task(sandbox.exec("echo partial; sleep 1000", timeout_s=1000))
    await asyncio.sleep(0.5)
    protocol_backend.kill(sandbox)
    for request in (running, sandbox.exec("echo", timeout_s=5), sandbox.get("/etc/passwd"), sandbox.diff()):
        with pytest.raises(SandboxError, match=sandbox.id):
            await request
    await sandbox.close()
    await sandbox.close()


async def test_a_persistent_command_starts_where_the_last_one_left(sandbox: Sandbox) -> None:
    async def run(command: str, timeout_s: float = 20) -> bytes:
        return (await sandbox.exec(command, timeout_s=timeout_s, persistent=True)).output

    await run("cd pkg; export MARK='a b'; plain=1; alias hi='echo hello'; f() { echo \"f $1\"; }; readonly fixed=2")
    assert await run('pwd; echo "$MARK $plain $fixed"; hi; f x; env | grep -c ^MARK') == (
        b"/testbed/pkg\na b 1 2\nhello\nf x\n1\n"
    )
    assert (await sandbox.exec("pwd; echo [$MARK]", timeout_s=20)).output == b"/testbed\n[]\n"
    await run("cd /tmp; MARK=lost; sleep 100", timeout_s=0.5)
    assert await run('pwd; echo "$MARK"') == b"/testbed/pkg\na b\n"
    result = await sandbox.exec("cd /usr; (exit 3); exit 7", timeout_s=20, persistent=True)
    assert result.exit_code == 7 and await run("pwd") == b"/usr\n"
    assert b"unexpected" in await run("if then") and await run("echo 'it'\"'\"'s' \"$MARK\"") == b"it's a b\n"


async def test_a_command_gets_its_stdin_and_writes_its_report(sandbox: Sandbox) -> None:
    data = bytes(range(256)) * 200
    result = await sandbox.exec("cat >&3; echo said", timeout_s=20, stdin=data, max_report_bytes=100_000)
    assert (result.report, result.output) == (data, b"said\n")
    assert (await sandbox.exec("cat; echo x >&3", timeout_s=20)).output.startswith(b"bash: line 1: 3: Bad file")
    big = "head -c 3000000 /dev/zero >&3"
    assert len((await sandbox.exec(big, timeout_s=20, max_report_bytes=3_000_000)).report) == 3_000_000
    with pytest.raises(ValueError, match="at most 60000"):
        await sandbox.exec("cat", timeout_s=20, stdin=b"x" * 60_001)
    longer = await sandbox.exec("echo 0123456789abcdef >&3", timeout_s=20, max_report_bytes=10)
    assert longer.report == b"0123456789a"  # one byte above the cap tells that there was more


async def test_nobody_in_the_sandbox_can_reach_into_the_runner(
    protocol_backend: ProtocolBackend, sandbox: Sandbox
) -> None:
    assert sandbox.protected == protocol_backend.protected
    if not protocol_backend.protected:
        return
    for attempt in ("cat /proc/1/environ", "echo x >/proc/1/fd/1", ": </proc/1/mem", "cat </proc/1/fd/0"):
        result = await sandbox.exec(attempt, timeout_s=20)
        assert result.exit_code != 0 and b"Permission denied" in result.output, attempt
    attach = "import ctypes; c = ctypes.CDLL(None, use_errno=True); print(c.ptrace(16, 1, 0, 0), ctypes.get_errno())"
    assert (await sandbox.exec(f'python3 -c "{attach}"', timeout_s=20)).output == b"-1 1\n"
    assert (await sandbox.exec("cat /proc/self/environ | wc -c", timeout_s=20)).output != b"0\n"


async def test_a_closed_sandbox_answers_no_more(sandbox: Sandbox) -> None:
    await sandbox.close()
    with pytest.raises(SandboxError):
        await sandbox.exec("true", timeout_s=5)
    await sandbox.close()


async def test_sandboxes_of_one_task_are_strangers_to_each_other(
    protocol_backend: ProtocolBackend, sandbox: Sandbox
) -> None:
    await sandbox.put("/testbed/mine.py", b"")
    await sandbox.put("/tmp/mine", b"")
    other = await protocol_backend.provider.acquire(protocol_backend.task)
    assert other.id != sandbox.id
    for path in ("/testbed/mine.py", "/tmp/mine"):
        with pytest.raises(FileMissingError):
            await other.get(path)


async def test_the_agent_finds_no_hidden_tests_and_one_commit(sandbox: Sandbox) -> None:
    look = "ls -d /r2e_tests r2e_tests run_tests.sh pkg/__pycache__ 2>/dev/null | wc -l"
    assert (await sandbox.exec(look, timeout_s=20)).output == b"0\n"
    assert (await sandbox.exec("git rev-list --all | wc -l", timeout_s=20)).output == b"1\n"


async def test_the_change_comes_out_whole_and_goes_into_a_fresh_sandbox(
    protocol_backend: ProtocolBackend, sandbox: Sandbox
) -> None:
    assert await sandbox.diff() == b""
    await sandbox.put("/testbed/new/bytes.bin", bytes(range(256)) * 5_000)
    await sandbox.put("/testbed/crlf.txt", b"one\r\nTWO\r\n")
    await sandbox.exec("mv plain.py moved.py; ln -s moved.py link; chmod -x tool.sh; rm binary.dat", timeout_s=20)
    fresh = await protocol_backend.provider.acquire(protocol_backend.task)
    await fresh.put("/tmp/agent.patch", await sandbox.diff())
    applied = await fresh.exec("git apply --whitespace=nowarn /tmp/agent.patch", timeout_s=60)
    assert applied.exit_code == 0, applied.text
    look = (
        "find . -path ./.git -prune -o -printf '%p %y %m %l\\n' | sort; "
        "find . -path ./.git -prune -o -type f -print0 | sort -z | xargs -0 sha256sum"
    )
    assert (await fresh.exec(look, timeout_s=60)).output == (await sandbox.exec(look, timeout_s=60)).output
