"""A broker in the test's own event loop, or as the process that users start; and a backend of memory for its wire."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import yaml
from structlog.testing import CapturingLogger

from agent_r3.config import SandboxConfig
from agent_r3.envs.backend import Backend
from agent_r3.envs.broker import listen, serving
from agent_r3.envs.broker_quotas import Quotas, Usage
from agent_r3.envs.broker_wire import parse_address, read_token
from agent_r3.envs.sandbox import ExecResult, Sandbox
from agent_r3.types import Grade, Task


@asynccontextmanager
async def broker_at(
    config: SandboxConfig,
    backend: Backend,
    tasks: Sequence[Task],
    *,
    quotas: Quotas | None = None,
    heartbeat_s: float = 30.0,
    usage: Usage | None = None,
) -> AsyncIterator[CapturingLogger]:
    """Serve `backend` at the address and with the token of `config`. Gives the audit log."""
    audit = CapturingLogger()
    token = read_token(config.broker_token_file)
    listener = listen(parse_address(str(config.broker), "sandbox.broker"), token)
    async with serving(
        backend, tasks, listener, token, quotas=quotas or Quotas(), audit=audit, heartbeat_s=heartbeat_s, usage=usage
    ):
        yield audit


class MemorySandbox(Sandbox):
    """Every command prints its own text; `hang` hangs and `fail` raises `failure`. Remembers what became of it."""

    protected = True

    def __init__(self, name: str, task: Task) -> None:
        self.id, self.task = name, task
        self.files: dict[str, bytes] = {}
        self.failure: Exception | None = None
        self.hanging = self.cancelled = self.closed = False

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
        if command == "fail" and self.failure is not None:
            raise self.failure
        if command == "hang":
            self.hanging = True
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled = True
        output = command.encode(errors="surrogateescape")
        return ExecResult(output, len(output), 0, False, False, timeout_s, report=stdin)

    async def put(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        self.files[path] = data

    async def get(self, path: str, *, max_bytes: int = 16 << 20) -> bytes:
        return self.files[path]

    async def diff(self) -> bytes:
        return b"a change"

    async def close(self) -> None:
        self.closed = True


class MemoryProvider:
    """Sandboxes of memory, all kept in `sandboxes`; `plans` are the plans it was told."""

    def __init__(self) -> None:
        self.sandboxes: list[MemorySandbox] = []
        self.plans: list[list[str]] = []
        self.start = asyncio.Event()  # nothing is handed out before
        self.start.set()

    async def prefetch(self, tasks: list[Task]) -> None:
        self.plans.append([task.id for task in tasks])

    async def acquire(self, task: Task) -> MemorySandbox:
        await self.start.wait()
        sandbox = MemorySandbox(f"memory-{len(self.sandboxes)}", task)
        self.sandboxes.append(sandbox)
        return sandbox

    async def acquire_for_grading(self, task: Task) -> MemorySandbox:
        raise AssertionError("no client may come here")

    async def close(self) -> None:
        pass


def memory_grade(task: Task, patch: bytes) -> Grade:
    statuses, left_out = {task.id: "PASSED"}, ("tests/\udcfe.py", "tox.ini")
    return Grade(reward=0.5, statuses=statuses, reason=f"{len(patch)} bytes", seconds=1.5, left_out=left_out)


class MemoryGrader:
    """Gives every patch a grade that shows what came; waits for `go` first."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.go.set()
        self.asked = self.cancelled = 0

    async def grade(self, task: Task, patch: bytes) -> Grade:
        self.asked += 1
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return memory_grade(task, patch)


class BrokerProcess:
    """`agent-r3 broker` at a unix socket, as users start it."""

    def __init__(self, process: "subprocess.Popen[bytes]", audit_log: Path) -> None:
        self.process = process
        self._audit_log = audit_log

    def audit(self) -> list[dict[str, Any]]:
        """What the audit log holds by now."""
        return [json.loads(line) for line in self._audit_log.read_text().splitlines()]

    @property
    def address(self) -> str:
        return str(self.audit()[0]["address"])


@contextmanager
def broker_process(folder: Path, sections: Mapping[str, Any], *options: str) -> Iterator[BrokerProcess]:
    """Start the command with a config of `sections` and wait until it listens; stop it at the end."""
    config, log = folder / "broker.yaml", folder / "audit.jsonl"
    config.write_text(yaml.safe_dump({"model": {"path": "tiny"}, **sections}))
    command = [sys.executable, "-m", "agent_r3.cli", "broker", str(config), "--audit-log", str(log)]
    with subprocess.Popen([*command, "--listen", f"unix://{folder}/broker.sock", *options]) as process:
        try:
            deadline = time.monotonic() + 60
            while not log.exists() or not log.read_text().endswith("\n"):
                assert process.poll() is None and time.monotonic() < deadline, "the broker did not start"
                time.sleep(0.02)
            yield BrokerProcess(process, log)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
