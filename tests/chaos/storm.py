"""The faults: containers killed at random, the engine stopped and killed, workers killed. Each is counted by kind."""

import contextlib
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from docker.errors import DockerException
from requests.exceptions import RequestException

from agent_r3.process import last_lines, spawn
from tests.support.private_engine import PrivateEngine

_STOP_S = 60.0
_ENGINE_AWAY_S = 5.0
_DEAD_S = 1.0  # how long a killed worker stays away


class Workers:
    """The worker processes of a run; one that ends without having been killed is an error."""

    def __init__(self, folder: Path, count: int) -> None:
        self._folder = folder
        self._names = [f"worker-{number}" for number in range(count)]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.killed: list[int] = []

    def __enter__(self) -> "Workers":
        for name in self._names:
            self._start(name)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()

    def check(self) -> None:
        """Raises RuntimeError for a worker that ended by itself."""
        for name, process in self._processes.items():
            if (code := process.poll()) is not None:
                raise RuntimeError(f"{name} ended with {code}: {last_lines(self._log(name))}")

    def kill_one(self, chance: random.Random) -> str:
        """kill -9, then start a new one under the same name."""
        name = chance.choice(self._names)
        process = self._processes[name]
        process.kill()
        process.wait()
        self.killed.append(process.pid)
        time.sleep(_DEAD_S)
        self._start(name)
        return name

    def stop(self) -> None:
        """SIGTERM, as the supervisor ends them. Raises RuntimeError where one does not end well and in time."""
        for process in self._processes.values():
            process.terminate()
        deadline = time.monotonic() + _STOP_S
        for name, process in self._processes.items():
            try:
                code = process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired as exc:
                raise RuntimeError(f"{name} still runs {_STOP_S:g} s after SIGTERM") from exc
            if code:
                raise RuntimeError(f"{name} ended with {code} after SIGTERM: {last_lines(self._log(name))}")

    def _start(self, name: str) -> None:
        command = [sys.executable, "-m", "tests.chaos.worker", str(self._folder), name]
        self._processes[name] = spawn(command, log=self._log(name))

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"


class Storm:
    """Acts as the run goes on: `at(share)` with the finished share of all groups, as often as possible."""

    def __init__(
        self,
        engine: PrivateEngine,
        workers: Workers,
        chance: random.Random,
        *,
        every_s: float,
        say: Callable[[str], None],
    ) -> None:
        self.faults: Counter[str] = Counter()
        self.engine_ended_at: float | None = None  # Unix time, the last time
        self._engine = engine
        self._workers = workers
        self._chance = chance
        self._every_s = every_s
        self._say = say
        self._next_kill = time.monotonic() + every_s
        self._due: list[tuple[float, str, Callable[[], None]]] = [
            (0.1, "worker_killed", self._kill_worker),
            (0.25, "engine_stopped_and_started", lambda: self._restart_engine(engine.stop)),
            (0.45, "worker_killed", self._kill_worker),
            (0.6, "engine_killed_and_started", lambda: self._restart_engine(engine.kill)),
            (0.75, "worker_killed", self._kill_worker),
        ]

    def at(self, share: float) -> None:
        while self._due and share >= self._due[0][0]:
            _, kind, act = self._due.pop(0)
            began = time.monotonic()
            act()
            self.faults[kind] += 1
            self._say(f"{kind.replace('_', ' ')} ({time.monotonic() - began:.1f} s)")
        if time.monotonic() >= self._next_kill:
            self._next_kill = time.monotonic() + self._chance.expovariate(1 / self._every_s)
            self._kill_container()

    @property
    def over(self) -> bool:
        """Whether everything planned has happened."""
        return not self._due

    def _restart_engine(self, end: Callable[[], None]) -> None:
        end()
        self.engine_ended_at = time.time()
        time.sleep(_ENGINE_AWAY_S)
        self._engine.start()

    def _kill_worker(self) -> None:
        self._workers.kill_one(self._chance)

    def _kill_container(self) -> None:
        with contextlib.closing(self._engine.client()) as api:
            running = api.containers()
            if not running:
                return
            with contextlib.suppress(DockerException, RequestException):  # it may have ended by itself
                api.kill(self._chance.choice(running)["Id"], signal.SIGKILL)
                self.faults["container_killed"] += 1
