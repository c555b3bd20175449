"""What the stack starts with: the script that makes its secrets, and the wrapper around each role."""

import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SERVICE = ROOT / "docker" / "service.py"
SECRETS = ("redis_password", "broker_token", "grafana_password")


def make_secrets(folder: Path, socket_path: Path, model: str = "") -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "DOCKER_SOCKET": str(socket_path), "AGENT_R3_CACHE": "/some/cache", "AGENT_R3_MODEL": model}
    command = [str(ROOT / "scripts" / "stack-secrets.sh"), str(folder)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=30, check=False)


@pytest.fixture
def docker_socket(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "d.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        yield path


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    return str(tmp_path / "model")


def test_secrets_are_made_once_and_never_overwritten(tmp_path: Path, docker_socket: Path, model: str) -> None:
    assert make_secrets(tmp_path, docker_socket, model).returncode == 0
    secrets = {name: tmp_path / "secrets" / name for name in SECRETS}
    first = {name: path.read_text() for name, path in secrets.items()}
    assert len(set(first.values())) == len(first) and all(len(text) == 64 for text in first.values())
    assert stat.S_IMODE((tmp_path / "secrets").stat().st_mode) == 0o700
    settings = (tmp_path / ".env").read_text()
    for line in (f"DOCKER_GID={docker_socket.stat().st_gid}", "AGENT_R3_CACHE=/some/cache", f"AGENT_R3_MODEL={model}"):
        assert f"\n{line}\n" in settings

    secrets["broker_token"].unlink()
    (tmp_path / ".env").write_text("MINE=1\n")
    assert make_secrets(tmp_path, docker_socket, model).returncode == 0
    again = {name: path.read_text() for name, path in secrets.items()}
    assert (tmp_path / ".env").read_text() == "MINE=1\n"
    assert again.pop("broker_token") != first.pop("broker_token") and again == first


def test_a_missing_model_is_said_in_one_line(tmp_path: Path, docker_socket: Path) -> None:
    made = make_secrets(tmp_path, docker_socket)  # looks for the tiny policy, in a cache that has none
    assert made.returncode == 2 and not (tmp_path / ".env").exists()
    assert len(made.stderr.splitlines()) == 1 and "/some/cache/models/tiny-" in made.stderr


def test_a_model_that_the_services_cannot_read_is_refused(tmp_path: Path, docker_socket: Path, model: str) -> None:
    (tmp_path / "model" / "model.safetensors").touch(0o600)
    made = make_secrets(tmp_path, docker_socket, model)
    assert made.returncode == 2 and made.stderr.splitlines() == [
        f"stack-secrets: the services' user cannot read all of {model}: chmod -R o+rX {model}"
    ]


def test_a_missing_docker_socket_is_said_in_one_line(tmp_path: Path) -> None:
    made = make_secrets(tmp_path, tmp_path / "none.sock")
    assert made.returncode == 2
    assert made.stderr.splitlines() == [
        f"stack-secrets: there is no Docker socket at {tmp_path}/none.sock; start Docker, or set DOCKER_SOCKET"
    ]


def run_role(script: str, tmp_path: Path) -> subprocess.Popen[str]:
    code = f"import sys; sys.path.insert(0, {str(SERVICE.parent)!r}); import pathlib, service\n"
    code += (
        f"sys.exit(service.run(['sh', '-c', {script!r}], pause_s=0.05, said=pathlib.Path({str(tmp_path / 'said')!r})))"
    )
    return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(tmp_path: Path, *urls: str) -> tuple[int, str]:
    code = f"import sys; sys.path.insert(0, {str(SERVICE.parent)!r}); import pathlib, service\n"
    code += f"sys.exit(service.health({list(urls)!r}, said=pathlib.Path({str(tmp_path / 'said')!r})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    return done.returncode, done.stdout


@pytest.mark.parametrize(("script", "status"), [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137)])
def test_the_end_of_a_role_is_the_end_of_its_container(script: str, status: int, tmp_path: Path) -> None:
    assert run_role(script, tmp_path).wait(30) == status


def test_a_role_that_says_what_to_mend_is_tried_again_and_its_line_is_the_answer(tmp_path: Path) -> None:
    mended = tmp_path / "mended"
    process = run_role(f"[ -e {mended} ] && exit 0; echo noise >&2; echo the password is wrong >&2; exit 2", tmp_path)
    assert process.stderr is not None
    lines = [process.stderr.readline() for _ in range(4)]  # two tries: it did not end with the first
    assert lines == ["noise\n", "the password is wrong\n"] * 2
    status, said = ask(tmp_path, "http://127.0.0.1:1/healthz")
    assert (status, said) == (1, "the password is wrong\n")
    mended.touch()
    assert process.wait(30) == 0


def test_sigterm_reaches_the_role_and_its_status_is_kept(tmp_path: Path) -> None:
    process = run_role('trap "exit 7" TERM; echo ready >&2; while :; do sleep 0.05; done', tmp_path)
    assert process.stderr is not None and process.stderr.readline() == "ready\n"
    process.terminate()
    assert process.wait(30) == 7


class _Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status, body = (200, b"ok\n") if self.path == "/well" else (503, b"redis is away\n")
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@pytest.fixture
def role_url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_health_needs_every_url_and_shows_what_an_unhealthy_one_says(role_url: str, tmp_path: Path) -> None:
    assert ask(tmp_path, f"{role_url}/well") == (0, "ok\n")
    assert ask(tmp_path, f"{role_url}/well", f"{role_url}/ill") == (1, f"{role_url}/ill: 503 redis is away\n")


def test_health_of_a_role_that_is_still_starting(tmp_path: Path) -> None:
    status, said = ask(tmp_path, "http://127.0.0.1:1/healthz")
    assert status == 1 and said.startswith("http://127.0.0.1:1/healthz: ") and len(said.splitlines()) == 1
