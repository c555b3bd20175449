"""The faults of a chaos run hit what they mean to hit, and a network cut is over when it ends. Needs root."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.stack.faults import cut_off, own_process

pytestmark = pytest.mark.docker  # iptables comes with the engine

KEEPER = Path(__file__).parents[1] / "docker" / "service.py"
ADDRESS = "127.0.0.1"
# Listens in its own network, and says for each line of standard input whether a connection to itself is made.
LISTENER = """
import socket, sys
with socket.create_server(("127.0.0.1", 0)) as server:
    print("listens", flush=True)
    for _ in sys.stdin:
        try:
            socket.create_connection(server.getsockname(), timeout=0.5).close()
            print("open", flush=True)
        except TimeoutError:
            print("silent", flush=True)
"""


@contextmanager
def started(*command: str) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            below = psutil.Process(process.pid).children(recursive=True)
            for each in [*below, process]:
                each.kill()


def wait_for_process(name: str, first: int) -> int:
    """The id of the process of that name below `first`, once it is there."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for process in psutil.Process(first).children(recursive=True):
            if process.name() == name:
                return int(process.pid)
        time.sleep(0.02)
    raise AssertionError(f"no {name} below {first}")


def test_the_process_of_a_service_is_below_the_init_of_its_container() -> None:
    with started("sh", "-c", "sleep 600 & wait") as init:
        service = wait_for_process("sleep", init.pid)
        assert own_process(init.pid) == service


def test_the_process_of_a_role_is_below_its_keeper() -> None:
    with started("sh", "-c", f"{sys.executable} {KEEPER} run sleep 600 & wait") as init:
        role = wait_for_process("sleep", init.pid)
        assert own_process(init.pid) == role


def test_a_cut_drops_everything_and_is_over_afterwards() -> None:
    inside = 'ip link set lo up; exec "$0" -c "$1"'
    with started("unshare", "--net", "sh", "-c", inside, sys.executable, LISTENER) as process:
        assert process.stdin is not None and process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def answer() -> str:
            stdin.write("\n")
            stdin.flush()
            return stdout.readline().strip()

        assert stdout.readline().strip() == "listens"
        assert answer() == "open"
        with cut_off(process.pid, ADDRESS):
            assert answer() == "silent"
        assert answer() == "open"
