"""A Docker engine of the tests' own, beside the user's, which may be stopped, killed and started again.

It has its own data, state, socket and containerd under one folder, and a network namespace of its own: a daemon that
is told to have no bridge removes the interface `docker0`, whosever it is. Needs root.
"""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import docker
import pytest
from docker.errors import DockerException
from requests.exceptions import RequestException

from agent_r3.envs.docker import connect

_START_S = 60
_STOP_S = 40


class PrivateEngine:
    """`url` is for DOCKER_HOST. As a context manager it starts, and leaves no process, mount or container behind.

    `folder` must be short enough for a unix socket in it and lie on a file system that overlay2 can use; its content
    is removed at the end. `arguments` are further ones of dockerd.
    """

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.url = f"unix://{folder}/docker.sock"
        self._arguments = arguments
        self._daemon: subprocess.Popen[bytes] | None = None
        self._main = connect(600)  # the engine of the environment, which images come from

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def start(self) -> None:
        """Start the daemon and wait until it answers."""
        if self._daemon is not None:
            raise RuntimeError("the private engine runs already")
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [
            "unshare", "--net", "sh", "-c", 'ip link set lo up; exec "$0" "$@"',
            "dockerd", "--host", self.url, "--data-root", f"{self.folder}/data", "--exec-root", f"{self.folder}/exec",
            "--pidfile", f"{self.folder}/dockerd.pid", "--bridge=none", "--iptables=false", "--ip-forward=false",
            "--ip-masq=false", *self._arguments,
        ]  # fmt: skip
        with (self.folder / "dockerd.log").open("ab") as log:
            self._daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0)
        deadline = time.monotonic() + _START_S
        while not self._answers():
            if self._daemon.poll() is not None or time.monotonic() > deadline:
                self._daemon.kill()
                self._daemon = None
                tail = (self.folder / "dockerd.log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"the private engine did not start: {tail}")
            time.sleep(0.05)

    def stop(self) -> None:
        """Stop the daemon as a service manager would: its containers are stopped first. Nothing if it does not run."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """kill -9: its containers run on, and nobody can reach them."""
        self._end(signal.SIGKILL)
        # Its containerd dies with it, but not at once, and where PID 1 is slow to collect it, its id stays in use. A
        # new daemon would take it for a living one and wait for its answer.
        deadline = time.monotonic() + 10
        while list(_processes_naming(str(self.folder), "containerd")) and time.monotonic() < deadline:
            time.sleep(0.01)
        (self.folder / "exec/containerd/containerd.pid").unlink(missing_ok=True)

    def freeze(self) -> None:
        """Let it hang: it takes connections and answers none, until `thaw`."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def restart(self, kill: bool = False) -> None:
        self.kill() if kill else self.stop()
        self.start()

    def client(self) -> docker.APIClient:
        """A client of this engine; the caller closes it."""
        return docker.APIClient(base_url=self.url, version="auto", timeout=600)

    def load(self, *images: str) -> None:
        """Copy images of the engine that the environment names, with their tags. About 5 s for 250 MB."""
        client = self.client()
        with contextlib.closing(client), tempfile.TemporaryFile(dir=self.folder) as file:
            for image in images:
                file.seek(0)
                file.truncate()
                for chunk in self._main.get_image(image):
                    file.write(chunk)
                file.seek(0)
                for event in client.load_image(file):
                    assert "error" not in event, event

    @contextlib.contextmanager
    def network(self) -> Iterator[int]:
        """A descriptor of the running daemon's network namespace."""
        if self._daemon is None:
            raise RuntimeError("the private engine does not run")
        fd = os.open(f"/proc/{self._daemon.pid}/ns/net", os.O_RDONLY)
        try:
            yield fd
        finally:
            os.close(fd)

    def processes(self) -> list[int]:
        """Ids of the daemon, its containerd and its shims."""
        return list(_processes_naming(str(self.folder), "dockerd", "containerd", "containerd-shim-runc-v2"))

    def remove(self) -> None:
        """Stop it and remove all that it made. A daemon that was killed is started once more, to end its containers."""
        if self._daemon is None and self.processes():
            self.start()
        if self._daemon is not None:
            with contextlib.closing(self.client()) as client:
                for container in client.containers(all=True, quiet=True):
                    with contextlib.suppress(DockerException, RequestException):
                        client.remove_container(container["Id"], force=True, v=True)
            self.stop()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for mount in sorted(_mounts_under(self.folder), reverse=True):
            subprocess.run(["umount", "--lazy", mount], check=True)
        subprocess.run(["rm", "-rf", str(self.folder)], check=True)
        self._main.close()

    def _answers(self) -> bool:
        try:
            with contextlib.closing(docker.APIClient(base_url=self.url, version="auto", timeout=5)) as client:
                return bool(client.ping())
        except (DockerException, RequestException, OSError):
            return False

    def _signal(self, number: signal.Signals) -> None:
        if self._daemon is None:
            raise RuntimeError("the private engine does not run")
        self._daemon.send_signal(number)

    def _end(self, number: signal.Signals) -> None:
        if self._daemon is not None:
            self._daemon.send_signal(number)
            self._daemon.wait(_STOP_S)
            self._daemon = None


def _processes_naming(folder: str, *executables: str) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            known = entry.name.isdigit() and (entry / "exe").readlink().name in executables
            if known and f"{folder}/".encode() in (entry / "cmdline").read_bytes():
                yield int(entry.name)


def _mounts_under(folder: Path) -> list[str]:
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [point for point in points if point.startswith(f"{folder}/")]


@contextlib.contextmanager
def small_disk(size: str) -> Iterator[Path]:
    """A folder that is a file system of its own."""
    folder = Path(tempfile.mkdtemp(prefix="disk-"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
        folder.rmdir()


@pytest.fixture(scope="session")
def private_engine(docker_engine: docker.APIClient) -> Iterator[PrivateEngine]:
    """A running engine without images; each test that stops it starts it again."""
    folder = Path(tempfile.mkdtemp(prefix="engine-"))
    with PrivateEngine(folder) as engine:
        yield engine
