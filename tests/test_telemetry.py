"""What roles serve to orchestrators and Prometheus, over real HTTP."""

import http.client
import socket
import time
from collections.abc import Callable

import pytest

from agent_r3.config import ServiceConfig
from agent_r3.errors import UserError
from agent_r3.telemetry import METRICS, Health, Telemetry, count_from_zero, failure_kinds, serve_telemetry, watched_loop
from tests.support.telemetry import fetch, key, scrape

PORT = ServiceConfig(port=0)


def test_a_scrape_gives_what_was_counted_and_nothing_else() -> None:
    telemetry = Telemetry("trainer", "demo")
    telemetry.gauge("agent_r3_step").set(3)
    telemetry.gauge("agent_r3_metric").labels(name='train/"odd"\nname').set(0.5)
    telemetry.counter("agent_r3_tokens_total").labels(kind="sampled").inc(17)
    telemetry.histogram("agent_r3_turn_seconds").labels(stage="tools").observe(0.3)
    telemetry.read("agent_r3_grades_total", lambda: {("passed",): 4, ("failed",): 0})
    telemetry.read("agent_r3_sandboxes", lambda: {(): 2})
    with serve_telemetry(PORT, telemetry, lambda: None) as url:
        found = scrape(url)
    assert found[key("agent_r3_up", role="trainer", run="demo")] == 1
    assert found[key("agent_r3_step")] == 3 and found[key("agent_r3_sandboxes")] == 2
    assert found[key("agent_r3_metric", name='train/"odd"\nname')] == 0.5
    assert found[key("agent_r3_tokens_total", kind="sampled")] == 17
    assert found[key("agent_r3_grades_total", outcome="passed")] == 4
    assert found[key("agent_r3_grades_total", outcome="failed")] == 0
    assert found[key("agent_r3_turn_seconds_count", stage="tools")] == 1
    assert found[key("agent_r3_turn_seconds_bucket", stage="tools", le="0.5")] == 1
    assert found[key("agent_r3_turn_seconds_bucket", stage="tools", le="0.25")] == 0
    assert {name for name, _ in found} == {
        *("agent_r3_up", "agent_r3_step", "agent_r3_sandboxes", "agent_r3_metric", "agent_r3_tokens_total"),
        *("agent_r3_grades_total", "agent_r3_turn_seconds_count", "agent_r3_turn_seconds_sum"),
        "agent_r3_turn_seconds_bucket",
    }


def test_every_listed_metric_can_be_made_and_read_under_its_own_name() -> None:
    telemetry = Telemetry("trainer", "demo")
    for name, metric in METRICS.items():
        if name != "agent_r3_up":
            made = getattr(telemetry, metric.kind)(name)
            child = made.labels(*metric.labels) if metric.labels else made
            child.observe(1) if metric.kind == "histogram" else child.inc()
    with serve_telemetry(PORT, telemetry, lambda: None) as url:
        names = {name for name, _ in scrape(url)}
    for name, metric in METRICS.items():
        assert name.startswith("agent_r3_") and (name.endswith("_total") == (metric.kind == "counter"))
        assert (f"{name}_count" if metric.kind == "histogram" else name) in names


def test_a_metric_of_another_kind_or_name_is_a_mistake_of_ours() -> None:
    telemetry = Telemetry("trainer", "demo")
    with pytest.raises(AssertionError, match="agent_r3_step is a gauge"):
        telemetry.counter("agent_r3_step")
    with pytest.raises(KeyError):
        telemetry.gauge("agent_r3_stepp")


def test_an_unhealthy_role_says_why_in_one_line_and_is_not_up() -> None:
    health = Health()
    with serve_telemetry(PORT, Telemetry("rollout", "demo"), health) as url:
        assert fetch(f"{url}/healthz") == (503, "starting\n")
        health.starting = "waiting for\n  the engine"
        assert fetch(f"{url}/healthz") == (503, "waiting for the engine\n")
        health.starting = None
        checks: list[str | None] = [None, None]
        health.checks += [lambda: checks[0], lambda: checks[1]]
        assert fetch(f"{url}/healthz") == (200, "ok\n")
        assert scrape(url)[key("agent_r3_up", role="rollout", run="demo")] == 1
        checks[1] = "the store is silent"
        assert scrape(url)[key("agent_r3_up", role="rollout", run="demo")] == 0
        assert fetch(f"{url}/healthz") == (503, "the store is silent\n")
        assert fetch(f"{url}/anything")[0] == 404


def test_an_idle_connection_does_not_keep_others_out() -> None:
    with serve_telemetry(PORT, Telemetry("rollout", "demo"), lambda: None) as url:
        host, port = str(url).removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))):
            assert fetch(f"{url}/healthz") == (200, "ok\n")
            again = http.client.HTTPConnection(host, int(port), timeout=10)
            for _ in range(2):  # a scraper keeps its connection
                again.request("GET", "/metrics")
                assert again.getresponse().read().startswith(b"# HELP")
            again.close()


def test_a_port_in_use_is_one_line_for_the_user_and_a_freed_one_can_be_had_again() -> None:
    with serve_telemetry(PORT, Telemetry("rollout", "demo"), lambda: None) as url:
        port = int(str(url).rpartition(":")[2])
        with (
            pytest.raises(UserError, match=rf"service\.port: cannot listen on 127\.0\.0\.1:{port}: .*in use") as error,
            serve_telemetry(ServiceConfig(port=port), Telemetry("trainer", "demo"), lambda: None),
        ):
            raise AssertionError("it listens")
        assert "\n" not in str(error.value)
        fetch(f"{url}/healthz")
    with serve_telemetry(ServiceConfig(port=port), Telemetry("trainer", "demo"), lambda: None) as url:
        assert fetch(f"{url}/healthz")[0] == 200


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"])
def test_an_address_that_is_not_ours_is_one_line_for_the_user(host: str) -> None:
    with (
        pytest.raises(UserError, match=f"cannot listen on {host}:0"),
        serve_telemetry(ServiceConfig(host=host, port=0), Telemetry("trainer", "demo"), lambda: None),
    ):
        raise AssertionError("it listens")


def test_without_a_port_nothing_is_served() -> None:
    with serve_telemetry(ServiceConfig(), Telemetry("trainer", "demo"), lambda: None) as url:
        assert url is None


def test_failures_of_every_kind_are_shown_as_0_from_the_start() -> None:
    telemetry = Telemetry("rollout", "demo")
    count_from_zero(telemetry.counter("agent_r3_infra_failures_total"), "kind", failure_kinds())
    with serve_telemetry(PORT, telemetry, lambda: None) as url:
        found = scrape(url)
    for kind in ("engine", "store", "grading", "sandbox_dead", "image_pull", "broker", "disk"):
        assert found[key("agent_r3_infra_failures_total", kind=kind)] == 0


async def test_an_event_loop_that_stands_still_is_noticed() -> None:
    async with watched_loop(stuck_s=0.2) as problem:
        assert problem() is None
        time.sleep(0.3)
        seen: Callable[[], str | None] = problem
        assert str(seen()).startswith("the event loop has not moved for")
