"""The Docker engine, and one small image with a repository that has everything awkward in it."""

import io
import subprocess
import tarfile
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import docker
import pytest

from agent_r3.config import SandboxConfig
from agent_r3.envs import hostbase
from agent_r3.envs.docker import RUN_LABEL, connect
from agent_r3.envs.images import ImageBuilder
from agent_r3.envs.local import open_pool
from agent_r3.envs.pool import SandboxPool
from agent_r3.envs.runner_sandbox import RunnerSandbox
from agent_r3.types import Task

_ENGINE = Path(__file__).parents[2] / "docker" / "engine.sh"

# A repository with a text=auto attribute whose CRLF file is stored as LF, a binary file, an ignored tracked file, a
# deleted and an untracked file at the start, hidden tests and what they leave behind, and a later commit's objects.
_REPOSITORY = r"""
FROM {base}
RUN ldconfig && mkdir /testbed /r2e_tests && cd /testbed && git init -q -b main . \
 && printf '*.txt text=auto\n' >.gitattributes && printf 'ignored*\n' >.gitignore \
 && printf 'one\ntwo\nthree\n' >plain.py && printf 'one\r\ntwo\r\n' >crlf.txt && printf 'no end' >noend.py \
 && printf 'a\000b\377' >binary.dat && printf '#!/bin/sh\necho ran\n' >tool.sh && chmod +x tool.sh \
 && printf 'tracked\n' >ignored_tracked.py && printf 'x\n' >gone.py && mkdir pkg && printf 'v = 1\n' >pkg/mod.py \
 && git add -A && git add -f ignored_tracked.py \
 && git -c user.name=base -c user.email=base@localhost commit -q -m base \
 && rm gone.py && printf 'left over\n' >untracked.py && mkdir pkg/__pycache__ && touch pkg/__pycache__/mod.pyc \
 && mkdir r2e_tests && touch r2e_tests/test_1.py /r2e_tests/test_1.py run_tests.sh
WORKDIR /testbed
"""
_NO_PYTHON = """
FROM agent-r3-test/repository:latest
RUN find / -xdev -name 'python*' -path '*/bin/*' -delete && ! command -v python3
"""
_NO_GIT = "FROM {base}\nRUN ldconfig && rm $(command -v git) && mkdir /testbed\n"


@pytest.fixture(scope="session")
def docker_engine() -> docker.APIClient:
    """A client of a running engine; starts one where none answers."""
    done = subprocess.run([str(_ENGINE)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"no Docker engine: {done.stderr}"
    return connect()


@pytest.fixture(scope="session")
def sandbox_image(docker_engine: docker.APIClient) -> str:
    return build_image(docker_engine, "repository", _REPOSITORY)


@pytest.fixture(scope="session")
def image_without_python(docker_engine: docker.APIClient, sandbox_image: str) -> str:
    """The repository of `sandbox_image`."""
    return build_image(docker_engine, "no-python", _NO_PYTHON)


@pytest.fixture(scope="session")
def image_without_git(docker_engine: docker.APIClient) -> str:
    return build_image(docker_engine, "no-git", _NO_GIT)


@pytest.fixture
def sandbox_task(sandbox_image: str) -> Task:
    return make_task(sandbox_image)


def make_task(image: str, name: str = "task", workdir: str = "/testbed") -> Task:
    return Task(
        id=name,
        dataset="offline",
        repo="repo",
        image=image,
        problem_statement="",
        expected={},
        test_command="true",
        gold_patch="",
        workdir=workdir,
    )


@pytest.fixture
def run_name(docker_engine: docker.APIClient) -> Iterator[str]:
    """A run of its own; whatever the test does, no container of it may be left."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    yield name
    left = containers_of(docker_engine, name)
    for container in left:
        docker_engine.remove_container(container, force=True)
    assert not left, f"{len(left)} containers were left over"


@pytest.fixture
async def pool(run_name: str) -> AsyncIterator[SandboxPool]:
    async with open_pool(SandboxConfig(), run=run_name) as made:
        yield made


@pytest.fixture
async def sandbox(pool: SandboxPool, sandbox_task: Task) -> RunnerSandbox:
    """A container set up for the agent."""
    return await pool.acquire(sandbox_task)


def containers_of(api: docker.APIClient, run: str) -> list[str]:
    return [found["Id"] for found in api.containers(all=True, filters={"label": f"{RUN_LABEL}={run}"})]


def build_image(api: docker.APIClient, name: str, dockerfile: str) -> str:
    tag = f"agent-r3-test/{name}:latest"
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as tar:
        data = dockerfile.replace("{base}", _base(api)).encode()
        entry = tarfile.TarInfo("Dockerfile")
        entry.size = len(data)
        tar.addfile(entry, io.BytesIO(data))
    context.seek(0)
    options = {"network_mode": "none", "rm": True, "forcerm": True}
    log = list(api.build(fileobj=context, custom_context=True, tag=tag, decode=True, **options))
    assert not any("error" in event for event in log), log[-3:]
    return tag


def _base(api: docker.APIClient) -> str:
    builder = ImageBuilder()
    tag = builder.base_tag()
    if not builder.has(tag):
        repository, _, version = tag.partition(":")
        with tempfile.TemporaryFile() as file:
            hostbase.write_base_tar(file)
            file.seek(0)
            api.import_image(src=file, repository=repository, tag=version, changes=["ENV LANG=C.UTF-8"])
    return tag
