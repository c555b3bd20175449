"""`agent-r3 broker`: sandboxes and grades for other processes, so that none of them needs Docker's socket.

Clients name tasks of the broker's own dataset, never images, and get no sandbox for grading: hidden tests and gold
patches stay here. Each client holds a lease, one web socket; when that breaks, all that the client had ends.
"""

import asyncio
import contextlib
import hmac
import os
import resource
import signal
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import WSCloseCode, web
from structlog.contextvars import bind_contextvars
from structlog.typing import WrappedLogger

from agent_r3.config import Config
from agent_r3.envs.backend import Backend, open_backend
from agent_r3.envs.broker_audit import AuditFile, Reason, audit_logger
from agent_r3.envs.broker_leases import Leases
from agent_r3.envs.broker_quotas import Quotas, Usage
from agent_r3.envs.broker_wire import HEARTBEAT_S, LARGEST_BODY, LEASE_HEADER, Address, OfTasks, frame, unframe
from agent_r3.envs.datasets import join_tasks, load_tasks
from agent_r3.errors import BrokerError, ConfigError, UserError
from agent_r3.process import until_signalled
from agent_r3.telemetry import Health, Telemetry, serve_telemetry, watched_loop
from agent_r3.types import Task

_KEEPALIVE_S = 300.0  # above the client's own, so that it never sends on a connection that is being closed here
_SHUTDOWN_S = 5.0

# Why a request that is answered with this HTTP status is refused.
_REASONS = {
    401: Reason.TOKEN,
    400: Reason.MALFORMED,
    413: Reason.TOO_LARGE,
    404: Reason.OPERATION,
    405: Reason.OPERATION,
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def run_broker(
    config: Config, address: Address, token: str | None, *, quotas: Quotas, audit_file: AuditFile
) -> None:
    """Serve until SIGTERM or SIGINT, then close everything; SIGHUP opens the audit log again. UserError at start."""
    audit = audit_logger(audit_file)
    tasks = load_tasks(config.tasks)
    if config.eval.tasks is not None:
        tasks = join_tasks(tasks, load_tasks(config.eval.tasks))
    sandbox = config.sandbox.model_copy(update={"broker": None})
    bind_contextvars(run=config.run.name, role="broker")
    telemetry, health = Telemetry("broker", config.run.name), Health()
    health.checks.append(lambda: audit_file.problem)
    listener = listen(address, token)
    _allow_open_files()

    async def serve() -> None:
        async with (
            open_backend(sandbox, config.grading, run=config.run.name, owner="broker") as backend,
            serving(backend, tasks, listener, token, quotas=quotas, audit=audit, problem=health) as leases,
            watched_loop() as moves,
        ):
            leases.show(telemetry)
            health.checks.append(moves)
            health.starting = None
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, audit_file.reopen)
            audit.info("listening", address=_bound(address, listener), tasks=len(tasks))
            await asyncio.Event().wait()

    try:
        with serve_telemetry(config.service, telemetry, health):
            await until_signalled(serve())
    finally:
        listener.close()
        if address.path:
            Path(address.path).unlink(missing_ok=True)
    audit.info("stopped")


@asynccontextmanager
async def serving(
    backend: Backend,
    tasks: Sequence[Task],
    listener: socket.socket,
    token: str | None,
    *,
    quotas: Quotas,
    audit: WrappedLogger,
    heartbeat_s: float = HEARTBEAT_S,
    usage: Usage | None = None,
    problem: Callable[[], str | None] = lambda: None,
) -> AsyncIterator[Leases]:
    """The broker's server on a listening socket, in this event loop. Ends every lease when it is left.

    `problem` says why it should not be called healthy, though it serves. `usage`: see `Leases`.
    """
    leases = Leases(backend, tasks, quotas=quotas, audit=audit, usage=usage)
    server = _Server(leases, token, heartbeat_s, problem)
    runner = web.AppRunner(
        server.app,
        handler_cancellation=True,
        access_log=None,
        keepalive_timeout=_KEEPALIVE_S,
        shutdown_timeout=_SHUTDOWN_S,
    )
    await runner.setup()
    try:
        await web.SockSite(runner, listener, backlog=1024).start()
        yield leases
    finally:
        await leases.close()
        await runner.cleanup()


def _allow_open_files() -> None:
    """As many as may be: each sandbox and each call under way has a socket, and many workers share one broker."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def listen(address: Address, token: str | None) -> socket.socket:
    """A listening socket. A unix socket has mode 0600, and one that nobody serves any more is replaced.

    Raises UserError where a broker listens already, the address cannot be had, or TCP would go without a token.
    """
    if address.path is None and token is None:
        raise ConfigError(
            f"the broker does not listen at {address} without a token: give --token-file, or use a unix socket, "
            "which only its owner can open"
        )
    try:
        return _unix_listener(Path(address.path)) if address.path else _tcp_listener(address.host, address.port)
    except OSError as exc:
        raise UserError(f"the broker cannot listen at {address}: {exc.strerror or exc}") from exc


def _tcp_listener(host: str, port: int) -> socket.socket:
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, backlog=1024)


def _unix_listener(path: Path) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise UserError(f"{path} is there and is no socket; name another path for the broker")
        if _is_served(path):
            raise UserError(f"a broker already listens at unix://{path}")
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(mask)
    listener.listen(1024)
    return listener


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
    return True


def _bound(address: Address, listener: socket.socket) -> str:
    """The address with the port that was taken for port 0."""
    return str(address if address.path else address._replace(port=listener.getsockname()[1]))


class _Server:
    """HTTP around `Leases`: who may ask, which operation is meant, how long a lease lives."""

    def __init__(
        self, leases: Leases, token: str | None, heartbeat_s: float, problem: Callable[[], str | None]
    ) -> None:
        self._leases = leases
        self._token = token
        self._heartbeat_s = heartbeat_s
        self._problem = problem
        self._sockets: set[web.WebSocketResponse] = set()
        self.app = web.Application(middlewares=[self._guard], client_max_size=LARGEST_BODY)
        self.app.on_shutdown.append(self._close_sockets)
        self.app.add_routes(
            [
                web.get("/healthz", self._alive),
                web.post("/v1/health", self._health),
                web.get("/v1/lease", self._lease),
                web.post("/v1/{operation}", self._operate),
            ]
        )

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Ask for the token, and record every request that is refused before it becomes an operation."""
        try:
            self._authorize(request)
            return await handler(request)
        except web.HTTPClientError as exc:
            self._leases.refuse(
                _REASONS.get(exc.status, Reason.MALFORMED),
                client=self._leases.client_of(request.headers.get(LEASE_HEADER, "")) or request.query.get("client"),
                path=request.path,
                peer=str(request.remote),
            )
            raise

    def _authorize(self, request: web.Request) -> None:
        if self._token is not None and request.path != "/healthz":
            given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
            if not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
                raise web.HTTPUnauthorized(text="the broker's token is missing or wrong\n")

    async def _alive(self, request: web.Request) -> web.Response:
        problem = self._problem()
        return web.Response(text=f"{problem or 'ok'}\n", status=503 if problem else 200)

    async def _health(self, request: web.Request) -> web.Response:
        header, _ = await _read(request)
        try:
            asked = OfTasks.read(header)
        except ValueError as exc:
            raise web.HTTPBadRequest(text=f"{exc}\n") from exc
        return web.Response(body=frame(self._leases.health(asked)))

    async def _lease(self, request: web.Request) -> web.WebSocketResponse:
        """Lives as long as the lease. Whatever the client says here, and the end of the socket, ends it."""
        connection = web.WebSocketResponse(heartbeat=self._heartbeat_s, autoclose=False)
        await connection.prepare(request)
        try:
            lease = self._leases.open(request.query.get("client", "unnamed"))
        except BrokerError as exc:
            await connection.close(code=WSCloseCode.GOING_AWAY, message=str(exc).encode())
            return connection
        self._sockets.add(connection)
        try:
            await connection.send_json({"lease": lease.id})
            await connection.receive()
        finally:
            self._sockets.discard(connection)
            await self._leases.end(lease)
        await connection.close()
        return connection

    async def _operate(self, request: web.Request) -> web.Response:
        operation = request.match_info["operation"]
        if operation not in self._leases.operations:
            raise web.HTTPNotFound(text="the broker offers no such operation\n")
        header, body = await _read(request)
        answer = await self._leases.answer(request.headers.get(LEASE_HEADER, ""), operation, header, body)
        return web.Response(status=answer.status, body=answer.frame)

    async def _close_sockets(self, app: web.Application) -> None:
        for connection in list(self._sockets):
            await connection.close(code=WSCloseCode.GOING_AWAY, message=b"the broker is closing")


async def _read(request: web.Request) -> tuple[dict[str, Any], bytes]:
    try:
        return unframe(await request.read())
    except ValueError as exc:
        raise web.HTTPBadRequest(text=f"{exc}\n") from exc
