"""Command round trips of mini-swe-agent or SWE-ReX. Runs in their environment and imports nothing of ours.

Starts its containers, writes `ready`, then answers each line `KIND CONTAINERS COMMANDS` of its input with the
milliseconds of every command, as a JSON list. KIND is `fresh`, `true` in a fresh bash, or `session`, the same in
SWE-ReX's persistent one. The environments are theirs, with their defaults, except for network and labels.
"""

import argparse
import asyncio
import json
import logging
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_AT_ONCE = 4  # containers that start at the same time


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("peer", choices=["mini_swe_agent", "swe_rex"])
    parser.add_argument("--image", required=True)
    parser.add_argument("--network", required=True, help="Docker network with published ports, for SWE-ReX")
    parser.add_argument("--label", required=True, help="KEY=VALUE on every container")
    parser.add_argument("--containers", type=int, required=True)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    peer = MiniSweAgent(options) if options.peer == "mini_swe_agent" else SweRex(options)
    try:
        peer.start()
        print("ready", flush=True)
        for line in sys.stdin:
            kind, containers, commands = line.split()
            print(json.dumps(peer.measure(kind, int(containers), int(commands))), flush=True)
    finally:
        peer.stop()


class MiniSweAgent:
    """DockerEnvironment.execute: `docker exec` for each command, one thread a container."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._environments: list[Any] = []

    def start(self) -> None:
        from minisweagent.environments.docker import DockerEnvironment  # type: ignore[import-not-found]

        run_args = ["--rm", "--network", "none", "--label", self._options.label]

        def one(_: int) -> Any:
            return DockerEnvironment(image=self._options.image, cwd="/testbed", run_args=run_args)

        with ThreadPoolExecutor(_AT_ONCE) as threads:
            self._environments += threads.map(one, range(self._options.containers))

    def measure(self, kind: str, containers: int, commands: int) -> list[float]:
        def one(environment: Any) -> list[float]:
            taken = []
            for _ in range(commands):
                began = time.perf_counter()
                result = environment.execute({"command": "true"})
                taken.append((time.perf_counter() - began) * 1e3)
                if result["returncode"] != 0:
                    raise RuntimeError(f"mini-swe-agent: {result}")
            return taken

        with ThreadPoolExecutor(containers) as threads:
            return [ms for part in threads.map(one, self._environments[:containers]) for ms in part]

    def stop(self) -> None:
        for environment in self._environments:  # its own clean-up waits 10 s for a PID 1 that does not listen
            subprocess.run(["docker", "rm", "-f", environment.container_id], capture_output=True, check=False)
            environment.container_id = None


class SweRex:
    """DockerDeployment: HTTP to a server in the container, through a published port."""

    def __init__(self, options: argparse.Namespace) -> None:
        from swerex.deployment.docker import DockerDeployment  # type: ignore[import-not-found]

        docker_args = ["--network", options.network, "--label", options.label]
        self._deployments = [
            DockerDeployment(image=options.image, pull="never", port=port, docker_args=docker_args)
            for port in free_ports(options.containers)
        ]

    def start(self) -> None:
        # Each in an event loop of its own: start() sleeps without giving way, and several of them in one loop time each
        # other out for good.
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            list(threads.map(lambda deployment: asyncio.run(self._start(deployment)), self._deployments))

    async def _start(self, deployment: Any) -> None:
        from swerex.runtime.abstract import CreateBashSessionRequest  # type: ignore[import-not-found]

        await deployment.start()
        await deployment.runtime.create_session(CreateBashSessionRequest(startup_timeout=30))

    def measure(self, kind: str, containers: int, commands: int) -> list[float]:
        async def all_of_them() -> list[float]:
            parts = await asyncio.gather(*(self._one(d, kind, commands) for d in self._deployments[:containers]))
            return [ms for part in parts for ms in part]

        return asyncio.run(all_of_them())

    async def _one(self, deployment: Any, kind: str, commands: int) -> list[float]:
        from swerex.runtime.abstract import BashAction, Command

        taken = []
        for _ in range(commands):
            began = time.perf_counter()
            if kind == "session":
                answer = await deployment.runtime.run_in_session(BashAction(command="true", timeout=60))
            else:
                answer = await deployment.runtime.execute(Command(command=["bash", "-c", "true"], timeout=60))
            taken.append((time.perf_counter() - began) * 1e3)
            if answer.exit_code != 0:
                raise RuntimeError(f"SWE-ReX: {answer}")
        return taken

    def stop(self) -> None:
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            list(threads.map(lambda deployment: asyncio.run(deployment.stop()), self._deployments))


def free_ports(count: int) -> list[int]:
    """All bound at the same time, so that no two are equal."""
    probes = [socket.create_server(("", 0)) for _ in range(count)]
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


if __name__ == "__main__":
    main()
