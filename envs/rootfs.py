"""The store of unpacked images that bwrap sandboxes start from: `agent-r3 tasks rootfs` fills it.

    FOLDER/layers/HEX/         a layer (see layers.py)
    FOLDER/NAME/rootfs/        the tree of an image, hard links to the files of its layers
    FOLDER/NAME/config.json    its name, layers, environment variables and the user its files belong to

NAME is the image's reference with `+` for `/`. Removing an image that sandboxes run from pulls the ground from under
them; the whole folder may be deleted at any other time.
"""

import fcntl
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import docker
from docker.errors import ImageNotFound

from agent_r3.envs.bwrap import sandbox_user
from agent_r3.envs.cache import cache_dir
from agent_r3.envs.docker_faults import FAULTS
from agent_r3.envs.layers import DRAFT, build_tree, new_folder, unpack_layer
from agent_r3.envs.saved_images import Archive, SavedImage
from agent_r3.errors import DataError, UserError, boundary
from agent_r3.types import Task

_AT_ONCE = 32  # images saved by the engine into one archive, which holds shared layers once


@dataclass(frozen=True, slots=True)
class Rootfs:
    """An unpacked image. `folder` holds `rootfs`."""

    image: str
    folder: Path
    layers: tuple[str, ...]
    environment: Mapping[str, str]
    owner: int  # uid of its files


class RootfsStore:
    """`on_image(name, reused)` is told of each image that `unpack_*` has made ready."""

    def __init__(self, folder: Path | None, on_image: Callable[[str, bool], None] = lambda *_: None) -> None:
        self.folder = (folder or cache_dir() / "rootfs").absolute()
        self._on_image = on_image

    def find(self, image: str) -> Rootfs | None:
        """An image that was unpacked. Raises DataError when its config.json cannot be read."""
        folder = self.folder / _folder_name(image)
        try:
            tree = json.loads((folder / "config.json").read_text())
            return Rootfs(tree["image"], folder, tuple(tree["layers"]), tree["environment"], tree["owner"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as exc:
            raise DataError(f"{folder / 'config.json'} cannot be read ({exc}); delete {folder} and unpack it") from exc

    def require(self, task: Task) -> Rootfs:
        """The task's image, unpacked. Raises DataError that names the command."""
        found = self.find(task.image)
        where = f"image {task.image} of task {task.id}"
        mend = f"`agent-r3 tasks rootfs {task.image} {self.folder}`"
        if found is None:
            raise DataError(f"{where} is not unpacked in {self.folder}; run {mend}")
        if found.owner != sandbox_user():
            raise DataError(
                f"{where} was unpacked for user {found.owner}, but sandboxes run as {sandbox_user()} here; delete "
                f"{found.folder} and run {mend} as the user who starts the sandboxes"
            )
        return found

    def unpack_images(self, api: docker.APIClient, images: Iterable[str]) -> None:
        """Unpack images of a Docker engine; what is here in the same version stays. Raises UserError."""
        with self._locked():
            for wanted in _batches(self._missing(api, images)):
                with tempfile.NamedTemporaryFile(dir=self.folder, prefix=DRAFT) as file:
                    _save(api, wanted, file)
                    self._unpack(Path(file.name), wanted)

    def unpack_archive(self, path: Path, image: str | None = None) -> None:
        """Unpack the images of a `docker save` or OCI archive; `image` names one that has no name. Raises DataError."""
        with self._locked():
            self._unpack(path, [image] if image else None)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One process fills the store at a time; what a killed one left half done is removed."""
        with ExitStack() as stack:
            with boundary(DataError, f"use {self.folder}", OSError):
                (self.folder / "layers").mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context((self.folder / ".lock").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX)
                for draft in [*self.folder.glob(f"{DRAFT}*"), *(self.folder / "layers").glob(f"{DRAFT}*")]:
                    draft.unlink() if draft.is_file() else shutil.rmtree(draft)
            yield

    def _missing(self, api: docker.APIClient, images: Iterable[str]) -> list[str]:
        missing = []
        for image in dict.fromkeys(images):
            with boundary(UserError, f"look for image {image}", *FAULTS):
                try:
                    found: Any = api.inspect_image(image)  # type: ignore[no-untyped-call]
                except ImageNotFound as exc:
                    raise DataError(f"image {image} is not on this Docker engine; pull or build it first") from exc
            if self._is_here(image, tuple(found["RootFS"].get("Layers") or ())):
                self._on_image(image, True)
            else:
                missing.append(image)
        return missing

    def _unpack(self, path: Path, wanted: Sequence[str] | None) -> None:
        archive = Archive(path)
        try:
            for name, saved in _named(archive.images(), wanted, path):
                self._on_image(name, self._unpack_image(archive, name, saved))
        finally:
            archive.close()

    def _is_here(self, image: str, layers: tuple[str, ...]) -> bool:
        found = self.find(image)
        return found is not None and found.layers == layers and found.owner == sandbox_user()

    def _unpack_image(self, archive: Archive, name: str, saved: SavedImage) -> bool:
        if self._is_here(name, saved.layers):
            return True
        owner = sandbox_user()
        layers = [self.folder / "layers" / f"{digest.rpartition(':')[2]}-{owner}" for digest in saved.layers]
        for digest, member, folder in zip(saved.layers, saved.members, layers, strict=True):
            if not folder.is_dir():
                with archive.layer(member) as stream:
                    unpack_layer(stream, digest, folder, owner)
        final = self.folder / _folder_name(name)
        if final.exists():  # the name has moved to another image
            shutil.rmtree(final)
        with new_folder(final) as draft:
            draft.chmod(0o755)  # its user must get in whatever our umask is
            (draft / "rootfs").mkdir()
            build_tree(layers, draft / "rootfs", owner)
            made = Rootfs(name, final, saved.layers, dict(saved.environment), owner)
            (draft / "config.json").write_text(json.dumps(asdict(made) | {"folder": final.name}, indent=1))
        return False


def _batches(images: list[str]) -> Iterator[list[str]]:
    """Those that are saved together. An image asked for by its digest has no name in the archive, so it comes alone."""
    named = [image for image in images if "@" not in image]
    yield from (named[start : start + _AT_ONCE] for start in range(0, len(named), _AT_ONCE))
    yield from ([image] for image in images if "@" in image)


def _named(images: list[SavedImage], wanted: Sequence[str] | None, path: Path) -> list[tuple[str, SavedImage]]:
    by_name = {_canonical(name): image for image in images for name in image.names}
    if wanted is None:
        if any(not image.names for image in images):
            raise DataError(f"{path} holds an image without a name; give it one with --name")
        return list(by_name.items())
    if len(images) == 1 and len(wanted) == 1:
        return [(wanted[0], images[0])]
    missing = [name for name in wanted if _canonical(name) not in by_name]
    if missing:
        raise DataError(f"{path} does not hold image {missing[0]}; it holds {', '.join(sorted(by_name)) or 'none'}")
    return [(name, by_name[_canonical(name)]) for name in wanted]


def _canonical(image: str) -> str:
    """One spelling for `python`, `python:latest` and `docker.io/library/python:latest`."""
    short = image.removeprefix("docker.io/").removeprefix("library/")
    return short if ":" in short.rpartition("/")[2] or "@" in short else f"{short}:latest"


def _folder_name(image: str) -> str:
    return _canonical(image).replace("/", "+")


def _save(api: docker.APIClient, images: list[str], file: IO[bytes]) -> None:
    """`docker save` of several images at once, which the SDK has no method for."""
    with boundary(UserError, f"save {', '.join(images)}", *FAULTS):
        answer: Any = api.get(f"{api.base_url}/images/get", params={"names": images}, stream=True, timeout=600)
        answer.raise_for_status()
        shutil.copyfileobj(answer.raw, file, 1 << 20)
        file.flush()
