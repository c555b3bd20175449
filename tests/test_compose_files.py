"""The files of the docker-compose stack, without a container: who may do what, what is watched and asked."""

import importlib.util
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent_r3.config import load_config
from agent_r3.metrics import METRICS as FIGURES
from agent_r3.telemetry import METRICS

ROOT = Path(__file__).parents[1]
SOCKET = "docker.sock"
ROLES = ("broker", "sglang", "rollout", "trainer")
DASHBOARD = ROOT / "docker" / "grafana" / "dashboards" / "agent-r3.json"


def compose(name: str) -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load((ROOT / name).read_text())
    return tree


STACK = compose("docker-compose.yml")
GPU = compose("docker-compose.gpu.yml")
SERVICES: dict[str, dict[str, Any]] = STACK["services"]
each_service = pytest.mark.parametrize("name", SERVICES)


@each_service
def test_every_service_is_watched_bounded_and_logs_with_rotation(name: str) -> None:
    service = SERVICES[name]
    assert service["healthcheck"]["test"] and service["stop_grace_period"]
    assert service["mem_limit"] and service["cpus"] and service["pids_limit"]
    assert service["logging"]["driver"] == "json-file" and service["logging"]["options"]["max-size"]


@each_service
def test_no_service_is_root_or_may_become_it(name: str) -> None:
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"] and "cap_add" not in service and not service.get("privileged")
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["read_only"] is True
    assert int(str(service["user"]).partition(":")[0]) > 0


@each_service
def test_only_the_broker_has_dockers_socket(name: str) -> None:
    assert (SOCKET in json.dumps(SERVICES[name])) == (name == "broker")
    assert ("group_add" in SERVICES[name]) == (name == "broker")


def test_the_gpu_override_opens_nothing() -> None:
    allowed = {"build", "image", "command", "environment", "volumes", "healthcheck", "mem_limit", "cpus", "pids_limit"}
    allowed |= {"shm_size", "deploy", "stop_grace_period", "ulimits"}
    for name, service in GPU["services"].items():
        assert name in SERVICES and set(service) <= allowed, name
        assert all(volume["read_only"] for volume in service.get("volumes", []))
        for device in service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", []):
            assert device["driver"] == "nvidia" and device["capabilities"] == ["gpu"]


def test_the_gpus_of_engine_and_trainer_are_apart_and_as_many_as_the_config_says() -> None:
    config = load_config(ROOT / "configs" / "qwen3-30b-a3b.yaml")
    gpus = {
        name: GPU["services"][name]["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
        for name in ("sglang", "trainer")
    }
    assert len(gpus["sglang"]) == config.engine.tensor_parallel
    assert len(gpus["trainer"]) == config.train.ranks
    assert f"--nproc-per-node={config.train.ranks}" in GPU["services"]["trainer"]["command"]
    assert len({*gpus["sglang"], *gpus["trainer"]}) == 8


def test_the_inner_network_is_closed_and_holds_redis_broker_engine_and_roles_alone() -> None:
    assert STACK["networks"]["inner"]["internal"] is True
    for name in ("redis", *ROLES, "eval"):
        assert SERVICES[name]["networks"] == ["inner"], name
        assert "ports" not in SERVICES[name], name


@each_service
def test_what_is_published_is_published_on_loopback_and_not_by_the_inner_network(name: str) -> None:
    service = SERVICES[name]
    assert "network_mode" not in service
    for port in service.get("ports", []):
        assert port.startswith("127.0.0.1:") and "edge" in service["networks"]


@each_service
def test_images_are_pinned_and_those_of_ours_are_never_pulled(name: str) -> None:
    service = SERVICES[name]
    tag = re.sub(r"\$\{\w+:-(.*)\}", r"\1", service["image"]).rpartition(":")[2]
    assert tag and tag != "latest"
    assert service["pull_policy"] == ("missing" if name == "grafana" else "never")


def test_the_rollout_service_can_be_scaled() -> None:
    rollout = SERVICES["rollout"]
    # Without a name the worker takes its host's, which is the container's id where none is given.
    assert not {"container_name", "ports", "hostname"} & set(rollout) and "--name" not in rollout["command"]


def test_no_secret_stands_in_an_environment_or_a_command() -> None:
    for name, secret in STACK["secrets"].items():
        assert set(secret) == {"file"}, name
    for name, service in SERVICES.items():
        for key, value in service.get("environment", {}).items():
            if re.search("PASSWORD|TOKEN|SECRET", key):
                assert str(value).startswith("/run/secrets/"), (name, key)
    assert SERVICES["broker"]["secrets"] == ["broker_token"]
    assert SERVICES["redis"]["secrets"] == SERVICES["trainer"]["secrets"] == ["redis_password"]


@each_service
def test_a_service_starts_when_what_it_needs_is_healthy(name: str) -> None:
    for needed, condition in SERVICES[name].get("depends_on", {}).items():
        assert needed in SERVICES and condition == {"condition": "service_healthy"}


def test_each_service_is_killed_later_than_its_role_gives_up() -> None:
    rollout = SERVICES["rollout"]
    grace = float(_default(rollout["environment"]["AGENT_R3__SERVICE__GRACE_S"]))
    assert grace < float(_default(rollout["stop_grace_period"]).removesuffix("s"))


def test_restart_policies() -> None:
    restarts = {name: service["restart"] for name, service in SERVICES.items()}
    assert restarts.pop("trainer") == "on-failure"  # it ends well when the steps are made
    assert restarts.pop("eval") == "no"
    assert set(restarts.values()) == {"unless-stopped"}


def _default(text: str) -> str:
    return re.sub(r"^\$\{\w+:-(.*)\}$", r"\1", text)


@pytest.mark.parametrize("name", [*ROLES, "eval", "status"])
def test_the_environment_of_a_role_is_understood(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in SERVICES[name]["environment"].items():
        monkeypatch.setenv(key, _default(str(value)))
    config = load_config(ROOT / "configs" / "stack-cpu.yaml")
    assert config.store.url == "redis://redis:6379/0" and str(config.run.dir) == "/runs"
    assert config.engine.urls == ("http://sglang:30000",)
    assert config.sandbox.broker == "http://broker:7070"
    assert (config.service.host, config.service.port) == ("0.0.0.0", 9464)
    if name == "sglang":
        assert (config.engine.host, config.engine.port, config.engine.metrics) == ("0.0.0.0", 30_000, True)


def test_the_stacks_demo_is_the_demo() -> None:
    demo = yaml.safe_load((ROOT / "configs" / "tiny-cpu.yaml").read_text())
    stack = yaml.safe_load((ROOT / "configs" / "stack-cpu.yaml").read_text())
    assert stack["train"].pop("save_every") == 1 and demo["train"].pop("save_every") == 0
    assert stack["rollout"].pop("retries") == 5
    for section in ("model", "tasks", "agent", "engine", "rollout", "grading", "train"):
        assert stack[section] == demo[section], section


def test_every_variable_of_the_files_is_in_the_example_and_the_other_way_round() -> None:
    used = set(re.findall(r"\$\{(\w+)", (ROOT / "docker-compose.yml").read_text()))
    used |= set(re.findall(r"\$\{(\w+)", (ROOT / "docker-compose.gpu.yml").read_text()))
    used -= {"AGENT_R3_ENV_FILE", "AGENT_R3_SECRETS", "DOCKER_SOCKET"}  # for whoever keeps these elsewhere
    shown = set(re.findall(r"^#?([A-Z0-9_]+)=", (ROOT / ".env.example").read_text(), re.MULTILINE))
    assert {name for name in shown if not name.startswith("AGENT_R3__")} == used


def test_prometheus_scrapes_every_role_and_finds_replicas() -> None:
    tree = yaml.safe_load((ROOT / "docker" / "prometheus" / "prometheus.yml").read_text())
    found = set()
    for job in tree["scrape_configs"]:
        for source in job.get("dns_sd_configs", []):
            found |= {(name, source["port"]) for name in source["names"]}
    assert found == {(name, 9464) for name in ROLES} | {("sglang", 30_000)}


# --- the dashboard

_WORDS = {"by", "or", "vector", "scalar", "sum", "max", "min", "avg", "rate", "increase", "histogram_quantile"}


def expressions() -> list[str]:
    board = json.loads(DASHBOARD.read_text())
    return [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]


def metrics_of(expression: str) -> set[str]:
    """Names of the metrics that a PromQL expression reads, of those without offsets, `on` or `ignoring`."""
    bare = re.sub(r'"[^"]*"', "", expression)
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\bby \([^)]*\)", " ", bare)
    return set(re.findall(r"[a-zA-Z_:][\w:]*", bare)) - _WORDS


def test_metrics_of() -> None:
    found = metrics_of('60 * sum by (le, stage) (rate(a_bucket{kind=~"x|y"}[5m])) / max(b:c) or vector(0)')
    assert found == {"a_bucket", "b:c"}


def test_the_dashboard_reads_only_metrics_that_exist() -> None:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.origin is not None
    engine = (Path(spec.origin).parent / "srt" / "observability" / "metrics_collector.py").read_text()
    for expression in expressions():
        names = metrics_of(expression)
        assert names, expression
        for name in names:
            if name.startswith("sglang_"):  # from `sglang:`, by prometheus.yml
                assert f'"sglang:{name.removeprefix("sglang_")}"' in engine, name
            elif name != "up":  # Prometheus' own
                metric = METRICS[name.removesuffix("_bucket")]
                assert name.endswith("_bucket") == (metric.kind == "histogram"), expression
                assert ("rate(" in expression or "increase(" in expression) == (metric.kind != "gauge"), expression


def test_the_dashboard_selects_by_labels_and_figures_that_exist() -> None:
    for expression in expressions():
        for name, labels in re.findall(r"(agent_r3_\w+)\{([^}]*)\}", expression):
            known = {*METRICS[name.removesuffix("_bucket")].labels, "job", "instance"}
            chosen = dict(re.findall(r'(\w+)!?=~?"([^"]*)"', labels))
            assert set(chosen) <= known, expression
            if name == "agent_r3_metric":
                assert chosen["name"] in FIGURES, expression


def test_prometheus_understands_the_dashboard_and_its_own_configuration(tmp_path: Path) -> None:
    rules = [{"record": f"panel:{number}", "expr": text} for number, text in enumerate(expressions())]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    for what, path in (
        ("rules", tmp_path / "rules.yml"),
        ("config", ROOT / "docker" / "prometheus" / "prometheus.yml"),
    ):
        checked = subprocess.run(
            ["promtool", "check", what, str(path)], capture_output=True, text=True, timeout=60, check=False
        )
        assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize(
    "wanted",
    [
        "train/reward_mean", "eval/pass@1", "r3/kl_replay", "r3/kl_native", "r3/f2_replay", "r3/mismatch_routers",
        "agent_r3_policy_version", "cached", "sampled", "agent_r3_sandboxes", "agent_r3_infra_failures_total",
    ],
)  # fmt: skip
def test_the_dashboard_shows(wanted: str) -> None:
    assert any(wanted in expression for expression in expressions())


def test_the_dashboards_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert max(x for x, _ in cells) < 24 and not cells & taken, panel["title"]
        taken |= cells


# --- docker compose itself


def composed(env: dict[str, str], *files: str) -> subprocess.CompletedProcess[str]:
    chosen = [part for file in files for part in ("-f", str(ROOT / file))]
    command = ["docker", "compose", "--env-file", os.devnull, *chosen, "config", "-q"]
    kept = {key: os.environ[key] for key in ("PATH", "HOME", "DOCKER_CONFIG") if key in os.environ}
    return subprocess.run(command, env=kept | env, capture_output=True, text=True, timeout=60, check=False)


_SET = {"DOCKER_GID": "1", "AGENT_R3_CACHE": "/cache", "AGENT_R3_MODEL": "/model"}


@pytest.mark.docker
def test_compose_accepts_the_files() -> None:
    assert composed(_SET, "docker-compose.yml").returncode == 0
    gpu = composed({**_SET, "TASKS_FILE": "/t.parquet"}, "docker-compose.yml", "docker-compose.gpu.yml")
    assert gpu.returncode == 0, gpu.stderr


@pytest.mark.docker
@pytest.mark.parametrize("missing", sorted(_SET))
def test_a_setting_that_is_missing_is_named_with_what_makes_it(missing: str) -> None:
    refused = composed({key: value for key, value in _SET.items() if key != missing}, "docker-compose.yml")
    assert refused.returncode != 0
    assert missing in refused.stderr and "scripts/stack-secrets.sh" in refused.stderr
