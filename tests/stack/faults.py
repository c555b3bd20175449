"""Faults of a running stack: the main process of a service killed, a worker cut off from Redis. Needs root."""

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator

import psutil

from agent_r3.store.writer import STALE_S
from tests.stack.stack import Container, Stack
from tests.stack.watch import Watcher

Say = Callable[[str], None]
_AGAIN_S = 420.0  # until a killed service must be healthy again: an engine loads its model
_POLL_S = 1.0


class Faults:
    """Brings one fault about and returns when the stack has got over it. `going_on` raises when the run has ended."""

    def __init__(
        self,
        stack: Stack,
        watcher: Watcher,
        chance: random.Random,
        *,
        cut_s: float,
        going_on: Callable[[], None],
        say: Say,
    ) -> None:
        """`cut_s` must be longer than the time after which a silent worker's claims go to others."""
        if cut_s <= STALE_S:
            raise ValueError(f"a cut of {cut_s:g} s is too short: a worker is given up after {STALE_S:g} s")
        self._stack = stack
        self._watcher = watcher
        self._chance = chance
        self._cut_s = cut_s
        self._going_on = going_on
        self._say = say

    def kill(self, service: str) -> None:
        """kill -9 of the service's own process or of its container's first one, as chance has it.

        By process id and not through Docker, for which a container that it was told to kill is one that shall stay so.
        """
        place, whole = self._chance.randrange(len(self._stack.of(service))), self._chance.random() < 0.5
        name = f"{service} {place + 1}"
        self._until(lambda: is_healthy(self._stack.of(service)[place]), f"{name} is healthy before it is killed")
        container = self._stack.of(service)[place]
        first = int(container.facts["State"]["Pid"])
        victim = first if whole else own_process(first)
        os.kill(victim, signal.SIGKILL)
        self._say(f"killed {name}: process {victim}, {'the first of its container' if whole else 'its own'}")

        def is_back() -> bool:
            now = self._stack.of(service)[place]
            return started(now) != started(container) and is_healthy(now)

        took = self._until(is_back, f"{name} is started again and healthy")
        self._say(f"{name} is healthy again after {took:.1f} s")

    def cut(self) -> None:
        """Nothing passes between Redis and a worker that holds claims, until others have long taken these over."""
        worker, claims = self._working()
        name = f"worker/{worker.hostname}"
        redis = inner_address(self._stack, "redis")
        began = time.monotonic()
        with cut_off(int(worker.facts["State"]["Pid"]), redis):
            self._say(f"cut {name} off from {redis}; it holds groups {claims}")
            self._until(lambda: time.monotonic() - began > self._cut_s, "the cut is over")
            silent_s = self._watcher.fresh().roles[name].age_s
        if silent_s < STALE_S:
            raise RuntimeError(f"{name} was heard {silent_s:.1f} s ago: the cut has cut nothing off")
        seen = self._watcher.fresh()
        over = [index for index in claims if len(seen.holders[index]) > 1]
        self._say(f"{name} was silent for {silent_s:.0f} s; groups {over} of these had another holder by then")

        def is_back() -> bool:
            (now,) = [found for found in self._stack.of("rollout") if found.id == worker.id]
            return self._watcher.fresh().roles[name].age_s < STALE_S / 2 and is_healthy(now)

        took = self._until(is_back, f"{name} is heard again and healthy")
        self._say(f"{name} is healthy again after {took:.1f} s")

    def _working(self) -> tuple[Container, list[int]]:
        """A worker that holds claims, and these; waits for one."""
        held: dict[str, list[int]] = {}

        def any_works() -> bool:
            held.clear()
            for index, worker in sorted(self._watcher.fresh().claims.items()):
                held.setdefault(worker, []).append(index)
            return bool(held)

        self._until(any_works, "a worker holds a claim")
        workers = {container.hostname: container for container in self._stack.of("rollout")}
        name = self._chance.choice(sorted(held))
        return workers[name], held[name]

    def _until(self, there: Callable[[], bool], what: str) -> float:
        """Seconds that it took. Raises RuntimeError where it takes too long."""
        began = time.monotonic()
        while not there():
            self._going_on()
            if time.monotonic() - began > _AGAIN_S:
                raise RuntimeError(f"after {_AGAIN_S:g} s it is still not so that {what}")
            time.sleep(_POLL_S)
        return time.monotonic() - began


def is_healthy(container: Container) -> bool:
    return container.state == "running" and container.health == "healthy"


def started(container: Container) -> str:
    """When its processes were started the last time."""
    return str(container.facts["State"]["StartedAt"])


def inner_address(stack: Stack, service: str) -> str:
    """On the inner network; another one after a restart. Raises RuntimeError while the service has none."""
    container = stack.of(service)[0]
    address = container.addresses.get(f"{stack.project}_inner")
    if address is None:
        raise RuntimeError(f"{container.describe()}: it has no address")
    return address


@contextlib.contextmanager
def cut_off(pid: int, address: str) -> Iterator[None]:
    """Drop every packet between the network namespace of process `pid` and `address` while the block lasts.

    Nobody is told, as when a cable is pulled: connections stay open and silent. The container keeps its networks and
    its names there.
    """
    rules = [["OUTPUT", "-d", address, "-j", "DROP"], ["INPUT", "-s", address, "-j", "DROP"]]
    added: list[list[str]] = []
    # Held open, so that the rules go even where the process has ended in between.
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)

    def iptables(what: str, rule: list[str]) -> None:
        command = ["nsenter", f"--net=/proc/self/fd/{namespace}", "iptables", "--wait", what, *rule]
        done = subprocess.run(command, pass_fds=[namespace], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"iptables {what} {' '.join(rule)}: {done.stderr.strip()}")

    try:
        for rule in rules:
            iptables("-I", rule)
            added.append(rule)
        yield
    finally:
        for rule in added:
            iptables("-D", rule)
        os.close(namespace)


def own_process(first: int) -> int:
    """The process that is the service, below its container's init and the keeper of a role (docker/service.py)."""
    process = psutil.Process(first)
    while process.pid == first or any(part.endswith("/service.py") for part in process.cmdline()):
        children = sorted(process.children(), key=lambda child: child.create_time())
        if not children:
            break
        process = children[0]  # what came later is adopted
    return int(process.pid)
