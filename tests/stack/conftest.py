"""One stack for the session: two workers, three steps."""

from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from tests.stack.inside import Inside, look_inside
from tests.stack.stack import SHORT_RUN, Container, Stack, build_images

_TRAINING_S = 900


@pytest.fixture(scope="session")
def stack_images(docker_engine: docker.APIClient) -> None:
    build_images()


@pytest.fixture(scope="session")
def stack(
    docker_engine: docker.APIClient,
    tiny_policy: None,
    stack_images: None,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stack]:
    """Up, with every service healthy."""
    with Stack(tmp_path_factory.mktemp("stack"), SHORT_RUN) as stack:
        stack.up("--scale", "rollout=2")
        yield stack


@pytest.fixture(scope="session")
def at_start(stack: Stack) -> list[Container]:
    """The containers when `docker compose up --wait` came back."""
    return stack.ps()


@pytest.fixture(scope="session")
def insides(stack: Stack, at_start: list[Container]) -> list[Inside]:
    """Looked at while the trainer runs, too."""
    return [look_inside(stack, container) for container in at_start]


@pytest.fixture(scope="session")
def run_folder(stack: Stack, insides: list[Inside], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the run left in the volume, once the trainer has ended well."""
    code = stack.wait_for_exit("trainer", timeout_s=_TRAINING_S)
    assert code == 0, stack.describe()
    folder = tmp_path_factory.mktemp("fetched")
    for name in ("config.yaml", "metrics.jsonl", "summary.json", "report.html", "trajectories", "eval"):
        stack.fetch(f"/runs/{stack.project}/{name}", folder)
    return folder
