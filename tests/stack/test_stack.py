"""The stack itself: `docker compose up` on this machine, two workers, three steps, and what its containers can reach.

Grafana is not among the services that are started, since its image comes from a registry; what its dashboard asks is
asked of Prometheus instead. The last test takes the stack down.
"""

import json
import math
import shlex
import socket
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import httpx
import psutil
import pytest

from agent_r3.archive import check_trajectory, list_episodes, read_episode, read_info
from agent_r3.metrics import read_metrics, trained
from tests.stack.inside import Inside
from tests.stack.stack import GROUPS, SAMPLES, STEPS, Container, Stack
from tests.test_compose_files import expressions

pytestmark = [pytest.mark.stack, pytest.mark.docker, pytest.mark.timeout(3600)]

PORTS = {  # where each service listens
    "redis": (6379,),
    "broker": (7070, 9464),
    "sglang": (30_000, 9464),
    "rollout": (9464,),
    "trainer": (9464,),
    "status": (8080,),
    "prometheus": (9090,),
}
METADATA = ("169.254.169.254", 80)  # of clouds

Target = tuple[str, int]

# argv[1]: [[host, port], ...]. `self` shows that what listens is found.
REACH = """
import errno, json, socket, sys

def reach(host, port):
    try:
        socket.create_connection((host, port), timeout=3).close()
    except socket.gaierror:
        return "no such name"
    except socket.timeout:
        return "no answer"
    except OSError as exc:
        return errno.errorcode.get(exc.errno, str(exc))
    return "open"

with socket.create_server(("127.0.0.1", 0)) as own:
    found = {"self": reach(*own.getsockname())}
for host, port in json.loads(sys.argv[1]):
    found[f"{host}:{port}"] = reach(host, port)
print(json.dumps(found))
"""

# What Redis and the broker say to a worker with and without its secrets.
ASK = """
import http.client, json, socket
from pathlib import Path
from agent_r3.envs.broker_wire import OfTasks, frame

password, token = (Path("/run/secrets", name).read_text().strip() for name in ("redis_password", "broker_token"))

def redis(*commands):
    with socket.create_connection(("redis", 6379), timeout=10) as connection, connection.makefile("rwb") as stream:
        for command in commands:
            stream.write(command.encode() + b"\\r\\n")
            stream.flush()
            answer = stream.readline().decode()
    return answer.split()[0]

def broker(method, path, given):
    connection = http.client.HTTPConnection("broker", 7070, timeout=10)
    headers = {"Authorization": f"Bearer {given}"} if given else {}
    connection.request(method, path, frame(OfTasks().model_dump()), headers)
    return connection.getresponse().status

print(json.dumps({
    "redis": [redis("PING"), redis("SET x 1"), redis("AUTH wrong"), redis(f"AUTH {password}", "PING")],
    "lease": [broker("GET", "/v1/lease", given) for given in (None, "wrong")],
    "acquire": [broker("POST", "/v1/acquire", given) for given in (None, "wrong")],
    "health": [broker("POST", "/v1/health", given) for given in (None, "wrong", token)],
}))
"""

PUBLISHED = """
import json
from pathlib import Path
from agent_r3.config import load_config
from agent_r3.store.connection import connect, connection_url
from agent_r3.store.scripts import Keys

config = load_config(Path("/etc/agent-r3/config.yaml"))
found = connect(connection_url(config.store)).hgetall(Keys(config.run.name).published)
print(json.dumps({int(index): holder.split(b"\\n")[0].decode() for index, holder in found.items()}))
"""

HAS = """
import importlib.util, json, shutil, sys
modules = [name for name in ("docker", "torch") if importlib.util.find_spec(name)]
print(json.dumps(modules + [name for name in ("docker", "podman", "ctr") if shutil.which(name)]))
"""


# --- the run


def test_every_service_is_healthy(at_start: list[Container]) -> None:
    services = Counter(container.service for container in at_start)
    assert services == {**dict.fromkeys(PORTS, 1), "rollout": 2}
    assert [found.describe() for found in at_start if found.health != "healthy" or found.restarts] == []


def test_the_policy_trains_across_the_services_with_every_routing_row(run_folder: Path) -> None:
    lines = [line for line in read_metrics(run_folder) if trained(line)]
    assert [line["step"] for line in lines] == list(range(STEPS))
    assert [line["r3/coverage"] for line in lines] == [1.0] * STEPS
    assert sum(line["r3/rows_missing"] for line in lines) == 0
    assert lines[-1]["train/policy_version"] > 0
    for path in list_episodes(run_folder):
        check_trajectory(read_episode(path))


def test_the_report_is_in_the_volume(stack: Stack, run_folder: Path) -> None:
    page = (run_folder / "report.html").read_text()
    assert len(page) > 10_000 and stack.project in page
    summary = json.loads((run_folder / "summary.json").read_text())
    assert summary["steps"] == STEPS and summary["r3_coverage"] == 1.0
    assert summary["episodes"] == STEPS * GROUPS * SAMPLES


def test_the_status_page_shows_the_run(stack: Stack, run_folder: Path) -> None:
    answer = httpx.get(f"http://127.0.0.1:{stack.status_port}/status.json", timeout=30, trust_env=False)
    found = answer.raise_for_status().json()
    assert found["problem"] is None and found["status"]["run"] == stack.project
    assert found["status"]["step"] == STEPS


def test_nothing_crashed_on_the_way(stack: Stack, run_folder: Path) -> None:
    there = stack.ps()
    assert [found.describe() for found in there if found.restarts or found.facts["State"]["OOMKilled"]] == []
    assert {found.service for found in there if found.state != "running"} == {"trainer"}


# --- two workers


def test_both_workers_publish_groups_and_every_group_is_published_once(stack: Stack, run_folder: Path) -> None:
    workers = stack.of("rollout")
    published = stack.python(workers[0], PUBLISHED)
    assert sorted(map(int, published)) == list(range(STEPS * GROUPS))
    assert set(published.values()) == {worker.hostname for worker in workers}


def test_every_episode_is_there_once(stack: Stack, run_folder: Path) -> None:
    ids = [read_info(path).id for path in list_episodes(run_folder)]
    samples = [name.partition("-retry")[0] for name in ids]
    wanted = [f"g{group:06d}-{sample:02d}" for group in range(STEPS * GROUPS) for sample in range(SAMPLES)]
    assert sorted(samples) == wanted

    lines = [line for line in read_metrics(run_folder) if trained(line)]
    assert [line["rollout/episodes"] for line in lines] == [GROUPS * SAMPLES] * STEPS
    assert [line["train/groups_kept"] + line["train/groups_equal"] for line in lines] == [GROUPS] * STEPS


def test_what_the_workers_counted_is_what_is_in_the_archive(stack: Stack, run_folder: Path) -> None:
    worker = stack.of("rollout")[0]
    shown = json.loads(stack.exec(worker, "agent-r3", "status", "/etc/agent-r3/config.yaml", "--json"))
    roles = {role["name"]: role for role in shown["roles"]}
    counted = {name: role["episodes"] for name, role in roles.items() if name.startswith("worker/")}
    assert set(counted) == {f"worker/{found.hostname}" for found in stack.of("rollout")}
    assert all(counted.values())
    held = {read_info(path).id for path in list_episodes(run_folder / "eval")}
    assert sum(counted.values()) == STEPS * GROUPS * SAMPLES + len(held)
    assert (roles["trainer"]["state"], roles["trainer"]["step"]) == ("done", STEPS)
    assert shown["queue"]["claims"] == {} and shown["queue"]["unread"] == 0


# --- Prometheus and the dashboard


def test_prometheus_scrapes_every_role_and_both_workers(stack: Stack, run_folder: Path) -> None:
    most = {
        found["metric"]["job"]: max(float(value) for _, value in found["values"])
        for found in stack.series("count by (job) (up == 1)")
    }
    assert most == {"trainer": 1, "rollout": 2, "broker": 1, "engine": 1, "sglang": 1, "prometheus": 1}
    healthy = {(found["metric"]["role"], found["metric"]["run"]) for found in stack.series("agent_r3_up == 1")}
    assert healthy == {(role, stack.project) for role in ("trainer", "rollout", "broker", "engine")}


def test_every_expression_of_the_dashboard_has_data(stack: Stack, run_folder: Path) -> None:
    asked = expressions()
    assert len(asked) > 20
    assert [expression for expression in asked if not has_figure(stack, expression)] == []


def has_figure(stack: Stack, expression: str) -> bool:
    """At some time of the run: the trainer's series end with it."""
    return any(math.isfinite(float(value)) for found in stack.series(expression) for _, value in found["values"])


# --- security, from inside


def test_no_process_is_root_or_can_become_it(insides: list[Inside]) -> None:
    for inside in insides:
        assert inside.users == {10_001}, inside.container.service
        assert inside.capabilities == 0 and inside.no_new_privileges, inside.container.service


def test_every_root_is_read_only(insides: list[Inside]) -> None:
    assert {inside.container.service for inside in insides if "ro" in inside.root_options} == set(PORTS)
    assert not [inside for inside in insides if "rw" in inside.root_options]


def test_only_the_broker_sees_dockers_socket(insides: list[Inside]) -> None:
    assert {inside.container.service for inside in insides if inside.engine_sockets} == {"broker"}


def test_only_the_broker_has_a_docker_client_and_the_worker_has_no_torch(stack: Stack) -> None:
    has = {service: stack.python(stack.of(service)[0], HAS) for service in ("rollout", "broker", "sglang")}
    assert has == {"rollout": [], "broker": ["docker"], "sglang": ["torch"]}


def test_redis_and_the_broker_refuse_whoever_has_no_secret(stack: Stack) -> None:
    answers = stack.python(stack.of("rollout")[0], ASK)
    assert answers == {
        "redis": ["-NOAUTH", "-NOAUTH", "-WRONGPASS", "+PONG"],
        "lease": [401, 401],
        "acquire": [401, 401],
        "health": [401, 401, 200],
    }


def test_no_secret_is_in_an_environment_a_command_line_or_a_log(stack: Stack) -> None:
    secrets = stack.secrets()
    assert set(secrets) == {"redis_password", "broker_token", "grafana_password"}
    for container in stack.ps():
        seen = json.dumps(container.facts) + stack.logs(container)
        assert [name for name, secret in secrets.items() if secret in seen] == [], container.service


def test_redis_broker_engine_and_roles_are_on_the_closed_network_alone(stack: Stack, at_start: list[Container]) -> None:
    assert stack.inspect_network("inner")["Internal"] is True
    published = {"status", "prometheus"}
    for container in at_start:
        networks = {"inner", "edge"} if container.service in published else {"inner"}
        assert set(container.addresses) == {f"{stack.project}_{name}" for name in networks}, container.service
        bindings = container.facts["HostConfig"]["PortBindings"] or {}
        bound = [place["HostIp"] for places in bindings.values() for place in places]
        assert bound == (["127.0.0.1"] if container.service in published else []), container.service


def test_a_sandbox_reaches_neither_a_service_nor_the_host(stack: Stack, at_start: list[Container]) -> None:
    worker = stack.of("rollout")[0]
    inner = f"{stack.project}_inner"
    with socket.create_server(("0.0.0.0", 0)) as ours, stack.sandbox() as sandbox:
        assert is_there(stack, sandbox.name)
        host = [(address, ours.getsockname()[1]) for address in host_addresses()]
        for address, port in host:  # what is looked for is there
            socket.create_connection((address, port), timeout=5).close()
        lasting = [found for found in stack.ps() if found.service != "trainer"]
        there = [(found.addresses[inner], port) for found in lasting for port in PORTS[found.service]]
        assert set(reached(stack.python(worker, REACH, json.dumps(there)), there)) == {"open"}

        names = [(service, port) for service, ports in PORTS.items() for port in ports]
        addresses = [(ip, p) for found in at_start for ip in found.addresses.values() for p in PORTS[found.service]]
        targets = [*names, *addresses, *host, METADATA]
        command = f"python3 -c {shlex.quote(REACH)} {shlex.quote(json.dumps(targets))}"
        answers = json.loads(sandbox.run(command).splitlines()[-1])
        assert answers["self"] == "open"
        assert set(reached(answers, names)) == {"no such name"}
        assert set(reached(answers, [*addresses, *host, METADATA])) == {"ENETUNREACH"}
    deadline = time.monotonic() + 30
    while is_there(stack, sandbox.name):  # Docker removes what has ended in its own time
        assert time.monotonic() < deadline, "the sandbox outlives the worker that had it"
        time.sleep(0.2)


def test_a_sandbox_has_no_route_no_mount_and_no_secret(stack: Stack) -> None:
    with stack.sandbox() as sandbox:
        assert is_there(stack, sandbox.name)
        assert [found["Mounts"] for found in stack.sandboxes() if found["Mounts"]] == []
        environment = sandbox.run("cat /proc/self/environ /proc/1/environ | tr '\\0' '\\n'")
        assert "AGENT_R3" not in environment
        assert sandbox.run("ls /run/secrets /var/run/docker.sock /run/docker.sock 2>/dev/null | wc -l").strip() == "0"
        assert sandbox.run("cat /proc/net/route").splitlines()[1:] == []


def is_there(stack: Stack, sandbox: str) -> bool:
    """By the labels of this run's sandboxes."""
    return any(f"/{sandbox}" in found["Names"] for found in stack.sandboxes())


def host_addresses() -> set[str]:
    """IPv4 addresses of this machine, those of Docker's bridges among them, without loopback."""
    found = [
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == socket.AF_INET
    ]
    return {address for address in found if not address.startswith("127.")}


def reached(answers: dict[str, str], targets: Iterable[Target]) -> list[str]:
    return [answers[f"{host}:{port}"] for host, port in targets]


# --- its end


def test_down_v_leaves_no_container_network_volume_or_sandbox(stack: Stack) -> None:
    with stack.sandbox():  # even one that is in use
        assert set(stack.left_over()) == {"containers", "networks", "volumes", "sandboxes"}
        stack.down()
        assert stack.left_over() == {}
