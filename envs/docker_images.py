"""Images on the Docker engine: pulled when missing, the same all through a run, removed when the disk is full.

Only images that this package pulled are ever removed. Which those are is kept in the cache, one empty file an image;
its time is that of the last use by any of our processes.
"""

import asyncio
import shutil
import socket
import time
from collections.abc import Collection
from pathlib import Path
from urllib.parse import quote, unquote

import docker
import structlog
from docker.errors import APIError, NotFound

from agent_r3.config import SandboxConfig
from agent_r3.envs.cache import cache_dir
from agent_r3.envs.docker_faults import FAULTS, Threads, engine_boundary, in_detached_thread
from agent_r3.envs.docker_pull import Puller
from agent_r3.envs.sizes import Sizes
from agent_r3.errors import DataError, DiskFullError, ImagePullError
from agent_r3.types import Task

log = structlog.get_logger(__name__)

_AT_ONCE = 2  # pulls: more of them share the same line, and registries count requests
_CONFLICT = 409


class DockerImages:
    """`require` has an image here and gives its id; `make_room` keeps `disk_floor` bytes free."""

    def __init__(self, api: docker.APIClient, config: SandboxConfig) -> None:
        self._api = api
        self._config = config
        self._floor = Sizes.of(config).disk_floor
        self._spare_s = max(120.0, 3 * config.watch_s)  # another process that plans an image has named it since then
        self._puller = Puller(api, config.pull_timeout_s)
        self._threads = Threads(4, "images")
        self._pulls = asyncio.Semaphore(_AT_ONCE)
        self._ids: dict[str, str] = {}  # name -> id as first seen
        self._here: set[str] = set()
        self._fetching: dict[str, asyncio.Task[None]] = {}
        self._planned: set[str] = set()
        self._collecting = asyncio.Lock()
        self._root: Path | None = None  # on the disk of the engine's data, where that can be seen
        self._marks: Path | None = None

    async def ahead(self, task: Task) -> None:
        """See that the image is here or begin to pull it. Raises DataError for one that cannot come, DaemonError."""
        self._planned.add(task.image)
        if task.image in self._here or task.image in self._fetching:
            return
        if await self._look(task.image) is None:
            self._check_pullable(task)
            self._begin(task)
        else:
            await self.require(task)

    async def require(self, task: Task) -> str:
        """The id of the task's image, which is here. Raises DataError, ImagePullError, DiskFullError, DaemonError."""
        name = task.image
        self._planned.add(name)
        if name not in self._here:
            fetching = self._fetching.get(name) or self._begin(task)
            try:
                await asyncio.shield(fetching)
            except asyncio.CancelledError:
                if fetching.cancelled():  # `give_up`, not our own end
                    raise ImagePullError(f"pull of {name}: given up, the sandboxes are being closed") from None
                raise
        self._mark_used(name)
        return self._ids[name]

    def lost(self, name: str) -> None:
        """The engine no longer has the image: look for it again at the next `require`."""
        self._here.discard(name)

    def plan(self, tasks: Collection[Task]) -> None:
        """Say which images are wanted next; they are not removed to make room."""
        self._planned = {task.image for task in tasks}
        for name in self._planned:
            self._mark_used(name)

    async def make_room(self) -> None:
        """Remove unused pulled images while less than `disk_floor` is free. Raises DiskFullError, DaemonError."""
        root = await self._data_root()
        if root is None or _free(root) >= self._floor:
            return
        async with self._collecting:
            await self._threads.call(self._collect, root)
        if (free := _free(root)) < self._floor:
            raise DiskFullError(
                f"{free >> 20} MiB are free at {root}, less than sandbox.disk_floor ({self._floor >> 20} MiB), and no "
                "unused image that was pulled here is left to remove"
            )

    def give_up(self) -> None:
        """End the pulls that are under way or waiting."""
        self._puller.close()
        for fetching in self._fetching.values():
            fetching.cancel()

    def close(self) -> None:
        self.give_up()
        self._threads.close()

    def _begin(self, task: Task) -> asyncio.Task[None]:
        fetching = self._fetching[task.image] = asyncio.create_task(self._fetch(task))
        fetching.add_done_callback(lambda done: self._fetched(task.image, done))
        return fetching

    async def _fetch(self, task: Task) -> None:
        name = task.image
        found = await self._look(name)
        if found is None:
            self._check_pullable(task)
            await self.make_room()
            async with self._pulls:
                await in_detached_thread(self._puller.pull, name)
            found = await self._look(name)
            if found is None:
                raise DataError(f"image {name} of task {task.id} was pulled and is not on the engine under this name")
            (self._marks_folder() / quote(name, safe="")).touch()
        if found != self._ids.setdefault(name, found):
            raise DataError(f"image {name} of task {task.id} was {self._ids[name]} before, and now it is {found}")
        self._here.add(name)

    def _fetched(self, name: str, done: asyncio.Task[None]) -> None:
        del self._fetching[name]
        if not done.cancelled() and (error := done.exception()) is not None:
            log.warning("image not here", image=name, error=str(error))  # nobody may be waiting for it

    def _check_pullable(self, task: Task) -> None:
        if _is_local(task.image) or not self._config.pull:
            raise DataError(_missing(task, self._config.pull))

    async def _look(self, name: str) -> str | None:
        with engine_boundary(f"look for image {name}"):
            return await self._threads.call(self._id_of, name)

    def _id_of(self, name: str) -> str | None:
        try:
            return str(self._api.inspect_image(name)["Id"])  # type: ignore[no-untyped-call]
        except NotFound:
            return None
        except APIError as exc:
            if exc.status_code == 400:
                raise DataError(f"`{name}` is not an image name: {exc.explanation}") from exc
            raise

    async def _data_root(self) -> Path | None:
        if self._marks is None:
            with engine_boundary("ask the engine for its data folder"):
                info = await self._threads.call(self._api.info)
            root = Path(info["DockerRootDir"])
            seen = info["Name"] == socket.gethostname() and root.is_dir()
            self._root = self._config.docker_disk or (root if seen else None)
            self._marks = cache_dir() / "pulled" / quote(info["ID"], safe="")
            self._marks.mkdir(parents=True, exist_ok=True)
        return self._root

    def _marks_folder(self) -> Path:
        if self._marks is None:
            raise RuntimeError("make_room comes before the first pull")
        return self._marks

    def _mark_used(self, name: str) -> None:
        """Nothing happens for an image that we did not pull."""
        if self._marks is not None and (mark := self._marks / quote(name, safe="")).exists():
            mark.touch()

    def _collect(self, root: Path) -> None:
        """Blocks. Oldest use first, until enough is free."""
        marks = sorted(self._marks_folder().iterdir(), key=lambda mark: mark.stat().st_mtime)
        with engine_boundary("list containers"):
            busy = {container["ImageID"] for container in self._api.containers(all=True)}
        for mark in marks:
            name = unquote(mark.name)
            before = _free(root)
            if before >= self._floor:
                return
            if name in self._planned or time.time() - mark.stat().st_mtime < self._spare_s:
                continue
            try:
                found = self._id_of(name)
                if found in busy:
                    continue
                if found is not None:
                    self._api.remove_image(name)
            except APIError as exc:
                if exc.status_code != _CONFLICT:
                    log.warning("image not removed", image=name, error=str(exc))
                continue
            except FAULTS as exc:
                log.warning("image not removed", image=name, error=str(exc))
                return
            self._here.discard(name)
            mark.unlink(missing_ok=True)
            log.info("image removed to make room", image=name, freed_mib=(_free(root) - before) >> 20)


def _is_local(name: str) -> bool:
    """Names of images that are built here: no registry has them."""
    return name.startswith(("agent-r3/", "agent-r3-"))


def _free(root: Path) -> int:
    return shutil.disk_usage(root).free


def _missing(task: Task, pull: bool) -> str:
    if _is_local(task.image):
        mend = f"build it with `agent-r3 tasks build {'offline' if task.dataset == 'offline' else task.dataset}`"
    else:
        mend = f"get it with `docker pull {task.image}`" if pull else "set sandbox.pull, or get it with `docker pull`"
    return f"image {task.image} of task {task.id} is not on this Docker engine; {mend}"
