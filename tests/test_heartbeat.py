"""A role's sign of life: in the store while it lives, through losses of the store, and its last word."""

import os
import socket
import subprocess
import threading
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


def test_a_role_is_alive_from_the_first_moment_until_it_says_that_it_has_stopped(embedded_url: str) -> None:
    state = {"state": "running", "episodes": 3}
    began = time.time()
    with Heartbeat(StoreConfig(url=embedded_url), "run", "worker/a", lambda: state) as heartbeat:
        seen = role(embedded_url)
        assert {**seen.payload, "started": 0} == {
            **{"state": "running", "episodes": 3, "started": 0},
            **{"host": socket.gethostname(), "pid": os.getpid()},
        }
        assert began - 1 < float(str(seen.payload["started"])) <= time.time() and seen.age_s < 5
        state = {"state": "running", "episodes": 4}
        until("the next beat", lambda: role(embedded_url).payload["episodes"] == 4, 3 * EVERY_S)
        assert heartbeat.problem() is None
    assert role(embedded_url).payload["state"] == "stopped"


class TestARoleOfWhichThereIsOne:
    """A second trainer is kept out; whoever takes the role over shuts the former out."""

    def trainer(self, url: str) -> Heartbeat:
        return Heartbeat(StoreConfig(url=url), "run", "trainer", lambda: {"state": "training"}, alone=True)

    def pretend(self, url: str, **payload: object) -> None:
        """A process of another machine beats once."""
        with GroupReader.connect(url, "run") as reader:
            known = {"state": "training", "host": "elsewhere", "pid": 7, "token": "other"}
            reader.heartbeat("trainer", known | payload)

    def test_a_second_one_is_refused_while_the_first_beats(self, embedded_url: str) -> None:
        beating = threading.Event()

        def beat() -> None:
            while not beating.wait(1.0):
                self.pretend(embedded_url)

        self.pretend(embedded_url)
        thread = threading.Thread(target=beat)
        thread.start()
        try:
            said = "run run has another trainer: process 7 on elsewhere; there can be one"
            with pytest.raises(UserError, match=said), self.trainer(embedded_url):
                raise AssertionError("there are two")
        finally:
            beating.set()
            thread.join()
        assert role(embedded_url, "trainer").payload["token"] == "other"

    def test_one_that_has_ended_or_is_silent_is_followed(self, embedded_url: str) -> None:
        self.pretend(embedded_url, state="stopped")
        began = time.monotonic()
        with self.trainer(embedded_url) as heartbeat:
            heartbeat.require_alone()
        assert time.monotonic() - began < 5
        self.pretend(embedded_url)
        with self.trainer(embedded_url) as heartbeat:
            heartbeat.require_alone()
        assert 9 < time.monotonic() - began < 60

    @pytest.mark.parametrize("pid", ["gone", "mine"])
    def test_a_killed_one_of_this_machine_is_followed_at_once(self, embedded_url: str, pid: str) -> None:
        child = subprocess.Popen(["true"])
        child.wait()
        self.pretend(embedded_url, host=socket.gethostname(), pid=child.pid if pid == "gone" else os.getpid())
        began = time.monotonic()
        with self.trainer(embedded_url) as heartbeat:
            heartbeat.require_alone()
        assert time.monotonic() - began < 5

    def test_the_former_one_learns_of_it_and_says_no_more(self, embedded_url: str) -> None:
        with self.trainer(embedded_url) as heartbeat:
            heartbeat.require_alone()
            self.pretend(embedded_url)  # as after a pause in which another came
            with pytest.raises(UserError, match="another trainer"):
                heartbeat.require_alone()
        assert role(embedded_url, "trainer").payload["state"] == "training"


def test_a_role_that_is_done_stays_done(embedded_url: str) -> None:
    with Heartbeat(StoreConfig(url=embedded_url), "run", "trainer", lambda: {"state": "done"}):
        pass
    assert role(embedded_url, "trainer").payload["state"] == "done"


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
