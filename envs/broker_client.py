"""The client of `agent-r3 broker`: the sandbox protocol and grading, over a unix socket or HTTP."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType
from typing import Self, TypeVar

import httpx
import structlog
from tenacity import AsyncRetrying, retry_if_exception, stop_after_delay, wait_exponential_jitter

from agent_r3.config import SandboxConfig
from agent_r3.envs.broker_connection import LeaseConnection, RefusedError, authorization, refusal
from agent_r3.envs.broker_wire import (
    HEARTBEAT_S,
    LARGEST_BODY,
    Address,
    Exec,
    Get,
    OfSandbox,
    OfTask,
    OfTasks,
    Put,
    frame,
    grade_from,
    parse_address,
    read_token,
    result_from,
    unframe,
    unknown_task,
)
from agent_r3.envs.sandbox import ExecResult, Grading, Sandbox, SandboxProvider
from agent_r3.errors import BrokerError, ContractError, DataError, QuotaError, UserError
from agent_r3.types import Grade, Task

log = structlog.get_logger(__name__)

T = TypeVar("T")

_CHECK_S = 10.0
_PATIENCE_S = 30.0  # a broker that is being started again answers by then
_LONGEST_WAIT_S = 60.0
_MEND = "start one with `agent-r3 broker CONFIG`, or leave sandbox.broker out to use this machine's own Docker"


def check_broker(config: SandboxConfig, tasks: Iterable[Task]) -> None:
    """Raises UserError, in one line, unless the config's broker answers, takes the token and has the tasks. Blocks."""
    address, token = _of(config)
    transport = httpx.HTTPTransport(uds=address.path)
    asked = frame(OfTasks(tasks=tuple(task.id for task in tasks)).model_dump())
    with httpx.Client(base_url=address.base_url, transport=transport, timeout=_CHECK_S) as http:
        try:
            answer = http.post("/v1/health", headers=authorization(token), content=asked)
        except httpx.HTTPError as exc:
            raise UserError(f"sandbox.broker: no broker answers at {address} ({exc}); {_MEND}") from exc
    try:
        answer.raise_for_status()
        unknown = unframe(answer.content)[0]["unknown"]
    except (httpx.HTTPError, ValueError, KeyError) as exc:
        raise UserError(f"sandbox.broker: {refusal(address, answer.status_code)}") from exc
    if unknown:
        raise DataError(f"sandbox.broker: {unknown_task(unknown[0])}")


class BrokerClient(SandboxProvider, Grading):
    """Sandboxes and grades of a broker. Usable as an async context manager.

    All that it has belongs to its lease. When that is lost, calls on what it had raise BrokerError, and the next
    `prefetch`, `acquire` or `grade` takes a new one, waiting up to `patience_s` for the broker to come back.
    """

    def __init__(
        self,
        address: Address,
        token: str | None,
        *,
        name: str,
        grade_retries: int = 0,
        patience_s: float = _PATIENCE_S,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self._address, self._token, self._name = address, token, name
        self._grade_retries = grade_retries
        self._patience_s = patience_s
        self._heartbeat_s = heartbeat_s
        self._lease: LeaseConnection | None = None
        self._leasing = asyncio.Lock()
        self._closed = False

    @classmethod
    def of(cls, config: SandboxConfig, *, name: str, grade_retries: int) -> Self:
        """The client that a config means. Raises ConfigError."""
        return cls(*_of(config), name=name, grade_retries=grade_retries)

    async def __aenter__(self) -> Self:
        """Raises UserError when no broker has answered after `patience_s`, or it refuses the token."""
        try:
            await self._leased()
        except BrokerError as exc:
            raise UserError(f"sandbox.broker: {exc}; {_MEND}") from exc
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def prefetch(self, tasks: list[Task]) -> None:
        """See the protocol. Raises DataError for a task that the broker does not serve."""
        lease = await self._leased()
        await lease.call("prefetch", OfTasks(tasks=tuple(task.id for task in tasks)))

    async def acquire(self, task: Task) -> Sandbox:
        """See the protocol. Waits while this client has used up its starts. Raises DataError, SandboxError."""
        return await _waiting_for_quota(lambda: self._acquire_shielded(task), f"a sandbox for {task.id}")

    async def _acquire_shielded(self, task: Task) -> Sandbox:
        opening = asyncio.create_task(self._acquire(task))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_unwanted)
            raise

    async def _acquire(self, task: Task) -> "_RemoteSandbox":
        lease = await self._leased()
        answer, _ = await lease.call("acquire", OfTask(task=task.id))
        return _RemoteSandbox(lease, answer["sandbox"], protected=answer["protected"])

    async def acquire_for_grading(self, task: Task) -> Sandbox:
        """Always raises ContractError: the hidden tests stay with the broker, which grades."""
        raise ContractError(f"task {task.id}: a broker gives no sandbox for grading; ask it for the grade")

    async def grade(self, task: Task, patch: bytes) -> Grade:
        """See the protocol. A grading that was lost with its broker is asked for again; a quota is waited for."""
        for _ in range(self._grade_retries):
            try:
                return await self._grade(task, patch)
            except BrokerError as exc:
                log.warning("grading is asked for again", task=task.id, error=str(exc))
        return await self._grade(task, patch)

    async def _grade(self, task: Task, patch: bytes) -> Grade:
        async def ask() -> Grade:
            lease = await self._leased()
            return grade_from(*await lease.call("grade", OfTask(task=task.id), patch))

        return await _waiting_for_quota(ask, f"a grading of {task.id}")

    async def close(self) -> None:
        """Give the lease back; the broker closes all that it held before it lets go. Idempotent."""
        self._closed = True
        if self._lease is not None:
            await self._lease.close()

    async def _leased(self) -> LeaseConnection:
        """The lease, a new one where it was lost. Raises BrokerError."""
        async with self._leasing:
            if self._closed:
                raise BrokerError("this client of the broker is closed")
            if self._lease is not None and not self._lease.lost:
                return self._lease
            again = AsyncRetrying(
                retry=retry_if_exception(_may_pass),
                stop=stop_after_delay(self._patience_s),
                wait=wait_exponential_jitter(0.1, 2.0, jitter=0.1),
                reraise=True,
            )
            lease: LeaseConnection = await again(self._take_lease)
            self._lease = lease
        if self._closed:
            await lease.close()
        return lease

    async def _take_lease(self) -> LeaseConnection:
        return await LeaseConnection.take(self._address, self._token, self._name, self._heartbeat_s)


class _RemoteSandbox(Sandbox):
    """A sandbox of the broker. It belongs to the lease under which it was acquired."""

    def __init__(self, lease: LeaseConnection, name: str, *, protected: bool) -> None:
        self.id = name
        self._lease = lease
        self._protected = protected
        self._closing: asyncio.Task[None] | None = None

    @property
    def protected(self) -> bool:
        return self._protected

    async def exec(
        self,
        command: str,
        *,
        timeout_s: float,
        cwd: str | None = None,
        max_output_bytes: int = 1 << 20,
        persistent: bool = False,
        stdin: bytes = b"",
        max_report_bytes: int = 0,
    ) -> ExecResult:
        """See the protocol."""
        message = Exec(
            sandbox=self.id,
            command=command,
            timeout_s=timeout_s,
            cwd=cwd,
            max_output_bytes=max_output_bytes,
            persistent=persistent,
            max_report_bytes=max_report_bytes,
        )
        return result_from(*await self._lease.call("exec", message, stdin))

    async def put(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """See the protocol."""
        if len(data) > LARGEST_BODY - (1 << 20):
            raise OSError(27, f"{len(data)} bytes are more than the broker takes", path)
        await self._lease.call("put", Put(sandbox=self.id, path=path, mode=mode), data)

    async def get(self, path: str, *, max_bytes: int = 16 << 20) -> bytes:
        """See the protocol."""
        return (await self._lease.call("get", Get(sandbox=self.id, path=path, max_bytes=max_bytes)))[1]

    async def diff(self) -> bytes:
        """See the protocol."""
        return (await self._lease.call("diff", OfSandbox(sandbox=self.id)))[1]

    async def close(self) -> None:
        """See the protocol. A lost lease has closed it already."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            await self._lease.call("close", OfSandbox(sandbox=self.id))
        except BrokerError as exc:
            log.warning("the broker closes a sandbox with its lease", sandbox=self.id, error=str(exc))


async def _waiting_for_quota(ask: Callable[[], Awaitable[T]], what: str) -> T:
    """What `ask` gives, asked again for as long as the broker says that this client has its share."""
    told = False
    while True:
        try:
            return await ask()
        except QuotaError as exc:
            if not told:
                log.warning("waiting for the broker's quota", waiting_for=what, reason=str(exc))
                told = True
            # Spread, so that those who wait together do not ask together; never longer than a quota's minute.
            await asyncio.sleep(min(exc.retry_after_s, _LONGEST_WAIT_S) * random.uniform(1.0, 1.2))


def _may_pass(exc: BaseException) -> bool:
    return isinstance(exc, BrokerError) and not isinstance(exc, RefusedError)


def _close_unwanted(opening: asyncio.Task[_RemoteSandbox]) -> None:
    """Close a sandbox that came after its caller was cancelled."""
    if not opening.cancelled() and opening.exception() is None:
        sandbox = opening.result()
        sandbox._closing = asyncio.create_task(sandbox._close())


def _of(config: SandboxConfig) -> tuple[Address, str | None]:
    if config.broker is None:
        raise ContractError("sandbox.broker is not set")
    return parse_address(config.broker, "sandbox.broker"), read_token(config.broker_token_file)
