"""`agent-r3 status --web`: the page is whole by itself, escapes what it shows, and outlives its store."""

import base64
import hashlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from agent_r3.metrics import MetricsWriter
from agent_r3.status_charts import Curve, compact, plot
from agent_r3.status_feed import StatusFeed
from agent_r3.status_server import StatusServer
from agent_r3.store import GroupReader
from agent_r3.store.status_reader import StatusReader
from tests.support.runs import make_run
from tests.support.status import beat, make_live_run
from tests.support.store import RedisServer

HOSTILE = "<img src=x onerror=alert(1)>&\"'"
VOID = {"meta", "br", "link"}


class Page(HTMLParser):
    """Elements of a page; fails on one that is not closed where it must be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def get(url: str) -> tuple[str, Any]:
    """Body and headers."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode(), answer.headers


def shown(server: StatusServer) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(get(f"{server.url}/status.json")[0])
    return found


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "did not come to pass"
        time.sleep(0.02)


@contextmanager
def serving(url: str, run: str = "demo", folder: Path | None = None) -> Iterator[StatusServer]:
    """A server that follows the run from a thread, reading ten times a second."""
    stopped = threading.Event()
    with (
        StatusReader.connect(url) as reader,
        StatusServer(StatusFeed(reader, run, folder, 12), "127.0.0.1", 0, poll_s=0.1) as server,
    ):
        following = threading.Thread(target=server.follow, args=(stopped,))
        following.start()
        try:
            yield server
        finally:
            stopped.set()
            following.join()


async def test_the_page_is_whole_by_itself_and_runs_no_script_but_its_own(embedded_url: str, tmp_path: Path) -> None:
    await make_live_run(embedded_url)
    with serving(embedded_url, folder=make_run(tmp_path / "demo", episodes=0)) as server:
        until(lambda: "Tokens a second" in get(server.url)[0])  # a rate takes two readings
        text, headers = get(server.url)
    page = Page(text)
    assert "worker/b has been silent" in page.text and "http://engine:30000" in page.text
    for title in ("Training reward", "KL between rollout and trainer", "Staleness", "Groups", "Failures by kind"):
        assert f"<h3>{title}</h3>" in text
    assert not [attrs for _, attrs in page.tags if attrs.keys() & {"src", "href", "style", "onerror", "onload"}]
    assert "url(" not in text and "@import" not in text
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = headers["Content-Security-Policy"]
    assert f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy


async def test_what_comes_from_outside_is_text(embedded_url: str) -> None:
    await make_live_run(embedded_url, HOSTILE)
    beat(embedded_url, HOSTILE, f"worker/{HOSTILE}", state=HOSTILE, host=HOSTILE, failures={HOSTILE: 3}, episodes=1)
    with serving(embedded_url, HOSTILE) as server:
        text, _ = get(server.url)
        parts = shown(server)["html"]
    page = Page(text)
    assert "img" not in {tag for tag, _ in page.tags}
    assert page.text.count(HOSTILE) >= 5
    for part in parts.values():
        assert "<img" not in part


async def test_the_page_is_brought_up_to_date_in_place(embedded_url: str, tmp_path: Path) -> None:
    await make_live_run(embedded_url)
    folder = tmp_path / "demo"
    with MetricsWriter(folder, first_step=0) as metrics, serving(embedded_url, folder=folder) as server:
        page = Page(get(server.url)[0])
        ids = {attrs["id"] for _, attrs in page.tags if attrs.get("id")}
        assert shown(server)["html"].keys() == ids
        with GroupReader.connect(embedded_url, "demo") as trainer:
            trainer.set_policy(17, "weights/17")
        metrics.write(0, {"train/reward_mean": 0.375, "eval/pass@1": 0.5, "perf/step_s": float("nan")})
        until(
            lambda: shown(server)["status"]["policy_version"] == 17 and shown(server)["status"]["metrics"] is not None
        )
        found = shown(server)
        history = json.loads(get(f"{server.url}/history.json")[0])
    assert ">17<" in found["html"]["tiles"] and "0.375" in found["html"]["tiles"]
    assert "Pass@1 on the held set" in found["html"]["figures"]
    assert found["status"]["metrics"]["perf/step_s"] is None
    assert {sample["policy_version"] for sample in history} == {3, 17}
    assert found["status"]["steps"] == 12


async def test_without_the_runs_folder_the_reward_is_that_of_the_groups_seen(embedded_url: str) -> None:
    await make_live_run(embedded_url)
    with serving(embedded_url) as server:
        figures = shown(server)["html"]["figures"]
    assert "Mean of a group" in figures and figures.count("mean reward: ") == 3


async def test_a_store_that_goes_away_is_told_and_read_again_when_it_is_back(tmp_path: Path) -> None:
    store = RedisServer(tmp_path)
    store.start()
    await make_live_run(store.url)
    with serving(store.url) as server:
        store.kill()
        until(lambda: shown(server)["problem"] is not None)
        found = shown(server)
        assert "since then: store: " in found["html"]["live"]
        assert found["status"]["policy_version"] == 3
        store.start()
        until(lambda: shown(server)["problem"] is None)
        assert "since then" not in shown(server)["html"]["live"]
    store.kill()


async def test_another_path_is_not_there(embedded_url: str) -> None:
    await make_live_run(embedded_url)
    with serving(embedded_url) as server, pytest.raises(urllib.error.HTTPError, match="404"):
        get(f"{server.url}/etc/passwd")


async def test_the_command_serves_until_a_signal_and_names_a_port_in_use(redis_server: RedisServer) -> None:
    await make_live_run(redis_server.url)
    command = [sys.executable, "-m", "agent_r3.cli", "status", "--store", redis_server.url, "--web"]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = subprocess.run([*command, port], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert f"--web: cannot listen on 127.0.0.1:{port}: Address already in use; choose another" in line
    with subprocess.Popen([*command, "0"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = process.stdout.readline()
        url = re.search(r"http://127\.0\.0\.1:\d+", told)
        assert url is not None and told.startswith("demo is shown at"), told
        assert "worker/a" in get(url[0])[0]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0


def test_the_page_of_a_configured_run_may_be_opened_before_the_run_begins(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        f"run: {{name: demo, dir: {tmp_path}}}\nmodel: {{path: tiny}}\ntasks: {{dataset: offline}}\n"
        f"store: {{url: '{redis_server.url}'}}\n"
    )
    command = [sys.executable, "-m", "agent_r3.cli", "status", str(config), "--web", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[4]
        assert "nothing of run demo is in the store yet" in get(url)[0]
        beat(redis_server.url, "demo", "trainer", state="starting")
        until(lambda: "starting" in json.loads(get(f"{url}/status.json")[0])["html"]["roles"])
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0


def test_web_and_watch_take_a_number_or_none_before_and_after_the_folder() -> None:
    import typer

    from agent_r3.cli.main import app

    command = typer.main.get_command(app).commands["status"]  # type: ignore[attr-defined]

    def parsed(*args: str) -> tuple[object, object, object]:
        params = command.make_context("status", list(args)).params
        return params["config"], params["watch"], params["web"]

    run = Path("runs/demo")
    assert parsed("--web", "runs/demo") == parsed("runs/demo", "--web") == (run, None, 8642)
    assert parsed("--web", "80", "runs/demo") == parsed("--web=80", "runs/demo") == (run, None, 80)
    assert parsed("--watch", "runs/demo") == (run, 2.0, None)
    assert parsed("runs/demo", "--watch", "0.5") == (run, 0.5, None)


def paths(svg: str) -> list[str]:
    return re.findall(r'<path d="([^"]*)"', svg)


def test_a_curve_goes_from_corner_to_corner_and_leaves_a_gap_where_nothing_was_measured() -> None:
    svg = plot([Curve("a", [(0, 0.0), (1, float("nan")), (2, 1.0)])], "step", ylim=(0, 1))
    assert svg is not None
    assert paths(svg) == ["M48.0 182.0 M408.0 26.0"]
    Page(svg)


def test_nothing_measured_draws_nothing() -> None:
    assert plot([], "step") is None
    assert plot([Curve("a", [(0, float("nan"))])], "step") is None


@pytest.mark.parametrize("value", [0.0, 5.0, -3.0, 1e-12, 1e12])
def test_a_single_value_has_axes_of_its_own(value: float) -> None:
    for log in (False, True):
        svg = plot([Curve("a", [(7, value)])], "step", log=log)
        assert svg is not None and "nan" not in svg and "inf" not in svg
        Page(svg)


def test_a_log_scale_has_a_tick_a_decade_and_zero_a_decade_below() -> None:
    svg = plot([Curve("a", [(0, 1e-5), (1, 0.0), (2, 1e-2)])], "step", log=True)
    assert svg is not None
    for tick in ("1e-06", "1e-05", "0.0001", "0.001", "0.01"):
        assert f">{tick}</text>" in svg
    assert paths(svg) == ["M48.0 143.0 L228.0 182.0 L408.0 26.0"]


def test_numbers_are_short() -> None:
    values = (0.25, 0.000012345, 12.34, 345.6, 9_999, 12_345, 1_234_567)
    assert [compact(value) for value in values] == ["0.25", "1.23e-05", "12.3", "346", "9999", "12.3k", "1.23M"]
