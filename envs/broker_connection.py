"""A client's connections to its broker: the lease, which is a web socket, and the calls under it.

aiohttp is used as it is: httpx speaks no web sockets, and every command of every agent goes this way.
"""

import asyncio
import contextlib
from typing import Any

import aiohttp

from agent_r3.envs.broker_wire import FAILED, LEASE_ENDED, LEASE_HEADER, Address, Message, error_from, frame, unframe
from agent_r3.errors import BrokerError

_CONNECT_S = 10.0
_KEEPALIVE_S = 60.0


class RefusedError(BrokerError):
    """The broker, or what answers in its place, refuses this client: waiting does not help."""


class LeaseConnection:
    """A web socket that stands for the lease, and the connections of its calls, which end with it."""

    def __init__(self, address: Address, token: str | None) -> None:
        self._address = address
        connector: aiohttp.BaseConnector
        if address.path:
            connector = aiohttp.UnixConnector(address.path, limit=0, keepalive_timeout=_KEEPALIVE_S)
        else:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
        # No deadline here: the broker has one for everything it does, and a broker that hangs loses the lease.
        self._http = aiohttp.ClientSession(
            address.base_url,
            connector=connector,
            headers=authorization(token),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
        )
        self.lost = False
        self._id = ""
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._watch: asyncio.Task[None] | None = None

    @classmethod
    async def take(cls, address: Address, token: str | None, name: str, heartbeat_s: float) -> "LeaseConnection":
        """Raises BrokerError where no broker answers or it refuses."""
        lease = cls(address, token)
        try:
            await lease._open(name, heartbeat_s)
        except BaseException:
            await lease._http.close()
            raise
        return lease

    async def _open(self, name: str, heartbeat_s: float) -> None:
        try:
            async with asyncio.timeout(_CONNECT_S):
                self._socket = await self._http.ws_connect("/v1/lease", params={"client": name}, heartbeat=heartbeat_s)
                self._id = (await self._socket.receive_json())["lease"]
        except aiohttp.WSServerHandshakeError as exc:
            raise RefusedError(refusal(self._address, exc.status)) from exc
        except (aiohttp.ClientError, TimeoutError, OSError, TypeError, ValueError) as exc:
            raise BrokerError(f"no broker answers at {self._address} ({_words(exc)})") from exc
        self._watch = asyncio.create_task(self._until_lost(self._socket))

    async def _until_lost(self, connection: aiohttp.ClientWebSocketResponse) -> None:
        with contextlib.suppress(aiohttp.ClientError, OSError):
            await connection.receive()  # the broker says nothing more: this is the end of the socket
        await self._lose()

    async def _lose(self) -> None:
        if not self.lost:
            self.lost = True
            await self._http.close()  # with the calls that are under way

    async def call(self, operation: str, message: Message, body: bytes = b"") -> tuple[dict[str, Any], bytes]:
        """Header and body of the answer. Raises the broker's error, and BrokerError where there is no answer."""
        if self.lost:
            raise BrokerError(f"{operation}: the lease of the broker at {self._address} was lost")
        try:
            async with self._http.post(
                f"/v1/{operation}", data=frame(message.model_dump(), body), headers={LEASE_HEADER: self._id}
            ) as answer:
                status, data = answer.status, await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError, RuntimeError) as exc:
            # RuntimeError: the session was closed between the look above and the request.
            raise BrokerError(f"{operation}: the broker at {self._address} gave no answer ({_words(exc)})") from exc
        if status not in (200, FAILED, LEASE_ENDED):
            raise BrokerError(f"{operation}: {refusal(self._address, status)}")
        if status == LEASE_ENDED:
            await self._lose()
        try:
            header, payload = unframe(data)
        except ValueError as exc:
            raise BrokerError(f"{operation}: {refusal(self._address, status)}") from exc
        if status != 200:
            raise error_from(header)
        return header, payload

    async def close(self) -> None:
        """Give the lease back and return when the broker has ended all that it held. Idempotent."""
        if self.lost or self._socket is None or self._watch is None:
            return
        self.lost = True
        with contextlib.suppress(aiohttp.ClientError, OSError):
            await self._socket.send_str("end")
        await asyncio.wait([self._watch])
        await self._http.close()


def authorization(token: str | None) -> dict[str, str]:
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def refusal(address: Address, status: int) -> str:
    if status == 401:
        return (
            f"the broker at {address} refuses the token; sandbox.broker_token_file or AGENT_R3_BROKER_TOKEN must "
            "hold the one it was started with"
        )
    if status == 500:
        return f"the broker at {address} failed; its log says why"
    return f"what answers at {address} is no broker of this version, or refuses (HTTP {status})"


def _words(exc: BaseException) -> str:
    return " ".join(f"{type(exc).__name__}: {exc}".split())[:300]
