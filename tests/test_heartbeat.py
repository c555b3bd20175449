"""A role's sign of life: in the store while it lives, through losses of the store, and its last word."""

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agent_r3.config import StoreConfig
from agent_r3.errors import UserError
from agent_r3.heartbeat import EVERY_S, Heartbeat
from agent_r3.store import GroupReader, RoleState
from tests.support.store import RedisServer


def role(url: str, name: str = "worker/a") -> RoleState:
    with GroupReader.connect(url, "run") as reader:
        return reader.roles()[name]


def until(condition: str, holds: Callable[[], bool], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {condition}"
        time.sleep(0.02)


def test_a_role_is_alive_from_the_first_moment_until_it_says_that_it_has_stopped(store_url: str) -> None:
    state = {"state": "running", "episodes": 3}
    began = time.time()
    with Heartbeat(StoreConfig(url=store_url), "run", "worker/a", lambda: state) as heartbeat:
        seen = role(store_url)
        assert {**seen.payload, "started": 0} == {
            **{"state": "running", "episodes": 3, "started": 0},
            **{"host": socket.gethostname(), "pid": os.getpid()},
        }
        assert began - 1 < float(str(seen.payload["started"])) <= time.time() and seen.age_s < 5
        state = {"state": "running", "episodes": 4}
        until("the next beat", lambda: role(store_url).payload["episodes"] == 4, 3 * EVERY_S)
        assert heartbeat.problem() is None
    assert role(store_url).payload["state"] == "stopped"


def test_a_role_that_is_done_stays_done(store_url: str) -> None:
    with Heartbeat(StoreConfig(url=store_url), "run", "trainer", lambda: {"state": "done"}):
        pass
    assert role(store_url, "trainer").payload["state"] == "done"


@pytest.mark.redis
def test_a_store_that_goes_and_comes_back_is_nobodys_error(redis_server: RedisServer) -> None:
    store = StoreConfig(url=redis_server.url)
    with Heartbeat(store, "run", "worker/a", lambda: {"state": "running"}, late_s=0.5 * EVERY_S) as heartbeat:
        redis_server.kill()
        until("the loss is noticed", lambda: heartbeat.problem() is not None)
        until("with its reason", lambda: "ConnectionError" in str(heartbeat.problem()))
        assert str(heartbeat.problem()).startswith("the store has not answered for")
        redis_server.start()
        restarted = time.time()
        until("a beat after the restart", lambda: time.time() - role(redis_server.url).age_s > restarted)
        until("all is well", lambda: heartbeat.problem() is None)


@pytest.mark.redis
@pytest.mark.parametrize("end", ["kill", "freeze"])
def test_a_role_ends_although_the_store_is_gone(redis_server: RedisServer, end: str) -> None:
    store = StoreConfig(url=redis_server.url)
    with Heartbeat(store, "run", "worker/a", lambda: {"state": "running"}, late_s=0.1):
        getattr(redis_server, end)()
        began = time.monotonic()
    assert time.monotonic() - began < 12


def test_a_wrong_store_at_the_start_is_one_line_for_the_user(tmp_path: Path) -> None:
    heartbeat = Heartbeat(StoreConfig(url=f"unix://{tmp_path}/none.sock"), "run", "trainer", dict)
    with pytest.raises(UserError, match="no Redis server answers there"), heartbeat:
        raise AssertionError("it beats")
