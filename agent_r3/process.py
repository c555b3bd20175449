"""Child processes that never outlive us: own process group, killed by the kernel when the parent dies."""

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path

from agent_r3.config import ENVIRONMENT_PREFIX

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def _die_with(parent: int) -> Callable[[], None]:
    def in_child() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the line above
            os._exit(1)

    return in_child


def spawn(args: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start `args` in a process group of its own, output appended to `log`; it gets SIGKILL when we die.

    It sees no AGENT_R3__ variables: the config that it is given has them applied, below our command line.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        return subprocess.Popen(
            args,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**inherited, **(env or {})},
            start_new_session=True,
            preexec_fn=_die_with(os.getpid()),
        )


def signal_group(process: subprocess.Popen[bytes], signum: int) -> None:
    """Signal the child's whole process group; quiet when it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signum)


async def stop(process: subprocess.Popen[bytes], *, grace_s: float) -> int:
    """SIGTERM, wait up to `grace_s`, then SIGKILL the group. Idempotent; returns the exit code."""
    if process.poll() is None:
        process.terminate()
    try:
        async with asyncio.timeout(grace_s):
            while process.poll() is None:
                await asyncio.sleep(0.05)
    except TimeoutError:
        pass
    finally:
        signal_group(process, signal.SIGKILL)
    return process.wait()


def last_lines(log: Path, count: int = 8) -> str:
    """The log's last non-empty lines, for a message about a child that failed."""
    if not log.is_file():
        return "(no log)"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return "\n".join(lines[-count:])


async def until_signalled(
    work: Coroutine[object, object, None], *, drain: Callable[[], bool] = lambda: False, grace_s: float = 0.0
) -> bool:
    """Run `work` to its end, or cancel it at the first SIGTERM or SIGINT. True when it was a signal.

    The first signal calls `drain`; where that says that the work will now end by itself, it is cancelled after
    `grace_s` only, or at the second signal.
    """
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)
    signalled = False
    timer: asyncio.TimerHandle | None = None

    def on_signal() -> None:
        nonlocal signalled, timer
        if not signalled and grace_s > 0 and drain():
            timer = loop.call_later(grace_s, task.cancel)
        else:
            if timer is not None:
                timer.cancel()
            task.cancel()
        signalled = True

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, on_signal)
    try:
        await task
    except asyncio.CancelledError:
        if not signalled:
            raise
    finally:
        if timer is not None:
            timer.cancel()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(signum)
    return signalled
