"""The images of Harbor task folders: built of `environment/Dockerfile`, or a prebuilt one under a name of ours."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
from docker.errors import DockerException

from agent_r3.envs.harbor import FILE, HarborFile, Image, harbor_folders, image_path, image_tag, read_file
from agent_r3.envs.images import ImageBuilder
from agent_r3.errors import DataError, UserError, boundary

Progress = Callable[[str, str], None]  # (task id, what is being done)


@dataclass(frozen=True, slots=True)
class Built:
    """The image of one task folder, and whether it was there already."""

    task_id: str
    image: str
    reused: bool


def build_harbor(folder: Path, only: Sequence[str], builder: ImageBuilder, progress: Progress) -> list[Built]:
    """Build the tasks' images (all, or `only` those), with this host's network. Raises UserError."""
    folders = {path.name: path for path in harbor_folders(folder)}
    if unknown := set(only) - folders.keys():
        raise DataError(f"{folder} has no task {', '.join(sorted(unknown))}; it has {', '.join(folders)}")
    return [_build(path, builder, progress) for name, path in folders.items() if not only or name in only]


def _build(folder: Path, builder: ImageBuilder, progress: Progress) -> Built:
    file = read_file(folder)
    tag = image_tag(folder, file)
    path = image_path(tag)
    if path.is_file() and builder.has(tag):
        progress(folder.name, "there")
        return Built(folder.name, tag, reused=True)
    progress(folder.name, "image")
    _build_image(builder, tag, _context(folder, file))
    workdir = file.environment.workdir or _workdir_of(builder, tag)
    if not workdir.startswith("/") or workdir == "/":
        raise DataError(f"{folder}: its image must set a WORKDIR, the folder that is the agent's; it has {workdir!r}")
    path.parent.mkdir(exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(Image(tag=tag, workdir=workdir).model_dump_json())
    part.replace(path)
    progress(folder.name, "built")
    return Built(folder.name, tag, reused=False)


def _context(folder: Path, file: HarborFile) -> dict[str, Any]:
    """What `docker build` starts from, as arguments of the SDK."""
    environment = folder / "environment"
    if (environment / "Dockerfile").is_file():
        return {"path": str(environment)}
    if file.environment.docker_image:
        return {"fileobj": io.BytesIO(f"FROM {file.environment.docker_image}\n".encode())}
    raise DataError(f"{folder}: it has neither environment/Dockerfile nor `environment.docker_image` in {FILE}")


def _build_image(builder: ImageBuilder, tag: str, context: dict[str, Any]) -> None:
    log = ""
    with boundary(UserError, f"build {tag}", DockerException, requests.RequestException, OSError):
        for event in builder.api.build(
            **context, tag=tag, network_mode="host", rm=True, forcerm=True, decode=True, labels={"agent-r3.image": "1"}
        ):
            log = (log + str(event.get("stream") or event.get("error") or ""))[-10_000:]
            if "error" in event:
                raise UserError(f"build {tag} failed: {' | '.join(filter(str.strip, log.splitlines()))[-700:]}")


def _workdir_of(builder: ImageBuilder, tag: str) -> str:
    with boundary(UserError, f"inspect image {tag}", DockerException, requests.RequestException):
        return str(builder.api.inspect_image(tag)["Config"].get("WorkingDir") or "")  # type: ignore[no-untyped-call]
