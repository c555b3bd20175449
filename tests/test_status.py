"""`agent-r3 status`: what is read of a real store, what becomes of it, and the command."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import redis
import yaml

from agent_r3.config import StoreConfig
from agent_r3.errors import UserError
from agent_r3.heartbeat import Heartbeat
from agent_r3.metrics import MetricsWriter
from agent_r3.status import Gain, Rates, gained, rates_over, size, span, status_of
from agent_r3.status_feed import StatusFeed
from agent_r3.store import EmbeddedServer, GroupReader, RoleState, TrajectoryWriter
from agent_r3.store.status_reader import RunReading, StatusReader, StoredTrajectory
from tests.support.status import GROUP_TOKENS, beat, make_live_run, publish
from tests.support.store import RedisServer


def reading(**changes: object) -> RunReading:
    empty = RunReading("demo", 1_000.0, {}, None, 0, 0, {}, 0, (), {}, 1_000, 0)
    return replace(empty, **changes)  # type: ignore[arg-type]


def snapshot(url: str) -> dict[bytes, object]:
    """Every key's value, consumer groups included."""
    with redis.Redis.from_url(url) as client:
        return {key: client.dump(key) for key in client.scan_iter()}


async def test_a_run_is_read_as_it_stands(store_url: str) -> None:
    await make_live_run(store_url)
    with StatusReader.connect(store_url) as store:
        status = status_of(store.read(store.choose(None)))
    assert (status.run, status.policy_version, status.step) == ("demo", 3, 3)
    queue = status.queue
    assert (queue.demand, queue.next, queue.published, queue.unread, queue.read) == (8, 5, 3, 2, 1)
    assert queue.claims == {"a": 1, "b": 1}
    assert queue.oldest_unread_s is not None and 0 <= queue.oldest_unread_s < 30
    assert (status.stored.open, status.stored.finished) == (2, 6)
    assert status.stored.tokens == 3 * GROUP_TOKENS + 3
    assert status.stored.bytes_used is not None and status.stored.bytes_used > 100_000
    assert status.staleness is not None
    assert status.staleness.mean == pytest.approx(2 / 3) and status.staleness.max == 1
    assert status.failures == {"engine": 4, "sandbox": 3}


async def test_roles_are_told_by_their_heartbeats(store_url: str) -> None:
    await make_live_run(store_url)
    beat(store_url, "demo", "worker/c", age_s=15, state="running")
    beat(store_url, "demo", "worker/d", age_s=600, state="stopped")
    with StatusReader.connect(store_url) as store:
        roles = {role.name: role for role in status_of(store.read("demo")).roles}
    assert list(roles) == ["trainer", "engine/0", "worker/a", "worker/b", "worker/c", "worker/d"]
    alive = {name: role.alive for name, role in roles.items()}
    assert alive == {
        **dict.fromkeys(("trainer", "engine/0", "worker/a"), "alive"),
        **{"worker/b": "gone", "worker/c": "late", "worker/d": "ended"},
    }
    assert (roles["engine/0"].where, roles["worker/a"].where) == ("http://engine:30000", "box:7")
    a = roles["worker/a"]
    assert (a.policy_version, a.episodes_running, a.episodes, a.claims) == (3, 5, 30, 1)
    assert a.uptime_s == pytest.approx(60, abs=0.1)
    assert 60 <= roles["worker/b"].age_s < 90


def test_a_role_that_ends_as_it_should_is_told_from_one_that_died(store_url: str) -> None:
    config = StoreConfig(url=store_url)
    with StatusReader.connect(store_url) as store:
        with Heartbeat(config, "demo", "worker/a", lambda: {"state": "running", "episodes": 3}):
            (role,) = status_of(store.read("demo")).roles
            assert (role.alive, role.state, role.episodes) == ("alive", "running", 3)
            assert role.where is not None and role.where.endswith(f":{os.getpid()}")
        (role,) = status_of(store.read("demo")).roles
    assert (role.alive, role.state) == ("ended", "stopped")


async def test_looking_changes_nothing(store_url: str) -> None:
    await make_live_run(store_url)
    before = snapshot(store_url)
    with StatusReader.connect(store_url) as store:
        for name in ("demo", "nosuch"):
            store.read(name)
    assert snapshot(store_url) == before


async def test_a_group_that_was_acknowledged_waits_no_more(store_url: str) -> None:
    await make_live_run(store_url)
    with GroupReader.connect(store_url, "demo") as trainer, StatusReader.connect(store_url) as store:
        trainer.ack(trainer.read(count=3, block_s=10))
        queue = status_of(store.read("demo")).queue
        assert (queue.published, queue.unread, queue.read) == (3, 2, 0)
        trainer.ack(trainer.read(count=3, block_s=10))
        status = status_of(store.read("demo"))
    assert (status.queue.unread, status.queue.oldest_unread_s, status.staleness) == (0, None, None)
    assert status.stored.finished == 0


async def test_evaluations_in_training_are_part_of_their_run(store_url: str) -> None:
    await make_live_run(store_url)
    with GroupReader.connect(store_url, "demo/eval") as trainer:
        trainer.set_policy(3, "weights/3")
        trainer.set_demand(4)
    with StatusReader.connect(store_url) as store:
        assert store.runs() == ["demo"]
        status = status_of(store.read(store.choose(None)))
        assert store.choose("demo/eval") == "demo/eval"
    assert status.evaluation is not None
    assert (status.evaluation.demand, status.queue.demand) == (4, 8)


def test_a_run_is_chosen_by_name_where_there_are_several(store_url: str) -> None:
    with StatusReader.connect(store_url) as store:
        with pytest.raises(UserError, match="the store holds no run"):
            store.choose(None)
        beat(store_url, "other[1]*", "trainer", step=1)
        assert store.choose(None) == "other[1]*"
        beat(store_url, "demo", "trainer", step=2)
        with pytest.raises(UserError, match=r"holds 2 runs, choose one with --run: demo, other\[1\]\*"):
            store.choose(None)
        with pytest.raises(UserError, match=r"no run 'dem' in the store; it holds demo, other\[1\]\*"):
            store.choose("dem")
        assert status_of(store.read("other[1]*")).step == 1


async def test_a_run_whose_name_has_wildcards_is_read_alone(store_url: str) -> None:
    await make_live_run(store_url, "demo")
    await make_live_run(store_url, "dem*")
    with StatusReader.connect(store_url) as store:
        assert len(store.read("dem*").trajectories) == len(store.read("demo").trajectories) == 8


async def test_rates_are_what_came_between_two_looks(store_url: str) -> None:
    await make_live_run(store_url)
    with StatusReader.connect(store_url) as store:
        feed = StatusFeed(store, "demo")
        first = feed.poll().status
        assert (first.rates.window_s, first.rates.tokens_per_s) == (None, None)
        assert first.rates.episodes_per_min == pytest.approx(30, rel=0.01)  # worker a: 30 in its minute; b is gone
        async with TrajectoryWriter.connect(store_url, "demo") as writer:
            await publish(writer, "new", version=3)
        beat(store_url, "demo", "worker/a", episodes=36)
        rates = feed.poll().status.rates
        samples = feed.poll().samples
    assert rates.window_s is not None and rates.tokens_per_s is not None
    assert rates.tokens_per_s * rates.window_s == pytest.approx(GROUP_TOKENS)
    assert rates.groups_per_min is not None and rates.groups_per_min * rates.window_s == pytest.approx(60)
    assert rates.episodes_per_min is not None and rates.episodes_per_min * rates.window_s == pytest.approx(6 * 60)
    assert [sample.unread for sample in samples] == [2, 3, 3]


def test_a_counter_that_fell_counts_from_zero() -> None:
    def roles(episodes: int) -> Mapping[str, RoleState]:
        return {"worker/a": RoleState(0.0, {"episodes": episodes})}

    before = reading(roles=roles(50), published=9, trajectories={"t": StoredTrajectory(100, False)})
    after = reading(time_s=1_002.0, roles=roles(3), published=2, trajectories={"t": StoredTrajectory(40, False)})
    assert gained(before, after) == Gain(2.0, 3, 2, 40)
    assert rates_over([Gain(2.0, 3, 2, 40), Gain(2.0, 0, 0, 0)]) == Rates(4.0, 45.0, 30.0, 10.0)
    assert rates_over([]) is None


def test_what_deserves_a_look_is_noted() -> None:
    silent = {"worker/a": RoleState(45.0, {}), "trainer": RoleState(1.0, {})}
    status = status_of(reading(roles=silent, claims={3: "a", 4: "a"}, bytes_used=950 << 20, bytes_limit=1_000 << 20))
    assert status.notes == (
        "worker/a has been silent for 45 s and holds 2 claimed groups",
        "no policy is set yet; the trainer sets it before it asks for groups",
        "the store uses 950.0 MiB of 1000.0 MiB",
    )
    replaced = {"engine/0": RoleState(1.0, {}), "worker/a": RoleState(4_000.0, {})}
    assert status_of(reading(roles=replaced)).notes[0] == "no trainer has sent a heartbeat"
    assert status_of(reading()).notes == ("nothing of run demo is in the store yet",)


def test_a_heartbeat_of_another_make_is_shown_as_far_as_it_goes() -> None:
    odd = {
        "state": 3,
        "step": "x",
        "episodes": True,
        "failures": ["a"],
        "started": None,
        "policy_version": float("nan"),
    }
    (role,) = status_of(reading(roles={"trainer": RoleState(1.0, odd)})).roles
    assert (role.state, role.step, role.episodes, role.failures, role.uptime_s) == ("3", None, None, {}, None)


def test_spans_and_sizes_read_well() -> None:
    assert [span(s) for s in (0.4, 59, 60, 250, 7_500, 270_000)] == [
        "0 s",
        "59 s",
        "1 min",
        "4 min 10 s",
        "2 h 5 min",
        "3 d 3 h",
    ]
    assert [size(n) for n in (0, 1023, 1024, 5 << 20, 3 << 30)] == ["0 B", "1023 B", "1.0 KiB", "5.0 MiB", "3.0 GiB"]


# The command


def status(
    *args: object, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "agent_r3.cli", "status", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env={**os.environ, **(env or {})})


def refused(*args: object, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """The one line with which the command is refused, exit code 2."""
    result = status(*args, cwd=cwd, env=env)
    lines = result.stderr.strip().splitlines()
    assert (result.returncode, result.stdout, len(lines)) == (2, "", 1), result
    return lines[0]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """The folder of a run that `agent-r3 train` started with an embedded store, and the store's URL."""
    folder = tmp_path / "runs" / "demo"
    with EmbeddedServer(folder / "store") as server:
        config = {
            "run": {"name": "demo", "dir": str(tmp_path / "runs")},
            "model": {"path": "tiny"},
            "tasks": {"dataset": "offline"},
            "train": {"steps": 26},
        }
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
        (folder / "resolved.yaml").write_text(yaml.safe_dump({**config, "store": {"url": server.url}}))
        with MetricsWriter(folder, first_step=0) as metrics:
            metrics.write(0, {"train/reward_mean": 0.25, "r3/kl_replay": float("nan")})
        yield folder, server.url


async def test_a_run_on_this_machine_is_found_by_folder_config_or_alone(started: tuple[Path, str]) -> None:
    folder, url = started
    await make_live_run(url)
    root = folder.parent.parent
    for args in ([folder], [root / "config.yaml"], []):
        result = status(*args, "--json", cwd=root)
        assert result.returncode == 0, result.stderr
        found = json.loads(result.stdout)
        assert (found["run"], found["step"], found["steps"], found["policy_version"]) == ("demo", 3, 26, 3)
        assert found["metrics"]["train/reward_mean"] == 0.25
        assert found["metrics"]["r3/kl_replay"] is None
        assert found["queue"]["claims"] == {"a": 1, "b": 1}


async def test_the_table_shows_every_role_and_what_is_wrong(started: tuple[Path, str]) -> None:
    folder, url = started
    await make_live_run(url)
    result = status(folder)
    assert result.returncode == 0, result.stderr
    for text in (
        "run demo",
        "trainer",
        "engine/0",
        "worker/a",
        "gone",
        "3 of 26",
        "engine 4, sandbox 3",
        "reward 0.25",
    ):
        assert text in result.stdout, result.stdout
    assert re.search(r"! worker/b has been silent for 1 min( \d+ s)? and holds 1 claimed group\n", result.stdout)


async def test_watch_shows_it_again_until_a_signal(started: tuple[Path, str]) -> None:
    folder, url = started
    await make_live_run(url)
    command = [sys.executable, "-m", "agent_r3.cli", "status", "--watch", "0.2", "--json", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["policy_version"] == 3
        with GroupReader.connect(url, "demo") as trainer:
            trainer.set_policy(4, "weights/4")
        assert any(json.loads(line)["policy_version"] == 4 for line in process.stdout)
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
        assert process.wait(timeout=20) == 0


async def test_the_password_comes_from_a_file_and_a_wrong_one_is_told(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, password="right")
    server.start()
    try:
        await make_live_run(server.url)
        bare = f"redis://127.0.0.1:{server.port}"
        (tmp_path / "password").write_text("right\n")
        (tmp_path / "wrong").write_text("wrong\n")
        env = {"AGENT_R3__STORE__PASSWORD_FILE": str(tmp_path / "password")}
        found = status("--json", env={**env, "AGENT_R3__STORE__URL": bare})
        assert json.loads(found.stdout)["run"] == "demo", found.stderr
        assert "the server refuses the password" in refused("--store", bare)
        line = refused("--store", bare, env={"AGENT_R3__STORE__PASSWORD_FILE": str(tmp_path / "wrong")})
        assert "the server refuses the password" in line
    finally:
        server.kill()


async def test_bad_input_is_one_line_and_exit_code_2(started: tuple[Path, str]) -> None:
    folder, url = started
    assert "the store holds no run" in refused("--store", url)
    await make_live_run(url)
    assert "no run 'dmeo' in the store; it holds demo" in refused("--store", url, "--run", "dmeo")
    await make_live_run(url, "other")
    assert "choose one with --run: demo, other" in refused("--store", url)
    assert "no Redis server answers there" in refused("--store", "redis://127.0.0.1:1")
    assert "is not a Redis URL" in refused("--store", "postgres://x")
    assert "leave one of them out" in refused(folder, "--store", url)
    assert "is not there" in refused(folder / "no.yaml")
    assert "no resolved.yaml" in refused(folder.parent)
    assert "leave --watch and --json out" in refused(folder, "--web", "--json")


def test_a_run_that_is_over_says_where_its_report_is(started: tuple[Path, str], tmp_path: Path) -> None:
    folder, url = started
    Path(url.removeprefix("unix://")).unlink()
    line = refused(folder)
    assert "run demo is not running" in line and f"agent-r3 report {folder}" in line
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "there is no run under ./runs" in refused(cwd=empty)
