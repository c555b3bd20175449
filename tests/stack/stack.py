"""The stack of docker-compose.yml as a project of its own: its own secrets, settings, ports, network and volumes.

Nothing of a stack that the user has is read or changed: neither .env, secrets/ and docker-compose.override.yml nor the
images of the default tag. Shared is what `make demo` leaves in the cache, which the services mount read-only.
"""

import json
import os
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from agent_r3.envs.docker import RUN_LABEL, connect, force_removal

ROOT = Path(__file__).parents[2]
TAG = "tests"  # of the images
STEPS, GROUPS, SAMPLES = 3, 5, 4
SHORT_RUN = {
    "AGENT_R3__TRAIN__STEPS": str(STEPS),
    "AGENT_R3__TRAIN__DIAGNOSTICS_TRAJECTORIES": "8",
    "AGENT_R3__ROLLOUT__GROUPS_PER_STEP": str(GROUPS),
    "AGENT_R3__ROLLOUT__SAMPLES_PER_TASK": str(SAMPLES),
    "AGENT_R3__ROLLOUT__CONCURRENCY": str(2 * SAMPLES),  # two groups: no worker can take all of a step at once
    "AGENT_R3__SANDBOX__WARM": "4",
}

_BUILD_S = 1800
_PROJECT_LABEL = "com.docker.compose.project"
_SERVICE_LABEL = "com.docker.compose.service"
_KEPT = ("PATH", "HOME", "DOCKER_CONFIG", "DOCKER_HOST", "DOCKER_CONTEXT")  # all else would go before .env

# What a worker does to get a sandbox. It answers each line of standard input, a command, and gives it back at its end.
_AGENT = """
import asyncio, json, sys
from pathlib import Path
from agent_r3.config import load_config
from agent_r3.envs.backend import open_backend
from agent_r3.envs.datasets import load_tasks
from agent_r3.metrics import setup_logging

async def main():
    setup_logging()
    config = load_config(Path("/etc/agent-r3/config.yaml"))
    task = load_tasks(config.tasks)[0]
    async with open_backend(config.sandbox, config.grading, run=config.run.name, owner="probe") as backend:
        sandbox = await backend.provider.acquire(task)
        try:
            print(json.dumps(sandbox.id), flush=True)
            while line := await asyncio.to_thread(sys.stdin.readline):
                done = await sandbox.exec(json.loads(line), timeout_s=60)
                print(json.dumps([done.exit_code, done.text]), flush=True)
        finally:
            await sandbox.close()

asyncio.run(main())
"""


@dataclass(frozen=True, slots=True)
class Container:
    """One replica of a service, as `docker inspect` saw it."""

    id: str
    service: str
    state: str  # running, exited, restarting, ...
    health: str | None
    exit_code: int
    restarts: int
    addresses: Mapping[str, str]  # by network; of running ones
    facts: Mapping[str, Any]

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "Container":
        state = facts["State"]
        networks = facts["NetworkSettings"]["Networks"]
        return cls(
            id=facts["Id"],
            service=facts["Config"]["Labels"][_SERVICE_LABEL],
            state=state["Status"],
            health=(state.get("Health") or {}).get("Status"),
            exit_code=state["ExitCode"],
            restarts=facts["RestartCount"],
            addresses={name: network["IPAddress"] for name, network in networks.items() if network["IPAddress"]},
            facts=facts,
        )

    @property
    def hostname(self) -> str:
        """Which is the name of a worker."""
        return str(self.facts["Config"]["Hostname"])

    @property
    def said(self) -> tuple[str, ...]:
        """Output of the last health checks, the latest at the end; Docker keeps five."""
        checks = (self.facts["State"].get("Health") or {}).get("Log") or ()
        return tuple(check["Output"].strip() for check in checks)

    def describe(self) -> str:
        said = self.said[-1] if self.said else ""
        return f"{self.service} {self.id[:12]}: {self.state} ({self.exit_code}), {self.health}: {said}"


class AgentSandbox:
    """A sandbox as an agent has it: acquired by a worker from the broker. `name` is its container's."""

    def __init__(self, process: subprocess.Popen[str], errors: Path) -> None:
        self._process, self._errors = process, errors
        self.name = str(self._answer())

    def run(self, command: str) -> str:
        """Output of a command that succeeds."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        code, text = self._answer()
        assert code == 0, text
        return str(text)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the worker's end of the sandbox ended: {self._errors.read_text()[-3000:]}"
        return json.loads(line)


class Stack:
    """One project of docker-compose.yml.

        with Stack(folder, SHORT_RUN) as stack:
            stack.up("--scale", "rollout=2")
            assert stack.wait_for_exit("trainer", timeout_s=900) == 0

    It is taken down at the end of the block. What does not work is an AssertionError that holds what the services say.
    """

    def __init__(self, folder: Path, settings: Mapping[str, str], overrides: Sequence[Path] = ()) -> None:
        """Makes secrets and .env in the empty `folder`. `settings` are lines of .env.

        `overrides` are laid over docker-compose.yml, in that order.
        """
        self.project = f"agent-r3-test-{uuid.uuid4().hex[:8]}"  # also the run's name, by which its sandboxes are found
        self.folder = folder
        self._files = (ROOT / "docker-compose.yml", *overrides)
        self._api = connect()
        model_of_demo = {name: value for name, value in os.environ.items() if name != "AGENT_R3_MODEL"}
        made = subprocess.run(
            [ROOT / "scripts" / "stack-secrets.sh", folder], env=model_of_demo, capture_output=True, text=True
        )
        assert made.returncode == 0, made.stderr
        lines = {**settings, "AGENT_R3__RUN__NAME": self.project}
        with (folder / ".env").open("a") as env:
            env.write("\n" + "".join(f"{name}={value}\n" for name, value in lines.items()))
        self.status_port, self.prometheus_port = _free_ports(2)
        self._env = {name: os.environ[name] for name in _KEPT if name in os.environ} | {
            "AGENT_R3_ENV_FILE": str(folder / ".env"),
            "AGENT_R3_SECRETS": str(folder / "secrets"),
            "AGENT_R3_TAG": TAG,
            "STATUS_PORT": str(self.status_port),
            "PROMETHEUS_PORT": str(self.prometheus_port),
        }
        self.started_s = time.time()

    def __enter__(self) -> "Stack":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.down()
        finally:
            for sandbox in self.sandboxes():
                force_removal(self._api, sandbox["Id"])
            self._api.close()

    def secrets(self) -> dict[str, str]:
        return {path.name: path.read_text() for path in (self.folder / "secrets").iterdir()}

    def compose(self, *arguments: str, timeout_s: float = 120) -> str:
        """Output of `docker compose ARGUMENTS`. Fails with what every service says."""
        done = self.attempt(*arguments, timeout_s=timeout_s)
        assert done.returncode == 0, f"{_shown(arguments)}: {done.stderr[-3000:]}\n{self.describe()}"
        return done.stdout

    def attempt(
        self, *arguments: str, env: Mapping[str, str] | None = None, timeout_s: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """`docker compose ARGUMENTS`, however it ends. What `env` sets goes before .env."""
        files = [part for file in self._files for part in ("-f", str(file))]
        command = ["docker", "compose", "-p", self.project, "--env-file", str(self.folder / ".env"), *files, *arguments]
        env = {**self._env, **(env or {})}
        try:
            return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{_shown(arguments)} took longer than {timeout_s:.0f} s\n{self.describe()}") from None

    def up(self, *options: str, timeout_s: float = 600) -> None:
        """`docker compose up --wait`: returns when every service was healthy."""
        self.started_s = time.time()
        patience = ("--wait", "--wait-timeout", f"{timeout_s:.0f}")
        self.compose("up", *patience, *options, timeout_s=timeout_s + 60)

    def down(self) -> None:
        """`docker compose down -v`. Harmless a second time."""
        self.compose("down", "-v", "--remove-orphans", timeout_s=300)

    def ps(self) -> list[Container]:
        """Every container of the project by service, ended ones too."""
        found = self._api.containers(all=True, filters={"label": f"{_PROJECT_LABEL}={self.project}"})
        containers = [Container.of(self._api.inspect_container(container["Id"])) for container in found]
        return sorted(containers, key=lambda container: (container.service, container.id))

    def of(self, service: str) -> list[Container]:
        """The service's replicas."""
        return [container for container in self.ps() if container.service == service]

    def inspect_network(self, name: str) -> Mapping[str, Any]:
        """The project's network of that name in docker-compose.yml."""
        facts: Mapping[str, Any] = self._api.inspect_network(f"{self.project}_{name}")
        return facts

    def sandboxes(self) -> list[Mapping[str, Any]]:
        """The run's sandboxes that are there, as `docker ps` shows them."""
        mine = {"label": f"{RUN_LABEL}={self.project}"}
        found: list[Mapping[str, Any]] = self._api.containers(all=True, filters=mine)
        return found

    def left_over(self) -> dict[str, list[str]]:
        """What there is of the project, by kind; {} when nothing is."""
        mine = {"label": f"{_PROJECT_LABEL}={self.project}"}
        found = {
            "containers": [container["Id"] for container in self._api.containers(all=True, filters=mine)],
            "networks": [network["Name"] for network in self._api.networks(filters=mine)],
            "volumes": [volume["Name"] for volume in self._api.volumes(filters=mine)["Volumes"] or ()],
            "sandboxes": [sandbox["Id"] for sandbox in self.sandboxes()],
        }
        return {kind: names for kind, names in found.items() if names}

    def logs(self, container: Container, *, tail: int | str = "all") -> str:
        text: bytes = self._api.logs(container.id, tail=tail)
        return text.decode(errors="replace")

    def describe(self) -> str:
        """For a failure: how every container is, what its health check says, and the end of its log."""
        return "\n".join(f"--- {found.describe()}\n{self.logs(found, tail=25)}" for found in self.ps())

    def exec(self, container: Container, *command: str, timeout_s: float = 60) -> str:
        """Output of a command that succeeds in a running container, as the service's user."""
        done = subprocess.run(
            ["docker", "exec", container.id, *command], capture_output=True, text=True, timeout=timeout_s
        )
        assert done.returncode == 0, f"{container.describe()}: {done.stdout[-1000:]}{done.stderr[-3000:]}"
        return done.stdout

    def python(self, container: Container, source: str, *arguments: str) -> Any:
        """What a program that runs in a role's container prints last, as JSON."""
        return json.loads(self.exec(container, "python3", "-c", source, *arguments).splitlines()[-1])

    def fetch(self, path: str, to: Path) -> None:
        """Copy a file or folder of the volume `runs`, as docs/stack.md says how."""
        self.compose("cp", f"status:{path}", str(to))

    def wait_for_exit(self, service: str, *, timeout_s: float) -> int:
        """Exit status of a service that ends by itself; fails at once when it is ill, or anything has crashed."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = self.ps()
            [awaited] = [container for container in found if container.service == service]
            if awaited.state == "exited":
                return awaited.exit_code
            crashed = [
                container.describe() for container in found if container.state != "running" or container.restarts
            ]
            assert not crashed and awaited.health != "unhealthy", f"{crashed}\n{self.describe()}"
            assert time.monotonic() < deadline, f"{service} goes on after {timeout_s:.0f} s\n{self.describe()}"
            time.sleep(1)

    def wait_for_check(self, service: str, health: str, says: str, *, timeout_s: float = 120) -> Container:
        """The service's only container, once it is `health` and its latest health check says `says`."""
        deadline = time.monotonic() + timeout_s
        while True:
            [found] = self.of(service)
            if found.health == health and found.said and says in found.said[-1]:
                return found
            assert time.monotonic() < deadline, f"{service} is not {health}: {says!r}\n{self.describe()}"
            time.sleep(0.5)

    def series(self, expression: str) -> list[Mapping[str, Any]]:
        """What Prometheus has for a PromQL expression, from the start of the stack until now, every five seconds."""
        answer = httpx.get(
            f"http://127.0.0.1:{self.prometheus_port}/api/v1/query_range",
            params={"query": expression, "start": self.started_s, "end": time.time(), "step": 5},
            timeout=30,
            trust_env=False,
        )
        assert answer.status_code == 200, f"{expression}: {answer.text}"
        found: list[Mapping[str, Any]] = answer.json()["data"]["result"]
        return found

    @contextmanager
    def sandbox(self) -> Iterator[AgentSandbox]:
        """A sandbox that a worker of this stack acquires from its broker."""
        worker, errors = self.of("rollout")[0], self.folder / "sandbox.err"
        command = ["docker", "exec", "-i", worker.id, "python3", "-c", _AGENT]
        with (
            errors.open("w") as stderr,
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
            ) as process,
        ):
            # On leaving, Popen closes standard input, at which the worker's end closes the sandbox, and waits for that.
            yield AgentSandbox(process, errors)


def build_images() -> None:
    """The images of this checkout under `TAG`; layers that are there already are taken."""
    command, env = [ROOT / "scripts" / "images.sh"], {**os.environ, "AGENT_R3_TAG": TAG}
    built = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_BUILD_S)
    assert built.returncode == 0, built.stderr[-3000:]


def _shown(arguments: Sequence[str]) -> str:
    return f"`docker compose {' '.join(arguments)}`"


def _free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(found.getsockname()[1]) for found in sockets]
