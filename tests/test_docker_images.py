"""Images: pulled when missing from a real registry, pinned for a run, removed when the disk is full."""

import asyncio
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import docker
import pytest

from agent_r3.config import SandboxConfig
from agent_r3.envs.local import open_pool
from agent_r3.envs.pool import SandboxPool
from agent_r3.errors import DataError, DiskFullError, ImagePullError
from tests.support.docker import make_task
from tests.support.private_engine import PrivateEngine, small_disk
from tests.support.registry import Registry, registry_for
from tests.support.tiny_image import make_tiny_image

pytestmark = pytest.mark.docker


@pytest.fixture
def engine(
    private_engine: PrivateEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[docker.APIClient]:
    """The private engine, to which DOCKER_HOST leads, and a cache that knows of no image."""
    monkeypatch.setenv("DOCKER_HOST", private_engine.url)
    monkeypatch.setenv("AGENT_R3_CACHE", str(tmp_path))
    client = private_engine.client()
    yield client
    for image in client.images(quiet=True):
        client.remove_image(image, force=True)
    client.close()


def publish(engine: docker.APIClient, registry: Registry, name: str, extra: bytes = b"") -> tuple[str, str]:
    """Push an image and remove it from the engine; returns its full name and its name by digest."""
    full = f"{registry.address}/{name}"
    make_tiny_image(engine, full, extra=extra)
    digest = registry.push(engine, full)
    engine.remove_image(full)
    registry.asked.clear()
    return full, f"{full.rpartition(':')[0]}@{digest}"


def names(engine: docker.APIClient) -> set[str]:
    return {tag for image in engine.images() for tag in image["RepoTags"] or ()}


async def says_hello(pool: SandboxPool, image: str) -> bool:
    sandbox = await pool.acquire_for_grading(make_task(image))
    return (await sandbox.exec("echo hello", timeout_s=20)).output == b"hello\n"


async def test_a_missing_image_is_pulled_however_busy_its_registry_is(
    engine: docker.APIClient, registry: Registry
) -> None:
    image, by_digest = publish(engine, registry, "busy:1")
    registry.refuse = 2
    async with open_pool(SandboxConfig()) as pool:
        await pool.prefetch([make_task(image)] * 2)
        while image not in names(engine):
            await asyncio.sleep(0.05)
        asked = len(registry.asked)
        assert await says_hello(pool, image)
        assert registry.refuse == 0 and len(registry.asked) == asked
    engine.remove_image(image)
    async with open_pool(SandboxConfig()) as pool:
        assert await says_hello(pool, by_digest)


async def test_a_registry_that_refuses_to_the_end_is_an_infrastructure_failure(
    engine: docker.APIClient, registry: Registry
) -> None:
    image, _ = publish(engine, registry, "refused:1")
    registry.refuse = 1000
    began = time.monotonic()
    async with open_pool(SandboxConfig(pull_timeout_s=2.0)) as pool:
        with pytest.raises(ImagePullError, match=r"refused:1.*(429|toomanyrequests)"):
            await pool.acquire_for_grading(make_task(image))
    assert registry.refuse <= 998 and time.monotonic() - began < 20


async def test_a_pull_that_stands_still_ends_at_its_deadline(engine: docker.APIClient, registry: Registry) -> None:
    image, _ = publish(engine, registry, "slow:1")
    registry.open.clear()
    began = time.monotonic()
    async with open_pool(SandboxConfig(pull_timeout_s=1.0)) as pool:
        with pytest.raises(ImagePullError, match=r"pull of .*slow:1"):
            await pool.acquire_for_grading(make_task(image))
    assert time.monotonic() - began < 20


async def test_closing_gives_up_a_pull(engine: docker.APIClient, registry: Registry) -> None:
    image, _ = publish(engine, registry, "endless:1")
    registry.open.clear()
    pool = open_pool(SandboxConfig())
    waiting = asyncio.create_task(pool.acquire_for_grading(make_task(image)))
    while not registry.asked:
        await asyncio.sleep(0.05)
    await asyncio.wait_for(pool.close(), 20)
    with pytest.raises(ImagePullError, match="being closed"):
        await waiting


async def test_an_image_that_does_not_exist_is_the_users_to_mend(engine: docker.APIClient, registry: Registry) -> None:
    image, _ = publish(engine, registry, "there:1")
    async with open_pool(SandboxConfig()) as pool:
        with pytest.raises(DataError, match=r"there:2 cannot be pulled: manifest .*unknown"):
            await pool.acquire_for_grading(make_task(image.replace(":1", ":2")))
        assert sum("/there/" in path for path in registry.asked) <= 2  # GET and HEAD of one try
        with pytest.raises(DataError, match="`Not A Name` is not an image name"):
            await pool.acquire_for_grading(make_task("Not A Name"))
    async with open_pool(SandboxConfig(pull=False)) as pool:
        with pytest.raises(DataError, match=r"there:1 of task task is not on this Docker engine; set sandbox\.pull"):
            await pool.prefetch([make_task(image)])


async def test_at_most_two_images_are_pulled_at_once(engine: docker.APIClient, registry: Registry) -> None:
    images = [publish(engine, registry, f"many-{number}:1")[0] for number in range(4)]
    registry.asked.clear()
    registry.open.clear()
    async with open_pool(SandboxConfig()) as pool:
        await pool.prefetch([make_task(image) for image in images])
        while len(registry.asked) < 2:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        assert len({path.split("/")[2] for path in registry.asked}) == 2
        registry.open.set()
        assert all(await asyncio.gather(*(says_hello(pool, image) for image in images)))


async def test_a_tag_that_moves_in_mid_run_changes_nothing(engine: docker.APIClient, registry: Registry) -> None:
    image, _ = publish(engine, registry, "moving:1")
    async with open_pool(SandboxConfig()) as pool:
        first = await pool.acquire_for_grading(make_task(image))
        seen = engine.inspect_container(first.id)["Image"]
        assert make_tiny_image(engine, image, extra=b"other") != seen
        later = await pool.acquire_for_grading(make_task(image))
        assert engine.inspect_container(later.id)["Image"] == seen
        for sandbox in (first, later):
            await sandbox.close()
        while engine.containers(all=True):
            await asyncio.sleep(0.05)
        engine.remove_image(seen)
        with pytest.raises(DataError, match=f"moving:1 .* was {seen} before"):
            await pool.acquire_for_grading(make_task(image))


async def test_an_image_that_was_removed_in_mid_run_is_pulled_again(
    engine: docker.APIClient, registry: Registry
) -> None:
    image, _ = publish(engine, registry, "removed:1")
    async with open_pool(SandboxConfig()) as pool:
        sandbox = await pool.acquire_for_grading(make_task(image))
        await sandbox.close()
        while engine.containers(all=True):
            await asyncio.sleep(0.05)
        engine.remove_image(image)
        assert await says_hello(pool, image)


def pulled(engine: docker.APIClient, cache: Path, image: str, age_s: float) -> None:
    """Let the last use of an image that we pulled be so long ago."""
    mark = cache / "pulled" / quote(engine.info()["ID"], safe="") / quote(image, safe="")
    then = time.time() - age_s
    os.utime(mark, (then, then))


async def test_below_the_floor_unused_pulled_images_go_and_nothing_else(
    engine: docker.APIClient, registry: Registry, tmp_path: Path
) -> None:
    unused, planned, recent, busy = (publish(engine, registry, f"{name}:1")[0] for name in ("a", "b", "c", "d"))
    users = f"{registry.address}/users:1"
    for name in (users, "agent-r3/task:x"):
        make_tiny_image(engine, name, extra=name.encode())
    async with open_pool(SandboxConfig()) as pool:
        for image in (unused, planned, recent, busy, users):
            assert await says_hello(pool, image)
    container = engine.create_container(busy, command=["x"])
    for image in (unused, planned, busy):
        pulled(engine, tmp_path, image, age_s=10_000)
    async with open_pool(SandboxConfig(disk_floor="100000g", watch_s=0.2)) as pool:
        await pool.prefetch([make_task(planned)])
        with pytest.raises(
            DiskFullError, match=r"\d+ MiB are free at .*, less than sandbox.disk_floor \(102400000 MiB\)"
        ):
            await pool.acquire_for_grading(make_task(planned))
        assert names(engine) == {planned, recent, busy, users, "agent-r3/task:x"}
    engine.remove_container(container)


async def test_the_floor_is_of_the_disk_that_the_config_names(
    engine: docker.APIClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a container the engine's own folder is out of sight."""
    monkeypatch.setattr(socket, "gethostname", lambda: "container")
    make_tiny_image(engine, "agent-r3-test/tiny:latest")
    task = make_task("agent-r3-test/tiny:latest")
    async with open_pool(SandboxConfig(disk_floor="100000g")) as pool:  # no folder is known to look at
        assert await says_hello(pool, task.image)
    async with open_pool(SandboxConfig(disk_floor="100000g", docker_disk=tmp_path)) as pool:
        with pytest.raises(DiskFullError, match=f"MiB are free at {tmp_path}, less than sandbox.disk_floor"):
            await pool.acquire_for_grading(task)


async def test_images_go_by_age_until_enough_is_free(
    registry_port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AGENT_R3_CACHE", str(tmp_path))
    with small_disk("256m") as folder, PrivateEngine(folder / "e") as private:
        monkeypatch.setenv("DOCKER_HOST", private.url)
        engine = private.client()
        with registry_for(private, registry_port) as registry:
            old, new = (publish(engine, registry, f"heavy-{i}:1", os.urandom(20 << 20))[0] for i in (1, 2))
            async with open_pool(SandboxConfig(disk_floor="1m")) as pool:
                for image in (old, new):
                    assert await says_hello(pool, image)
        pulled(engine, tmp_path, old, age_s=20_000)
        pulled(engine, tmp_path, new, age_s=10_000)
        make_tiny_image(engine, "agent-r3-test/tiny:latest")
        floor = shutil.disk_usage(folder).free + (10 << 20)
        async with open_pool(SandboxConfig(disk_floor=str(floor))) as pool:
            assert await says_hello(pool, "agent-r3-test/tiny:latest")
        assert names(engine) == {new, "agent-r3-test/tiny:latest"}
        engine.close()
