"""Base, environment and task images of the offline tasks. Tags are content addresses: what is there is not rebuilt."""

import hashlib
import io
import json
import re
import tarfile
import tempfile
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import docker
import requests
from docker.errors import DockerException, ImageNotFound

from agent_r3.envs import hostbase
from agent_r3.errors import DataError, UserError, boundary
from agent_r3.types import Task

WORKDIR = "/testbed"
PREFIX = "agent-r3"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# The host's own bundle in a base image made here (see hostbase), the distribution's in any other.
_CA_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"

# pip reaches its index here and nowhere else: the task image below is built, and every sandbox runs, without network.
_ENV_DOCKERFILE = f"""
ARG BASE_IMAGE
FROM ${{BASE_IMAGE}}
ARG PIP_INDEX_URL
COPY requirements.txt /tmp/requirements.txt
RUN ldconfig && python3 -m venv {WORKDIR}/.venv \\
 && if [ -f {_CA_BUNDLE} ]; then export PIP_CERT={_CA_BUNDLE}; fi \\
 && {WORKDIR}/.venv/bin/pip install --quiet --no-cache-dir --disable-pip-version-check -r /tmp/requirements.txt \\
 && rm /tmp/requirements.txt
ARG PROJECTS
RUN if {WORKDIR}/.venv/bin/pip show --quiet $PROJECTS 2>/dev/null; then echo "one of $PROJECTS is installed"; exit 1; fi
WORKDIR {WORKDIR}
ENV VIRTUAL_ENV={WORKDIR}/.venv PATH={WORKDIR}/.venv/bin:{_PATH} PYTHONPATH={WORKDIR}:{WORKDIR}/src LANG=C.UTF-8 TZ=UTC
"""

# One commit with a fixed author and date, so that equal sources give equal hashes. -f: a sdist holds generated files
# that its own .gitignore names.
_TASK_DOCKERFILE = f"""
ARG ENV_IMAGE
FROM ${{ENV_IMAGE}}
COPY repo/ {WORKDIR}/
RUN git init -q -b main . && printf '.venv/\\n__pycache__/\\n*.pyc\\nr2e_tests\\n' >> .git/info/exclude \\
 && git add -A -f . ':(exclude).venv' \\
 && GIT_AUTHOR_DATE=2000-01-01T00:00:00Z GIT_COMMITTER_DATE=2000-01-01T00:00:00Z \\
    git -c user.name=agent-r3 -c user.email=agent-r3@localhost commit -q -m base
CMD ["bash"]
"""


@dataclass(frozen=True, slots=True)
class Environment:
    """What an environment image holds, and what it must not: the fixed release of a task that runs in it."""

    requirements: tuple[str, ...]
    projects: tuple[str, ...]


def digest(*parts: object) -> str:
    """12 hex digits over the parts' JSON."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:12]


def require_images(tasks: Iterable[Task]) -> None:
    """Raises DataError for the first task whose locally built image is not there. Registry images are pulled later."""
    names = _connect_and_list()
    for task in tasks:
        if task.image.startswith(f"{PREFIX}/") and task.image not in names:
            what = "offline" if task.dataset == "offline" else "its task file"
            raise DataError(
                f"image {task.image} of task {task.id} is not built here; run `agent-r3 tasks build` on {what}"
            )


def _connect_and_list() -> set[str]:
    builder = ImageBuilder()
    with boundary(UserError, "list Docker images", DockerException, requests.RequestException):
        return {tag for image in builder.api.images(name=f"{PREFIX}/*") for tag in image["RepoTags"] or ()}


class ImageBuilder:
    """Builds through the Docker API; thread-safe. Raises UserError, with the end of the log where a build failed."""

    def __init__(self, base_image: str | None = None) -> None:
        self._base_image = base_image
        self._base_lock = threading.Lock()
        with boundary(
            UserError,
            "no Docker engine answers; start one or run `agent-r3 doctor`",
            DockerException,
            requests.RequestException,
        ):
            self.api = docker.APIClient(version="auto", timeout=600)

    def base_tag(self) -> str:
        """The image that environments start from: the one given, or one made of this host's packages."""
        made = digest(hostbase.describe(), Path(hostbase.__file__).read_text())
        return self._base_image or f"{PREFIX}/base:{made}"

    def base(self) -> str:
        """The base image, made when it is not there."""
        tag = self.base_tag()
        with self._base_lock:
            if not self._base_image and not self.has(tag):
                self._import_host(tag)
        return tag

    def env_tag(self, env: Environment) -> str:
        return f"{PREFIX}/env:{digest(self.base_tag(), env.requirements, env.projects, _ENV_DOCKERFILE)}"

    def env(self, env: Environment, index_url: str | None) -> None:
        """Base image + `/testbed/.venv` with the requirements, which pip takes from `index_url` or its default."""
        tag = self.env_tag(env)
        if self.has(tag):
            return
        base = self.base()
        context = _context(_ENV_DOCKERFILE, {"requirements.txt": "\n".join(env.requirements).encode()})
        arguments = {"BASE_IMAGE": base, "PROJECTS": " ".join(env.projects)}
        if index_url:  # belongs to this host, not to what the image is: no part of the tag
            arguments["PIP_INDEX_URL"] = index_url
        self._build(tag, context, arguments, network="host")

    def task_tag(self, name: str, env: str, *facts: object) -> str:
        return f"{PREFIX}/task:{name}-{digest(env, facts, _TASK_DOCKERFILE)}"

    def task(self, tag: str, env: str, repo: Path) -> None:
        """Environment image + the repository as one commit on main."""
        if not self.has(tag):
            self._build(tag, _context(_TASK_DOCKERFILE, {}, repo), {"ENV_IMAGE": env}, network="none")

    def has(self, tag: str) -> bool:
        with boundary(UserError, f"inspect image {tag}", DockerException, requests.RequestException):
            try:
                self.api.inspect_image(tag)  # type: ignore[no-untyped-call]
            except ImageNotFound:
                return False
        return True

    def _import_host(self, tag: str) -> None:
        changes = ['CMD ["bash"]', f"ENV PATH={_PATH}", "ENV LANG=C.UTF-8"]
        repository, _, version = tag.partition(":")
        with tempfile.TemporaryFile() as file:
            hostbase.write_base_tar(file)
            file.seek(0)
            with boundary(UserError, f"import {tag}", DockerException, requests.RequestException):
                answer = self.api.import_image(src=file, repository=repository, tag=version, changes=changes)
        if '"error"' in answer:
            raise UserError(f"import {tag}: {' '.join(answer.split())[-500:]}")

    def _build(self, tag: str, context: io.BytesIO, arguments: Mapping[str, str], network: str) -> None:
        log: list[str] = []
        with boundary(UserError, f"build {tag}", DockerException, requests.RequestException):
            for event in self.api.build(
                fileobj=context, custom_context=True, tag=tag, buildargs=dict(arguments), network_mode=network,
                rm=True, forcerm=True, decode=True, labels={"agent-r3.image": "1"},
            ):  # fmt: skip
                log.append(str(event.get("stream") or event.get("error") or ""))
                if "error" in event:
                    raise UserError(f"build {tag} failed: {_tail(log)}")


def _tail(log: list[str]) -> str:
    return " | ".join(line for line in re.split(r"\n+", "".join(log)) if line.strip())[-700:]


def _context(dockerfile: str, files: Mapping[str, bytes], repo: Path | None = None) -> io.BytesIO:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in {"Dockerfile": dockerfile.encode(), **files}.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
        if repo is not None:
            tar.add(repo, arcname="repo", filter=_as_root)
    buffer.seek(0)
    return buffer


def _as_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    return entry
