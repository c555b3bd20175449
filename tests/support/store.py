"""Real servers for the store: the embedded one and Debian's redis-server; and turns to put into it."""

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import numpy as np
import pytest
import redis

from agent_r3.routing import rows_from
from agent_r3.store import EmbeddedServer, GroupReader, TrajectoryWriter
from agent_r3.store.scripts import Keys
from agent_r3.types import MoEShape, Observation, Routing, ToolCall, Turn
from tests.support.trajectories import SHAPE, random_rows


class RedisServer:
    """Debian's redis-server on a loopback port, append-only, that a test may kill and start again.

    It writes before it answers: `appendfsync everysec` answers without having written while its fsync is under way.
    """

    def __init__(self, folder: Path, *, password: str | None = None) -> None:
        binary = shutil.which("redis-server")
        if binary is None:
            pytest.fail("redis-server is not installed; `apt-get install redis-server`")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
        options += ["--appendonly", "yes", "--appendfsync", "always"]
        self._command = [binary, *options, *(["--requirepass", password] if password else [])]
        self._folder = folder
        self._password = password
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        secret = f":{quote(self._password, safe='')}@" if self._password else ""
        return f"redis://{secret}127.0.0.1:{self.port}"

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        client = redis.Redis.from_url(self.url)
        deadline = time.monotonic() + 10
        while True:
            try:
                client.ping()
                break
            except redis.RedisError:
                assert self._process.poll() is None and time.monotonic() < deadline, "redis-server did not start"
                time.sleep(0.02)
        client.close()

    def freeze(self) -> None:
        """Commands are accepted by the kernel and never answered."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def forget(self) -> None:
        """Remove its files, while it is down."""
        shutil.rmtree(self._folder / "appendonlydir", ignore_errors=True)
        (self._folder / "appendonly.aof").unlink(missing_ok=True)  # of Redis 6

    def kill(self) -> None:
        """SIGKILL, as a crash."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()


class LossyProxy:
    """Stands before a server and can swallow its next answer, cutting the connection: the command was carried out."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}"
        self.swallow = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._target))
            threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        try:
            while data := source.recv(65_536):
                if answers and self.swallow > 0:
                    self.swallow -= 1
                    break
                target.sendall(data)
        except OSError:
            pass
        for side in (source, target):
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)


class Clock:
    """Makes claims and heartbeats older than they are, in the store itself: the server's clock cannot be set."""

    def __init__(self, client: redis.Redis, run: str = "run") -> None:
        self.client = client
        self._claims, self._roles = Keys(run).claims, Keys(run).roles

    def age_claim(self, index: int, seconds: float) -> None:
        claim = cast(bytes, self.client.hget(self._claims, str(index)))
        *rest, claimed = claim.split(b"\n")
        aged = b"\n".join([*rest, str(float(claimed) - seconds).encode()])
        self.client.hset(self._claims, str(index), cast(Any, aged))

    def age_heartbeat(self, worker: str, seconds: float) -> None:
        beat = json.loads(cast(bytes, self.client.hget(self._roles, f"worker/{worker}")))
        self.client.hset(self._roles, f"worker/{worker}", json.dumps(beat | {"time": beat["time"] - seconds}))


@contextlib.contextmanager
def clock_of(url: str, run: str = "run") -> Iterator[Clock]:
    client = redis.Redis.from_url(url)
    try:
        yield Clock(client, run)
    finally:
        client.close()


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A running redis-server of this test alone, to be killed and started again."""
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session", params=["embedded", pytest.param("redis-server", marks=pytest.mark.redis)])
def store_server_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("store")
    if request.param == "embedded":
        with EmbeddedServer(folder) as server:
            yield server.url
        return
    server_process = RedisServer(folder)
    server_process.start()
    yield server_process.url
    server_process.kill()


@pytest.fixture
def store_url(store_server_url: str) -> str:
    """URL of an empty store, of either kind: for what tests the store itself."""
    return _emptied(store_server_url)


@pytest.fixture(scope="session")
def embedded_server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedServer(tmp_path_factory.mktemp("store")) as server:
        yield server.url


@pytest.fixture
def embedded_url(embedded_server_url: str) -> str:
    """URL of an empty store, for whoever uses one."""
    return _emptied(embedded_server_url)


def _emptied(url: str) -> str:
    client = redis.Redis.from_url(url)
    client.flushall()
    client.close()
    return url


async def hold_group(url: str, store: TrajectoryWriter, worker: str = "w", *, run: str = "run") -> int:
    """Ask for one more group and claim it: trajectories are opened for groups that are held."""
    client = redis.Redis.from_url(url)
    demand = int(cast(bytes | None, client.get(f"agent_r3:{{{run}}}:next")) or 0) + 1
    client.close()
    with GroupReader.connect(url, run) as reader:
        reader.set_demand(demand)
    index = await store.claim_group(worker)
    assert index == demand - 1
    return index


def make_turn(
    rng: np.random.Generator,
    index: int,
    start: int,
    *,
    prompt: int = 4,
    sampled: int = 3,
    version: int = 0,
    shape: MoEShape = SHAPE,
    text: str = "",
) -> Turn:
    """A turn of random tokens whose rows fit: from `max(start - 1, 0)` up to its last token but one."""
    first, stop = rows_from(start), start + prompt + sampled - 1
    return Turn(
        index=index,
        start=start,
        prompt_ids=rng.integers(0, 64, prompt).astype(np.int32),
        sampled_ids=rng.integers(0, 64, sampled).astype(np.int32),
        logprobs=-rng.random(sampled).astype(np.float32),
        routing=Routing(first, random_rows(rng, stop - first, shape)),
        policy_version=version,
        cached_tokens=first,
        text=text or f"turn {index}",
        calls=(ToolCall("execute_bash", {"cmd": "ls"}),),
        observations=(Observation("README.md"),),
        seconds={"generate": 0.5, "tools": 0.1},
    )


def make_turns(rng: np.random.Generator, count: int, *, version: int = 0, shape: MoEShape = SHAPE) -> list[Turn]:
    """`count` turns that continue each other."""
    turns: list[Turn] = []
    start = 0
    for index in range(count):
        turn = make_turn(rng, index, start, prompt=2 + index, sampled=1 + index % 3, version=version, shape=shape)
        turns.append(turn)
        start += len(turn.prompt_ids) + len(turn.sampled_ids)
    return turns
