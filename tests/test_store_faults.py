"""The store when its server dies, stalls, loses an answer or refuses us."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from agent_r3.errors import StoreError, UserError
from agent_r3.store import EmbeddedServer, GroupReader, TrajectoryWriter, check_url
from agent_r3.types import Ending, TrajectoryGroup
from tests.support.store import LossyProxy, RedisServer, hold_group, make_turns

pytestmark = pytest.mark.redis
COUNTERS = {"prompt_tokens": 0, "cached_tokens": 0, "reprefilled_tokens": 0}
TURNS = make_turns(np.random.default_rng(0), 3)


async def test_a_server_killed_in_mid_append_is_a_store_error_and_a_later_retry_counts_once(
    redis_server: RedisServer,
) -> None:
    async with TrajectoryWriter.connect(redis_server.url, "run", retry_s=0.3) as store:
        await hold_group(redis_server.url, store)
        await store.open_trajectory("t", 0, "g", "task")
        await store.append_turn("t", TURNS[0])
        redis_server.freeze()
        append = asyncio.create_task(store.append_turn("t", TURNS[1]))
        await asyncio.sleep(0.1)
        assert not append.done()
        redis_server.kill()
        with pytest.raises(StoreError, match="store: append turn 1 to t: ConnectionError"):
            await append
        redis_server.start()
        for turn in TURNS[1:]:
            await store.append_turn("t", turn)
        await store.finish_trajectory("t", 1.0, Ending.FINISH, COUNTERS)
    with GroupReader.connect(redis_server.url, "run") as reader:
        assert reader.load("t").turns == 3


async def test_a_server_that_comes_back_in_time_is_not_noticed(redis_server: RedisServer) -> None:
    async with TrajectoryWriter.connect(redis_server.url, "run", retry_s=10) as store:
        await hold_group(redis_server.url, store)
        await store.open_trajectory("t", 0, "g", "task")
        redis_server.kill()
        append = asyncio.create_task(store.append_turn("t", TURNS[0]))
        await asyncio.sleep(0.3)
        assert not append.done()
        await asyncio.to_thread(redis_server.start)
        await append


async def test_a_lost_answer_makes_no_second_append_claim_or_group(redis_server: RedisServer) -> None:
    proxy = LossyProxy(redis_server.port)
    with GroupReader.connect(redis_server.url, "run") as direct:
        direct.set_demand(4)
    async with TrajectoryWriter.connect(proxy.url, "run") as store:
        assert await store.claim_group("w") == 0
        proxy.swallow = 1
        assert await store.claim_group("w") == 1
        assert await store.claim_group("w") == 2
        await store.open_trajectory("t", 0, "g0", "task")
        await store.append_turn("t", TURNS[0])
        for turn in TURNS[1:]:
            proxy.swallow = 1
            await store.append_turn("t", turn)
        proxy.swallow = 1
        await store.finish_trajectory("t", 1.0, Ending.FINISH, COUNTERS)
        await store.publish_group("w", TrajectoryGroup("g1", 1, "task", 0, (), ()), {})
        proxy.swallow = 1
        await store.publish_group("w", TrajectoryGroup("g0", 0, "task", 0, ("t",), (1.0,)), {})
        assert proxy.swallow == 0
    with GroupReader.connect(redis_server.url, "run") as reader:
        assert [delivery.group.index for delivery in reader.read(9, 1)] == [1, 0]
        assert reader.load("t").turns == 3
    proxy.close()


async def test_a_delivery_whose_answer_was_lost_is_delivered_all_the_same(redis_server: RedisServer) -> None:
    with GroupReader.connect(redis_server.url, "run") as direct:
        direct.set_demand(2)
    async with TrajectoryWriter.connect(redis_server.url, "run") as store:
        for index in range(2):
            assert await store.claim_group("w") == index
            await store.publish_group("w", TrajectoryGroup(f"g{index}", index, "task", 0, (), ()), {})
    proxy = LossyProxy(redis_server.port)
    with GroupReader.connect(proxy.url, "run") as reader:
        assert [delivery.group.index for delivery in reader.read(1, 1)] == [0]
        proxy.swallow = 1
        assert [delivery.group.index for delivery in reader.read(1, 1)] == [1]
        assert proxy.swallow == 0
        assert reader.read(1, 0.05) == []
    proxy.close()


def test_a_reader_whose_server_is_gone_raises_within_its_time(redis_server: RedisServer) -> None:
    with GroupReader.connect(redis_server.url, "run", retry_s=0.3) as reader:
        redis_server.kill()
        began = time.monotonic()
        with pytest.raises(StoreError, match="store: read groups"):
            reader.read(1, 5)
        assert time.monotonic() - began < 3
    redis_server.start()


async def test_a_wrong_password_is_one_line_for_the_user_without_the_password(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, password="right-secret")
    server.start()
    check_url(server.url)
    try:
        for url in (server.url.replace("right-secret", "wrong-secret"), server.url.replace(":right-secret@", "")):
            for connect in (check_url, enter_reader):
                with pytest.raises(UserError, match="refuses the password") as error:
                    connect(url)
                assert "\n" not in str(error.value) and "secret" not in str(error.value)
            with pytest.raises(UserError, match="refuses the password"):
                async with TrajectoryWriter.connect(url, "run"):
                    raise AssertionError("connected")
    finally:
        server.kill()


def enter_reader(url: str) -> None:
    with GroupReader.connect(url, "run"):
        raise AssertionError("connected")


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://localhost:6379", "is not a Redis URL"),
        ("localhost:6379", "is not a Redis URL"),
        ("redis://localhost:port", "is not a Redis URL"),
        ("unix:///nowhere/x.sock", "no Redis server answers"),
        ("redis://no.such.host.invalid:6379", "no Redis server answers"),
    ],
)
async def test_a_bad_url_is_one_line_for_the_user(url: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem) as error:
        check_url(url)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=problem):
        async with TrajectoryWriter.connect(url, "run"):
            raise AssertionError("connected")


def test_a_dead_server_at_start_is_one_line_for_the_user() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"redis://:hush@127.0.0.1:{probe.getsockname()[1]}/0"
        with pytest.raises(UserError, match=r"redis://:\*\*\*@127\.0\.0\.1.*no Redis server answers there"):
            check_url(url)


def test_the_embedded_server_ends_with_its_block_and_leaves_no_socket(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path) as server:
        check_url(server.url)
        pid, socket_path = server.pid, Path(server.url.removeprefix("unix://"))
        assert socket_path.is_socket()
        assert socket_path.parent.stat().st_mode & 0o077 == 0
    assert not alive(pid)
    assert not socket_path.parent.exists()
    server.stop()


def test_the_embedded_server_dies_with_a_killed_parent(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from agent_r3.store import EmbeddedServer\n"
        "server = EmbeddedServer(Path(sys.argv[1])); server.start()\n"
        "print(server.pid, server.url, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    first, url = parent.stdout.readline().split()
    pid = int(first)
    assert alive(pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 5
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(pid)
    shutil.rmtree(Path(url.removeprefix("unix://")).parent)  # what a SIGKILL leaves


async def test_a_persistent_embedded_server_keeps_its_data_over_a_crash(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path, persist=True) as server:
        async with TrajectoryWriter.connect(server.url, "run") as store:
            await hold_group(server.url, store)
            await store.open_trajectory("t", 0, "g", "task")
            await store.append_turn("t", TURNS[0])
            os.kill(server.pid, signal.SIGKILL)
            server.stop()
        server.start()
        async with TrajectoryWriter.connect(server.url, "run") as store:
            with pytest.raises(Exception, match="held by another process"):
                await store.append_turn("t", TURNS[1])


def test_an_embedded_server_that_cannot_start_tells_its_last_lines(tmp_path: Path) -> None:
    (tmp_path / "appendonlydir").write_text("in the way")
    server = EmbeddedServer(tmp_path, persist=True)
    with pytest.raises(StoreError, match=r"embedded store ended with status 1; last lines of .*server.log"):
        server.start()
    with pytest.raises(StoreError, match="not running"):
        _ = server.url


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie that its adopter has not reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
