"""Quick offline tasks, really built: the tests of each take about a third of a second."""

import asyncio
from collections.abc import Mapping

import docker
import pytest

from agent_r3.config import SandboxConfig, TasksConfig
from agent_r3.envs.build import build_tasks
from agent_r3.envs.datasets import load_tasks
from agent_r3.envs.images import ImageBuilder
from agent_r3.envs.local import open_pool
from agent_r3.envs.offline import offline_spec_path
from agent_r3.types import Task

PATHSPEC, MISTUNE = "pathspec__0.12.1", "mistune__3.1.1"
SIX = (PATHSPEC, MISTUNE, "humanize__4.12.3", "python-dotenv__1.1.1", "markdown__3.8__smarty", "cachetools__5.5.0")


def built(*ids: str) -> Mapping[str, Task]:
    """Task id -> task. Built in the user's cache, so only the first session pays."""

    async def build() -> None:
        async with open_pool(SandboxConfig(), run="tasks-build") as pool:
            await build_tasks(offline_spec_path("offline"), ids, ImageBuilder(), pool, lambda *_: None)

    asyncio.run(build())
    return {task.id: task for task in load_tasks(TasksConfig(dataset="offline", include=ids))}


@pytest.fixture(scope="session")
def built_tasks(docker_engine: docker.APIClient) -> Mapping[str, Task]:
    """PATHSPEC and MISTUNE."""
    return built(PATHSPEC, MISTUNE)


@pytest.fixture(scope="session")
def six_tasks(docker_engine: docker.APIClient) -> Mapping[str, Task]:
    """Those of `SIX`, in the dataset's order."""
    return built(*SIX)


@pytest.fixture(scope="session")
def pathspec_task(built_tasks: Mapping[str, Task]) -> Task:
    return built_tasks[PATHSPEC]


@pytest.fixture(scope="session")
def mistune_task(built_tasks: Mapping[str, Task]) -> Task:
    return built_tasks[MISTUNE]
