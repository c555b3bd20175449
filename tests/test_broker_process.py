"""The broker as users run it, over real containers: what is left when a client or the broker is killed."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import docker
import pytest
import yaml

from agent_r3.cli.main import main
from agent_r3.config import GradingConfig, SandboxConfig
from agent_r3.envs.backend import open_backend
from agent_r3.envs.broker_client import check_broker
from agent_r3.errors import BrokerError
from agent_r3.types import Task
from tests.support.broker import BrokerProcess, broker_at, broker_process
from tests.support.docker import containers_of, make_task
from tests.support.r2e_rows import r2e_row

pytestmark = pytest.mark.docker

TOKEN = "a-token-of-some-length"

CLIENT = """
import asyncio, sys
from agent_r3.config import GradingConfig, SandboxConfig
from agent_r3.envs.backend import open_backend
from tests.support.docker import make_task

async def main():
    config = SandboxConfig(broker=sys.argv[1])
    async with open_backend(config, GradingConfig(), run="test", owner="client") as (provider, _):
        sandbox = await provider.acquire(make_task("an image that is not known here", name="task"))
        print(sandbox.id, flush=True)
        await sandbox.exec("trap '' TERM; sleep 1000", timeout_s=1000)

asyncio.run(main())
"""


async def until(condition: str, holds: Callable[[], bool], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {condition}"
        await asyncio.sleep(0.05)


@pytest.fixture
def broker(tmp_path: Path, run_name: str, sandbox_image: str) -> Iterator[BrokerProcess]:
    """A broker process of `task`, and `held` to evaluate on; the run's containers are gone afterwards, or it fails."""
    rows, held = tmp_path / "rows.jsonl", tmp_path / "held.jsonl"
    for path, name in ((rows, "task"), (held, "held")):
        path.write_text(json.dumps(r2e_row(docker_image=sandbox_image, instance_id=name)))
    sections: Mapping[str, Any] = {
        "run": {"name": run_name},
        "tasks": {"dataset": str(rows)},
        "eval": {"tasks": {"dataset": str(held)}},
        "sandbox": {"kind": "docker", "broker": "unix:///nowhere/at/all"},
    }
    with broker_process(tmp_path, sections) as started:
        yield started


@contextmanager
def client_process(broker: BrokerProcess) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """A client that knows no Docker engine, and its sandbox, in which a command runs."""
    env = {**os.environ, "DOCKER_HOST": "unix:///nowhere.sock"}
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT, broker.address],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as client:
        try:
            assert client.stdout is not None
            yield client, client.stdout.readline().strip()
        finally:
            client.kill()


async def test_a_killed_client_leaves_nothing_and_harms_nobody(
    broker: BrokerProcess, run_name: str, docker_engine: docker.APIClient
) -> None:
    async with open_backend(SandboxConfig(broker=broker.address), GradingConfig(), run="test", owner="survivor") as (
        provider,
        _,
    ):
        survivor = await provider.acquire(make_task("x", name="task"))
        with client_process(broker) as (client, name):
            assert name.startswith("agent-r3-") and len(containers_of(docker_engine, run_name)) == 2
            client.send_signal(signal.SIGKILL)
            await until("its container is gone", lambda: len(containers_of(docker_engine, run_name)) == 1)
        assert (await survivor.exec("echo unharmed", timeout_s=20)).output == b"unharmed\n"
        assert docker_engine.inspect_container(survivor.id)["State"]["Running"]


async def test_a_broker_that_is_told_to_stop_closes_everything(
    broker: BrokerProcess, run_name: str, docker_engine: docker.APIClient
) -> None:
    with client_process(broker) as (client, _):
        broker.process.terminate()
        assert broker.process.wait(20) == 0
        assert containers_of(docker_engine, run_name) == []
        assert not Path(broker.address.removeprefix("unix://")).exists()
        assert "BrokerError: " in client.communicate(timeout=20)[1]
    # What the client still asks for before it learns of its lease's end may be refused.
    lines = [line for line in broker.audit() if line["event"] not in ("exec", "refused")]
    events = [(line["event"], line.get("outcome")) for line in lines]
    assert events == [("listening", None), ("lease", None), ("acquire", "ok"), ("lease ended", None), ("stopped", None)]


async def test_a_killed_broker_leaves_nothing_and_its_clients_know(
    broker: BrokerProcess, run_name: str, docker_engine: docker.APIClient
) -> None:
    async with open_backend(SandboxConfig(broker=broker.address), GradingConfig(), run="test", owner="client") as (
        provider,
        _,
    ):
        sandbox = await provider.acquire(make_task("x", name="task"))
        running = asyncio.create_task(sandbox.exec("sleep 1000", timeout_s=1000))
        await asyncio.sleep(0.2)
        broker.process.kill()
        for call in (running, sandbox.exec("true", timeout_s=5), sandbox.diff()):
            with pytest.raises(BrokerError):
                await call
        await sandbox.close()
    await until("no container is left", lambda: not containers_of(docker_engine, run_name))


async def test_from_inside_a_sandbox_no_broker_can_be_reached(
    run_name: str, sandbox_task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENT_R3_BROKER_TOKEN", TOKEN)
    with socket.create_server(("0.0.0.0", 0)) as probe:
        port = probe.getsockname()[1]
    path = tmp_path / "broker.sock"
    unix, tcp = SandboxConfig(broker=f"unix://{path}"), SandboxConfig(broker=f"http://0.0.0.0:{port}")
    addresses = {"127.0.0.1", "172.17.0.1", socket.gethostbyname(socket.gethostname())}
    async with (
        open_backend(SandboxConfig(kind="docker"), GradingConfig(), run=run_name, owner="test") as behind,
        broker_at(unix, behind, [sandbox_task]),
        broker_at(tcp, behind, [sandbox_task]),
        open_backend(unix, GradingConfig(), run="test", owner="client") as (provider, _),
    ):
        for address in addresses:
            with socket.create_connection((address, port), 5):
                pass  # it can be reached from here
        sandbox = await provider.acquire(sandbox_task)
        attempts = (
            "import socket, sys\n"
            f"for address in {sorted(addresses)!r}:\n"
            f"    try: socket.create_connection((address, {port}), 3); print('reached', address)\n"
            "    except OSError as exc: print(type(exc).__name__)\n"
            f"for path in ({str(path)!r}, '/var/run/docker.sock', '/run/docker.sock'):\n"
            "    try: socket.socket(socket.AF_UNIX).connect(path); print('reached', path)\n"
            "    except OSError as exc: print(type(exc).__name__)\n"
        )
        result = await sandbox.exec("python3 -", timeout_s=60, stdin=attempts.encode())
        assert result.exit_code == 0 and len(result.text.splitlines()) == len(addresses) + 3, result.text
        assert "reached" not in result.text
        told = await sandbox.exec("env; cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline", timeout_s=20)
        assert TOKEN.encode() not in told.output and b"AGENT_R3" not in told.output


async def test_grades_through_the_broker_are_the_graders_own(
    pathspec_task: Task, run_name: str, tmp_path: Path
) -> None:
    config = SandboxConfig(broker=f"unix://{tmp_path}/broker.sock")
    local = SandboxConfig(kind="docker")
    async with (
        open_backend(local, GradingConfig(reuse=False), run=run_name, owner="test") as behind,
        broker_at(config, behind, [pathspec_task]),
        open_backend(config, GradingConfig(), run="test", owner="client") as (_, grader),
    ):
        patches = (b"", pathspec_task.gold_patch.encode())
        asked = [which.grade(pathspec_task, patch) for which in (grader, behind.grader) for patch in patches]
        noop, gold, *direct = await asyncio.gather(*asked)
        assert (noop.reward, gold.reward) == (0.0, 1.0)
        for ours, theirs in zip((noop, gold), direct, strict=True):
            assert (ours.reward, ours.statuses, ours.reason) == (theirs.reward, theirs.statuses, theirs.reason)


async def test_a_run_with_a_broker_needs_no_docker(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch, sandbox_task: Task
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    config = SandboxConfig(broker=broker.address)
    await asyncio.to_thread(check_broker, config, [sandbox_task, replace(sandbox_task, id="held")])
    async with open_backend(config, GradingConfig(), run="test", owner="client") as (provider, _):
        sandbox = await provider.acquire(sandbox_task)
        assert (await sandbox.exec("cat plain.py", timeout_s=20)).output == b"one\ntwo\nthree\n"
        assert b"+four" in (await sandbox.exec("echo four >>plain.py; git diff", timeout_s=20)).output
        assert b"+four" in await sandbox.diff()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "give the broker an address: --listen unix:///PATH"),
        (["--listen", "tcp://x:1"], "--listen: 'tcp://x:1' is neither unix:///PATH nor"),
        (["--listen", "http://127.0.0.1:0"], "does not listen at http://127.0.0.1:0 without a token"),
        (["--listen", "unix:///none/x.sock"], "the broker cannot listen at unix:///none/x.sock: No such file"),
        (["--listen", "unix:///x", "--token-file", "/none"], "token file /none cannot be read"),
        (["--listen", "unix:///x", "--audit-log", "/none/x"], "--audit-log /none/x cannot be written"),
    ],
    ids=["nowhere", "scheme", "no-token", "no-folder", "no-token-file", "no-audit-log"],
)
def test_what_the_user_can_mend_is_one_line(
    options: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, config = tmp_path / "rows.jsonl", tmp_path / "config.yaml"
    rows.write_text(json.dumps(r2e_row()))
    config.write_text(yaml.safe_dump({"model": {"path": "tiny"}, "tasks": {"dataset": str(rows)}}))
    monkeypatch.delenv("AGENT_R3_BROKER_TOKEN", raising=False)
    monkeypatch.setattr(sys, "argv", ["agent-r3", "broker", str(config), *options])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("agent-r3: ") and words in err
