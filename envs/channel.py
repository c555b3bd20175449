"""The host's end of a sandbox's stream: requests to the runner in it, one at a time, and its answers."""

import asyncio
import contextlib
import socket

from agent_r3.envs import runner
from agent_r3.errors import SandboxDeadError, SandboxError

_STDOUT = 1
_MOST_FIELDS = 16
_LARGEST_FIELD = 1 << 30
_LAST_WORDS = 2_000  # bytes of stderr kept for the error message


class Channel:
    """Speaks runner.py's protocol with a runner's stdin and stdout.

    A task reads the runner's stream all the time, so a sandbox that dies is noticed without asking it and its stream
    never stands undrained.
    """

    def __init__(self, what: str, writer: asyncio.StreamWriter) -> None:
        """`what` names the sandbox in error messages. Use `over_attached` or `over_pipes`."""
        self._what = what
        self._writer = writer
        self._answers = asyncio.StreamReader()
        self.protected = False  # nobody in the sandbox can answer in the runner's place
        self.silent = False  # it did not answer in time; the runner may hang and will not end by itself
        self._stderr = b""
        self._turn = asyncio.Lock()
        self._sent: asyncio.Task[object] | None = None  # the exchange whose answer is due
        self._pump: asyncio.Task[None] | None = None

    @classmethod
    async def over_attached(cls, sock: socket.socket, what: str) -> "Channel":
        """Take over the socket of a Docker attach, whose stream is multiplexed."""
        sock.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 20)
        channel = cls(what, writer)
        channel._pump = asyncio.create_task(channel._read_multiplexed(reader))
        return channel

    @classmethod
    async def over_pipes(cls, sock: socket.socket, stderr: asyncio.StreamReader, what: str) -> "Channel":
        """Take over a socket that is a process's stdin and stdout, and the stream of its stderr."""
        sock.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 20)
        channel = cls(what, writer)
        channel._pump = asyncio.create_task(channel._read_plain(reader, stderr))
        return channel

    @property
    def alive(self) -> bool:
        return self._pump is not None and not self._pump.done()

    async def ready(self, timeout_s: float) -> None:
        """Wait for the runner's greeting. Raises SandboxError."""
        self.protected = (await self._answer(timeout_s))[1:] == [b"1"]

    async def request(self, *fields: bytes, timeout_s: float) -> list[bytes]:
        """Send one request and return the answer's fields.

        A cancelled request is ended inside the container, and the channel stays usable: the next request waits for
        its answer first. Raises SandboxError when the container died or has not answered after `timeout_s`; the
        socket is closed then, and the container ends with it.
        """
        exchange = asyncio.create_task(self._exchange(fields, timeout_s))
        try:
            return await asyncio.shield(exchange)
        except asyncio.CancelledError:
            exchange.add_done_callback(_forget)
            if self._sent is exchange:
                self._writer.write(runner.pack([b"stop"]))
            else:
                exchange.cancel()
            raise

    async def _exchange(self, fields: tuple[bytes, ...], timeout_s: float) -> list[bytes]:
        async with self._turn:
            self._sent = asyncio.current_task()
            try:
                self._writer.write(runner.pack(list(fields)))
                return await self._answer(timeout_s)
            except SandboxError:
                self.close()  # the two ends may be out of step
                raise
            finally:
                self._sent = None

    async def _answer(self, timeout_s: float) -> list[bytes]:
        try:
            async with asyncio.timeout(timeout_s):
                await self._writer.drain()
                count = await self._number()
                if count > _MOST_FIELDS:
                    raise SandboxError(f"{self._what}: {count} fields announced; something else wrote to the stream")
                return [await self._field() for _ in range(count)]
        except TimeoutError as exc:
            self.silent = True
            raise SandboxError(f"{self._what}: no answer within {timeout_s:.0f} s") from exc
        except (asyncio.IncompleteReadError, OSError) as exc:
            words = self._stderr.decode(errors="replace").strip()
            raise SandboxDeadError(f"{self._what} has died{': ' + words if words else ''}") from exc

    async def _number(self) -> int:
        return int.from_bytes(await self._answers.readexactly(4), "big")

    async def _field(self) -> bytes:
        size = await self._number()
        if size > _LARGEST_FIELD:
            raise SandboxError(f"{self._what}: {size} bytes announced; something else wrote to the stream")
        return await self._answers.readexactly(size)

    async def _read_multiplexed(self, reader: asyncio.StreamReader) -> None:
        """Docker's frames: an 8-byte header (stream, 3 zeros, size), then the bytes."""
        try:
            while True:
                header = await reader.readexactly(8)
                payload = await reader.readexactly(int.from_bytes(header[4:], "big"))
                if header[0] == _STDOUT:
                    self._answers.feed_data(payload)
                else:
                    self._stderr = (self._stderr + payload)[-_LAST_WORDS:]
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self._answers.feed_eof()

    async def _read_plain(self, reader: asyncio.StreamReader, stderr: asyncio.StreamReader) -> None:
        words = asyncio.create_task(self._read_stderr(stderr))
        try:
            while data := await reader.read(1 << 20):
                self._answers.feed_data(data)
            await asyncio.wait([words], timeout=1.0)
        except OSError:
            pass
        finally:
            words.cancel()
            self._answers.feed_eof()

    async def _read_stderr(self, stderr: asyncio.StreamReader) -> None:
        while data := await stderr.read(1 << 16):
            self._stderr = (self._stderr + data)[-_LAST_WORDS:]

    def close(self) -> None:
        """Close the socket; the runner reads the end of its input and the container ends. Idempotent."""
        # Shut down, not only closed: the SDK may hold another descriptor of the same connection.
        with contextlib.suppress(OSError):
            self._writer.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        self._writer.transport.abort()


def _forget(exchange: asyncio.Task[list[bytes]]) -> None:
    """Nobody waits for this answer any more; take its exception so that asyncio does not report it as lost."""
    if not exchange.cancelled():
        exchange.exception()
