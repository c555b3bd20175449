"""The broker's work without its wire: leases, what each may do with its own sandboxes, and the audit log.

A lease stands for one client process. Its sandboxes, its plan of coming tasks and its running operations end with it.
"""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple, get_args

import structlog
from structlog.typing import WrappedLogger

from agent_r3.envs.backend import Backend
from agent_r3.envs.broker_audit import Reason, Refused
from agent_r3.envs.broker_quotas import Quotas, Usage
from agent_r3.envs.broker_wire import (
    CROSSING,
    FAILED,
    LEASE_ENDED,
    Exec,
    Get,
    Message,
    OfSandbox,
    OfTask,
    OfTasks,
    Put,
    error_header,
    frame,
    grade_frame,
    result_frame,
    unknown_task,
)
from agent_r3.envs.sandbox import Sandbox
from agent_r3.errors import BrokerError, DataError, SandboxError
from agent_r3.telemetry import Telemetry
from agent_r3.types import Outcome, Task

log = structlog.get_logger(__name__)

_NAME = 200  # characters of what a client calls itself or its things in the audit log
_REMEMBERED = 1024  # ended leases whose client is known when it asks under one again


@dataclass(eq=False, slots=True)
class Lease:
    """What one client has here. Only who knows `id` can name any of it."""

    client: str
    id: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    sandboxes: dict[str, Sandbox] = field(default_factory=dict)
    task_ids: dict[str, str] = field(default_factory=dict)  # of each sandbox
    acquiring: int = 0
    plan: list[Task] = field(default_factory=list)
    work: set[asyncio.Task[bytes]] = field(default_factory=set)
    ended: bool = False


class Answer(NamedTuple):
    status: int  # of HTTP
    frame: bytes


class _Operation(NamedTuple):
    message: type[Message]
    run: Callable[[Lease, Any, bytes], Awaitable[bytes]]


class Leases:
    """The allow-listed operations over a backend. `audit` takes one event an operation, without contents."""

    def __init__(
        self,
        backend: Backend,
        tasks: Iterable[Task],
        *,
        quotas: Quotas,
        audit: WrappedLogger,
        usage: Usage | None = None,
    ) -> None:
        """`usage`: of the quotas, where it is not counted by this machine's clock."""
        self._backend = backend
        self._tasks = {task.id: task for task in tasks}
        self._quotas = quotas
        self._usage = usage or Usage(quotas)
        self._audit = audit
        self.refusals: Counter[Reason] = Counter()
        self.starts = 0
        self.grades: Counter[str] = Counter()  # by outcome
        self._leases: dict[str, Lease] = {}
        self._ended: dict[str, str] = {}  # clients of the last leases that have ended, oldest first
        self._closed = False
        self._operations = {
            "prefetch": _Operation(OfTasks, self._prefetch),
            "acquire": _Operation(OfTask, self._acquire),
            "exec": _Operation(Exec, self._exec),
            "put": _Operation(Put, self._put),
            "get": _Operation(Get, self._get),
            "diff": _Operation(OfSandbox, self._diff),
            "close": _Operation(OfSandbox, self._close),
            "grade": _Operation(OfTask, self._grade),
        }

    @property
    def operations(self) -> Collection[str]:
        return self._operations

    def health(self, asked: OfTasks) -> dict[str, Any]:
        """What is open here, and which of the tasks asked for are not served."""
        return {
            "tasks": len(self._tasks),
            "leases": len(self._leases),
            "sandboxes": sum(len(lease.sandboxes) for lease in self._leases.values()),
            "unknown": [task_id for task_id in asked.tasks if task_id not in self._tasks],
        }

    def show(self, telemetry: Telemetry) -> None:
        """Let the broker's metrics be read here."""

        def sandboxes() -> int:
            return sum(len(lease.sandboxes) for lease in list(self._leases.values()))

        outcomes, reasons = get_args(Outcome), list(Reason)
        telemetry.read("agent_r3_broker_clients", lambda: {(): len(self._leases)})
        telemetry.read("agent_r3_sandboxes", lambda: {(): sandboxes()})
        telemetry.read("agent_r3_sandbox_starts_total", lambda: {(): self.starts})
        telemetry.read("agent_r3_grades_total", lambda: {(outcome,): self.grades[outcome] for outcome in outcomes})
        telemetry.read(
            "agent_r3_broker_refusals_total", lambda: {(reason.value,): self.refusals[reason] for reason in reasons}
        )

    def open(self, client: str) -> Lease:
        if self._closed:
            self.refuse(Reason.CLOSING, client=client)
            raise BrokerError("the broker is closing")
        lease = Lease(client[:_NAME])
        self._leases[lease.id] = lease
        self._audit.info("lease", client=lease.client)
        return lease

    async def end(self, lease: Lease) -> None:
        """Stop a client's work and close its sandboxes. Idempotent; finishes even when cancelled."""
        if lease.ended:
            return
        lease.ended = True
        del self._leases[lease.id]
        self._ended[lease.id] = lease.client
        if len(self._ended) > _REMEMBERED:
            del self._ended[next(iter(self._ended))]
        self._audit.info("lease ended", client=lease.client, sandboxes=len(lease.sandboxes), running=len(lease.work))
        await _to_its_end(self._end(lease))

    async def _end(self, lease: Lease) -> None:
        for work in lease.work:
            work.cancel()
        await asyncio.gather(*lease.work, return_exceptions=True)
        await asyncio.gather(*(sandbox.close() for sandbox in lease.sandboxes.values()))
        lease.sandboxes.clear()
        if lease.plan and not self._closed:
            lease.plan = []
            try:
                await self._backend.provider.prefetch(self._plan())
            except (SandboxError, DataError) as exc:  # of the other clients' images, which they will hear of
                log.warning("the plan of a client that has gone is kept", client=lease.client, error=str(exc))

    async def close(self) -> None:
        """End every lease."""
        self._closed = True
        await asyncio.gather(*(self.end(lease) for lease in list(self._leases.values())))

    async def answer(self, lease_id: str, name: str, header: dict[str, Any], body: bytes) -> Answer:
        """Carry out one operation of a lease; cancelling this cancels the operation.

        Errors that the protocol knows are answers; any other is a bug, and is raised.
        """
        lease = self._leases.get(lease_id)
        if lease is None:
            self.refuse(Reason.LEASE, client=self.client_of(lease_id), operation=name)
            return _failed(BrokerError("this lease has ended, or there never was one"), LEASE_ENDED)
        started = time.monotonic()
        outcome, refused = "failed", None
        try:
            work = asyncio.create_task(self._run(lease, name, header, body))
            lease.work.add(work)
            work.add_done_callback(lease.work.discard)
            answer = Answer(200, await work)
            outcome = "ok"
        except asyncio.CancelledError:
            outcome = "cancelled"
            if not lease.ended:
                raise
            answer = _failed(BrokerError("the lease ended while this was running"), LEASE_ENDED)
        except Refused as exc:
            outcome, refused = type(exc.error).__name__, exc.reason
            answer = _failed(exc.error)
        except CROSSING as exc:
            outcome = type(exc).__name__
            answer = _failed(exc)
        finally:
            self._record(lease, name, header, time.monotonic() - started, outcome, refused)
        return answer

    def client_of(self, lease_id: str) -> str | None:
        """What the client calls itself whose lease this is, or was not long ago."""
        lease = self._leases.get(lease_id)
        return lease.client if lease is not None else self._ended.get(lease_id)

    def refuse(self, reason: Reason, *, client: str | None, **named: str | None) -> None:
        """Record a request that did not come as far as an operation; `client` as it calls itself."""
        self.refusals[reason] += 1
        shown = {key: value[:_NAME] for key, value in {"client": client, **named}.items() if value is not None}
        self._audit.info("refused", refused=reason.value, **shown)

    def _record(
        self, lease: Lease, name: str, header: dict[str, Any], seconds: float, outcome: str, refused: Reason | None
    ) -> None:
        sandbox = header.get("sandbox")
        named = {"task": lease.task_ids.get(str(sandbox), header.get("task")), "sandbox": sandbox}
        if name == "close":
            lease.task_ids.pop(str(sandbox), None)
        shown = {key: str(value)[:_NAME] for key, value in named.items() if value is not None}
        if refused is not None:
            self.refusals[refused] += 1
            shown["refused"] = refused.value
        self._audit.info(name, client=lease.client, **shown, seconds=round(seconds, 4), outcome=outcome)

    async def _run(self, lease: Lease, name: str, header: dict[str, Any], body: bytes) -> bytes:
        operation = self._operations[name]
        try:
            message = operation.message.read(header)
        except ValueError as exc:
            raise Refused(Reason.MALFORMED, exc) from exc
        return await operation.run(lease, message, body)

    def _task(self, task_id: str) -> Task:
        if task_id not in self._tasks:
            raise Refused(Reason.TASK, DataError(unknown_task(task_id)))
        return self._tasks[task_id]

    async def _prefetch(self, lease: Lease, message: OfTasks, body: bytes) -> bytes:
        lease_plan = [self._task(task_id) for task_id in message.tasks]
        plan = self._plan(lease, lease_plan)
        await self._backend.provider.prefetch(plan)
        lease.plan = lease_plan
        if self._plan() != plan:  # others have changed theirs while images were pulled
            await self._backend.provider.prefetch(self._plan())
        return frame({})

    def _plan(self, changing: Lease | None = None, changed: Sequence[Task] = ()) -> list[Task]:
        """The plans of all clients, taking turns: the next task of each, then the one after."""
        plans = [changed if lease is changing else lease.plan for lease in self._leases.values()]
        return [task for turn in zip_longest(*plans) for task in turn if task is not None]

    async def _acquire(self, lease: Lease, message: OfTask, body: bytes) -> bytes:
        task = self._task(message.task)
        if len(lease.sandboxes) + lease.acquiring >= self._quotas.sandboxes:
            raise Refused(
                Reason.SANDBOXES,
                BrokerError(
                    f"client {lease.client} has {self._quotas.sandboxes} sandboxes, as many as this broker gives to "
                    "one; raise its --max-sandboxes, or lower rollout.concurrency"
                ),
            )
        self._usage.start(lease.client)
        lease.acquiring += 1
        try:
            sandbox = await self._backend.provider.acquire(task)
        finally:
            lease.acquiring -= 1
        self.starts += 1
        lease.sandboxes[sandbox.id] = sandbox
        lease.task_ids[sandbox.id] = task.id
        if task in lease.plan:
            lease.plan.remove(task)
        return frame({"sandbox": sandbox.id, "protected": sandbox.protected})

    def _sandbox(self, lease: Lease, name: str) -> Sandbox:
        if name not in lease.sandboxes:
            raise Refused(Reason.SANDBOX, SandboxError(f"{name}: this client has no such sandbox, or has closed it"))
        return lease.sandboxes[name]

    async def _exec(self, lease: Lease, message: Exec, body: bytes) -> bytes:
        result = await self._sandbox(lease, message.sandbox).exec(
            message.command,
            timeout_s=message.timeout_s,
            cwd=message.cwd,
            max_output_bytes=message.max_output_bytes,
            persistent=message.persistent,
            stdin=body,
            max_report_bytes=message.max_report_bytes,
        )
        return result_frame(result)

    async def _put(self, lease: Lease, message: Put, body: bytes) -> bytes:
        await self._sandbox(lease, message.sandbox).put(message.path, body, mode=message.mode)
        return frame({})

    async def _get(self, lease: Lease, message: Get, body: bytes) -> bytes:
        data = await self._sandbox(lease, message.sandbox).get(message.path, max_bytes=message.max_bytes)
        return frame({}, data)

    async def _diff(self, lease: Lease, message: OfSandbox, body: bytes) -> bytes:
        return frame({}, await self._sandbox(lease, message.sandbox).diff())

    async def _close(self, lease: Lease, message: OfSandbox, body: bytes) -> bytes:
        sandbox = lease.sandboxes.pop(message.sandbox, None)
        if sandbox is not None:
            await _to_its_end(sandbox.close())
        return frame({})

    async def _grade(self, lease: Lease, message: OfTask, body: bytes) -> bytes:
        task = self._task(message.task)
        with self._usage.grading(lease.client):
            grade = await self._backend.grader.grade(task, body)
        self.grades[grade.outcome] += 1
        return grade_frame(grade)


def _failed(exc: Exception, status: int = FAILED) -> Answer:
    return Answer(status, frame(error_header(exc)))


async def _to_its_end(teardown: Awaitable[None]) -> None:
    """Wait for a teardown, which goes on when the wait is cancelled."""
    ending = asyncio.ensure_future(teardown)
    try:
        await asyncio.shield(ending)
    except asyncio.CancelledError:
        await ending
        raise
