"""What our sandboxes are compared with: the Docker SDK's exec_run, mini-swe-agent and SWE-ReX.

The two frameworks are installed from PyPI, at pinned releases, into an environment of their own in the cache, and
driven there by sandbox_driver.py. SWE-ReX talks to a server inside the container: the image of all measurements is a
task's image with that server in /opt. Its port is published on a bridge network that is made for the run.
"""

import contextlib
import io
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import docker
import requests
from docker.errors import BuildError, DockerException

from agent_r3.envs.cache import cache_dir
from agent_r3.envs.images import digest
from agent_r3.envs.sdists import configured_index
from agent_r3.errors import UserError, boundary

VERSIONS = {"mini-swe-agent": "2.4.6", "swe-rex": "1.4.0"}
LABEL = "agent_r3.bench"
_DRIVER = Path(__file__).with_name("sandbox_driver.py")
_DOCKERFILE = f"""
ARG BASE_IMAGE
FROM ${{BASE_IMAGE}}
ARG PIP_INDEX_URL
RUN if [ -f /etc/ssl/certs/ca-certificates.crt ]; then export PIP_CERT=/etc/ssl/certs/ca-certificates.crt; fi \\
 && python3 -m venv /opt/swe-rex \\
 && /opt/swe-rex/bin/pip install --quiet --no-cache-dir --disable-pip-version-check swe-rex=={VERSIONS["swe-rex"]} \\
 && ln -s /opt/swe-rex/bin/swerex-remote /usr/local/bin/swerex-remote
"""


class Peers:
    """Containers of all of them carry `label`, and are removed at the end with the network. A context manager."""

    def __init__(self, base_image: str, run: str, say: Callable[[str], None]) -> None:
        with boundary(UserError, "no Docker engine answers", DockerException, requests.RequestException):
            self._docker = docker.DockerClient.from_env(timeout=120, max_pool_size=64)
        self._label = f"{LABEL}={run}"
        self._network = f"agent-r3-{run}"
        self._say = say
        self.image = self._build(base_image)
        self._python = install_peers(say)

    def __enter__(self) -> "Peers":
        self._docker.networks.create(self._network, driver="bridge", labels={LABEL: "1"})
        return self

    def __exit__(self, *exc_info: object) -> None:
        for container in self._docker.containers.list(all=True, ignore_removed=True, filters={"label": self._label}):
            with contextlib.suppress(DockerException):  # it may be going by itself
                container.remove(force=True)
        for network in self._docker.networks.list(names=[self._network]):
            network.remove()
        self._docker.close()

    def engine(self) -> str:
        """The engine's version, storage driver and runtime."""
        info = self._docker.info()
        return f"{info['ServerVersion']} {info['Driver']} {info['DefaultRuntime']}"

    @contextlib.contextmanager
    def sdk(self, containers: int) -> Iterator["Sdk"]:
        """The Docker SDK and containers that do nothing of their own."""

        def start(_: int) -> Any:
            return self._docker.containers.run(
                self.image, ["sleep", "infinity"], detach=True, init=True, network_mode="none",
                working_dir="/testbed", labels=dict([self._label.split("=")]),
            )  # fmt: skip

        with ThreadPoolExecutor(4) as threads:
            started = list(threads.map(start, range(containers)))
            try:
                yield Sdk(started)
            finally:
                list(threads.map(lambda container: container.remove(force=True), started))

    @contextlib.contextmanager
    def framework(self, name: str, containers: int) -> Iterator["Framework"]:
        """`mini_swe_agent` or `swe_rex` with its containers, in a process of its own."""
        arguments = [name, "--image", self.image, "--network", self._network, "--label", self._label]
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                [self._python, "-I", _DRIVER, *arguments, "--containers", str(containers)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip
            try:
                framework = Framework(name, process, errors)
                framework.answer()  # ready
                yield framework
                process.communicate(timeout=120)
            finally:
                process.kill()
                process.wait()

    def _build(self, base_image: str) -> str:
        tag = f"agent-r3/bench:{digest(base_image, _DOCKERFILE)}"
        if self._docker.images.list(tag):
            return tag
        self._say(f"building {tag}: {base_image} with SWE-ReX's server (once)")
        arguments = {"BASE_IMAGE": base_image, **({"PIP_INDEX_URL": index} if (index := configured_index()) else {})}
        try:
            self._docker.images.build(
                fileobj=io.BytesIO(_DOCKERFILE.encode()), tag=tag, buildargs=arguments, network_mode="host", rm=True,
                forcerm=True, labels={"agent-r3.image": "1"},
            )  # fmt: skip
        except BuildError as exc:
            log = "".join(str(event.get("stream", "")) for event in exc.build_log)
            raise UserError(f"build {tag}: {' '.join(log.split())[-700:]}") from exc
        return tag


def install_peers(say: Callable[[str], None]) -> str:
    """The interpreter of an environment that holds exactly VERSIONS and what they need."""
    folder = cache_dir() / "bench-venv"
    stamp, wanted = folder / "installed.json", json.dumps(VERSIONS)
    python = str(folder / "bin" / "python")
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    pins = [f"{name}=={version}" for name, version in VERSIONS.items()]
    say(f"installing {' and '.join(pins)} into {folder} (once)")
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *pins],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            raise UserError(f"{' '.join(command[:4])} failed: {' '.join(done.stderr.split())[-500:]}")
    stamp.write_text(wanted)
    return python


class Sdk:
    """docker-py's exec_run, one thread a container."""

    def __init__(self, containers: list[Any]) -> None:
        self._containers = containers

    def measure(self, kind: str, containers: int, commands: int) -> list[float]:
        """Milliseconds of each command; `kind` is always `fresh`."""
        with ThreadPoolExecutor(containers) as threads:
            parts = threads.map(lambda container: _exec_run(container, commands), self._containers[:containers])
            return [ms for part in parts for ms in part]


class Framework:
    """The other end of sandbox_driver.py."""

    def __init__(self, name: str, process: subprocess.Popen[str], errors: IO[bytes]) -> None:
        self._name = name
        self._process = process
        self._errors = errors

    def measure(self, kind: str, containers: int, commands: int) -> list[float]:
        """Milliseconds of each command."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{kind} {containers} {commands}\n")
        self._process.stdin.flush()
        taken: list[float] = json.loads(self.answer())
        return taken

    def answer(self) -> str:
        """The next line that is ours: SWE-ReX prints, too. Raises RuntimeError when the process has ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(("ready", "[")):
                return line
        self._errors.seek(0)
        raise RuntimeError(f"{self._name} ended: {self._errors.read().decode(errors='replace')[-3000:]}")


def _exec_run(container: Any, commands: int) -> list[float]:
    taken = []
    for _ in range(commands):
        began = time.perf_counter()
        code, output = container.exec_run(["bash", "-c", "true"])
        taken.append((time.perf_counter() - began) * 1e3)
        if code != 0:
            raise RuntimeError(f"exec_run ended with {code}: {output!r}")
    return taken
