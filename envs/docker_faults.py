"""What the Docker engine's failures mean to us, and which of them may pass."""

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from docker.errors import APIError, DockerException
from requests.exceptions import RequestException

from agent_r3.errors import DaemonError, DiskFullError, SandboxDeadError, SandboxError

FAULTS = (DockerException, RequestException, OSError)  # what the SDK raises when the engine is gone or refuses

_TOO_MANY = 429

P = ParamSpec("P")
T = TypeVar("T")


@contextlib.contextmanager
def engine_boundary(what: str) -> Iterator[None]:
    """Name a failure of the engine: DiskFullError where the disk is the cause, else DaemonError."""
    try:
        yield
    except FAULTS as exc:
        raise engine_error(what, exc) from exc


def engine_error(what: str, exc: BaseException) -> SandboxError:
    text = " ".join(str(exc).split())[:500]
    full = "no space left on device" in text.lower()
    return (DiskFullError if full else DaemonError)(f"{what}: {type(exc).__name__}: {text}")


def may_pass(error: BaseException) -> bool:
    """Whether a start that failed with `error` is worth another try: the engine is away or overloaded.

    So is a container that died before its runner answered, as it does with its engine.
    """
    match error:
        case DiskFullError():
            return False
        case SandboxDeadError():
            return True
        case DaemonError(__cause__=APIError() as cause):
            return cause.status_code is None or cause.status_code == _TOO_MANY or cause.status_code >= 500
        case DaemonError():
            return True
    return False


def outcome_unknown(error: BaseException) -> bool:
    """Whether the engine may still do what it was asked: the request reached it, and no answer came."""
    if not isinstance(error, DaemonError) or isinstance(error.__cause__, APIError):
        return False
    return not any(refused in str(error) for refused in ("ConnectionRefusedError", "FileNotFoundError"))


class Threads:
    """The threads in which the SDK's blocking calls run."""

    def __init__(self, most: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(most, thread_name_prefix=name)

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        bound = functools.partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._pool, bound)

    def close(self) -> None:
        self._pool.shutdown(wait=False)


async def in_detached_thread(function: Callable[[str], None], argument: str) -> None:
    """Call it in a thread that a cancelled caller leaves behind, and for which the end of the process does not wait."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def work() -> None:
        error: BaseException | None = None
        try:
            function(argument)
        except BaseException as exc:  # noqa: BLE001  (the caller gets it)
            error = exc
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, error)

    threading.Thread(target=work, daemon=True).start()
    await done
