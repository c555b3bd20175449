"""Each fault of the table in docs/stack.md, brought about on purpose: one line says it, and nothing restarts for ever.

One stack for all tests, of which each starts the services that it needs, without an engine.
"""

import shutil
import socket
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from tests.stack.stack import ROOT, TAG, Container, Stack

pytestmark = [pytest.mark.stack, pytest.mark.docker, pytest.mark.timeout(3600)]  # images are built

# Health checks that call a service ill soon; a volume of Redis that can be filled, and somebody who does it, who also
# keeps what a tmpfs holds while Redis is started again. What asks for the engine is refused at once.
HASTY = """
x-hasty: &hasty {interval: 1s, retries: 2, start_period: 1s}
services:
  redis: {healthcheck: *hasty}
  broker: {healthcheck: *hasty}
  status: {healthcheck: *hasty}
  rollout: {healthcheck: *hasty, extra_hosts: ["sglang:127.0.0.1"]}
  neighbour:
    image: agent-r3/redis:${AGENT_R3_TAG}
    init: true
    entrypoint: [sleep, infinity]
    volumes: ["redis:/data"]
    networks: [inner]
volumes:
  redis: {driver_opts: {type: tmpfs, device: tmpfs, o: "size=80m,uid=10001,gid=10001"}}
"""


@pytest.fixture(scope="module")
def project(
    docker_engine: docker.APIClient,
    tiny_policy: None,
    stack_images: None,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stack]:
    override = tmp_path_factory.mktemp("override") / "hasty.yml"
    override.write_text(HASTY)
    with Stack(tmp_path_factory.mktemp("bare"), {}, [override]) as stack:
        yield stack
        stack.down()
        assert stack.left_over() == {}


@pytest.fixture
def bare(project: Stack) -> Iterator[Stack]:
    """A stack of which nothing is up."""
    yield project
    project.compose("rm", "--stop", "--force")


@pytest.fixture
def secrets(bare: Stack) -> Iterator[Path]:
    """The folder of the secrets; what a test changes there is put back."""
    folder, before = bare.folder / "secrets", bare.secrets()
    yield folder
    for name, text in before.items():
        replace(folder / name, text)


def replace(secret: Path, text: str) -> None:
    """By another file, as scripts/stack-secrets.sh does it: a container keeps the file with which it was made."""
    secret.unlink(missing_ok=True)
    secret.write_text(text)


def start(stack: Stack, *services: str) -> None:
    """Made anew, and not waited for."""
    stack.compose("up", "-d", "--no-deps", "--force-recreate", *services)


def refusal(stack: Stack, service: str, *options: str, **env: str) -> str:
    """The last line of a `docker compose up` that stops."""
    done = stack.attempt(*options, "up", "-d", "--no-deps", service, env=env)
    assert done.returncode != 0, done.stderr
    return done.stderr.strip().splitlines()[-1]


def assert_ill(stack: Stack, service: str, says: str) -> Container:
    """`docker compose ps` shows the service up and unhealthy, and its health check holds `says` in its only line."""
    container = stack.wait_for_check(service, "unhealthy", says)
    shown = stack.compose("ps", "--format", "{{.Service}} {{.State}} {{.Health}}", service)
    assert shown.split() == [service, "running", "unhealthy"]
    assert len(container.said[-1].splitlines()) == 1 and container.restarts == 0, container.describe()
    return container


# --- what `docker compose up` refuses


@pytest.mark.parametrize("name", ["redis_password", "broker_token"])
def test_a_missing_secret_is_named_by_its_path(bare: Stack, secrets: Path, name: str) -> None:
    (secrets / name).unlink()
    service = "redis" if name == "redis_password" else "broker"
    assert refusal(bare, service).endswith(f"bind source path does not exist: {secrets / name}")


@pytest.mark.parametrize(
    ("service", "setting", "below"), [("trainer", "AGENT_R3_MODEL", ""), ("broker", "AGENT_R3_CACHE", "/datasets")]
)
def test_a_missing_model_or_data_set_is_named_by_its_path(
    bare: Stack, tmp_path: Path, service: str, setting: str, below: str
) -> None:
    missing = tmp_path / "missing"
    line = refusal(bare, service, **{setting: str(missing)})
    assert line.endswith(f"bind source path does not exist: {missing}{below}")


@pytest.mark.parametrize(("service", "setting"), [("prometheus", "PROMETHEUS_PORT"), ("status", "STATUS_PORT")])
def test_a_port_in_use_is_named(bare: Stack, service: str, setting: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refusal(bare, service, **{setting: str(port)})
    assert line.endswith(f"listen tcp4 127.0.0.1:{port}: bind: address already in use")


def test_an_image_that_was_not_built_is_named(bare: Stack) -> None:
    assert refusal(bare, "redis", AGENT_R3_TAG="not-built").endswith("No such image: agent-r3/redis:not-built")


@pytest.fixture
def gpu_tag(docker_engine: docker.APIClient) -> Iterator[str]:
    """A tag under which the engine's image stands for the one with CUDA, and no other image."""
    tag = f"tests-{uuid.uuid4().hex[:8]}"
    docker_engine.tag(f"agent-r3/engine:{TAG}", "agent-r3/engine", f"{tag}-gpu")
    yield tag
    docker_engine.remove_image(f"agent-r3/engine:{tag}-gpu", force=True)  # a container was made from it


def has_gpu() -> bool:
    listing = shutil.which("nvidia-smi")
    return listing is not None and subprocess.run([listing, "-L"], capture_output=True, timeout=60).returncode == 0


@pytest.mark.skipif(has_gpu(), reason="this machine has a GPU")
def test_the_gpu_override_without_a_gpu_names_what_is_missing(bare: Stack, gpu_tag: str, tmp_path: Path) -> None:
    (tmp_path / "tasks.parquet").touch()
    line = refusal(
        bare,
        "sglang",
        *("-f", str(ROOT / "docker-compose.gpu.yml")),
        AGENT_R3_TAG=gpu_tag,
        TASKS_FILE=str(tmp_path / "tasks.parquet"),
        SGLANG_CPUS="1",  # before all else Docker refuses more than there are
    )
    assert line.endswith('could not select device driver "nvidia" with capabilities: [[gpu]]')


# --- what the health check says


def test_an_empty_secret_is_named(bare: Stack, secrets: Path) -> None:
    for name in ("redis_password", "broker_token"):
        replace(secrets / name, "")
    start(bare, "redis", "broker")
    start(bare, "rollout")  # by itself, since beside the others it would wait for them
    assert_ill(bare, "redis", "the secret redis_password is missing or empty: run scripts/stack-secrets.sh")
    assert_ill(bare, "broker", "the broker's token in /run/secrets/broker_token must be one line of at least 16")
    assert_ill(bare, "rollout", "store.password_file /run/secrets/redis_password is empty")


def test_a_wrong_password_is_named_but_not_shown_and_what_mends_it_is_noticed(bare: Stack, secrets: Path) -> None:
    right, wrong = (secrets / "redis_password").read_text(), "not-the-password-of-this-redis"
    start(bare, "redis")
    bare.wait_for_check("redis", "healthy", "PONG")
    replace(secrets / "redis_password", wrong)
    start(bare, "rollout", "status")
    said = "agent-r3: store.url redis://:***@redis:6379/0: the server refuses the password: "
    ill = [assert_ill(bare, service, said) for service in ("rollout", "status")]
    for container in ill:
        everything = "\n".join([*container.said, bare.logs(container)])
        assert wrong not in everything and right not in everything

    (secrets / "redis_password").write_text(right)
    mended = [
        assert_ill(bare, "rollout", "engine http://sglang:30000 is not reachable"),
        bare.wait_for_check("status", "healthy", "ok"),
    ]
    assert [(found.id, found.restarts) for found in mended] == [(found.id, 0) for found in ill]


def test_a_password_overwritten_beneath_redis_is_said_until_it_is_back(bare: Stack, secrets: Path) -> None:
    right = (secrets / "redis_password").read_text()
    start(bare, "redis")
    bare.wait_for_check("redis", "healthy", "PONG")
    (secrets / "redis_password").write_text("another")
    assert_ill(bare, "redis", "the secret redis_password is no longer the one that Redis was started with")
    (secrets / "redis_password").write_text(right)
    bare.wait_for_check("redis", "healthy", "PONG")


def test_a_socket_that_the_broker_may_not_use_is_said(bare: Stack) -> None:
    done = bare.attempt("up", "-d", "--no-deps", "--force-recreate", "broker", env={"DOCKER_GID": "54321"})
    assert done.returncode == 0, done.stderr
    said = assert_ill(bare, "broker", "Permission denied").said[-1]
    assert "DOCKER_GID" in said


# --- a full volume

SET = 'head -c "$0" /dev/zero | REDISCLI_AUTH=$(cat /run/secrets/redis_password) redis-cli -x set "$1"'
EXISTS = 'REDISCLI_AUTH=$(cat /run/secrets/redis_password) redis-cli exists "$0"'


def test_a_full_volume_is_said_and_redis_loses_nothing_that_it_answered(bare: Stack) -> None:
    start(bare, "neighbour", "redis")
    redis = bare.wait_for_check("redis", "healthy", "PONG")
    [neighbour] = bare.of("neighbour")
    assert bare.exec(redis, "sh", "-c", SET, "1000", "answered") == "OK\n"

    bare.exec(neighbour, "sh", "-c", "head -c 20m /dev/zero >/data/filler")
    assert_ill(bare, "redis", "kB are free, below 65536 kB Redis is not well")

    bare.exec(neighbour, "sh", "-c", "! cat /dev/zero >/data/filler")
    refused = bare.attempt("exec", "-T", "redis", "sh", "-c", SET, "1000000", "not answered")
    assert refused.returncode != 0 and "OK" not in refused.stdout
    bare.wait_for_check("redis", "unhealthy", "the volume redis is full: 0 kB are free")

    bare.exec(neighbour, "rm", "/data/filler")
    again = bare.wait_for_check("redis", "healthy", "PONG")
    assert (again.id, again.restarts) == (redis.id, 1)
    kept = [bare.exec(again, "sh", "-c", EXISTS, key) for key in ("answered", "not answered")]
    assert kept == ["1\n", "0\n"]
