"""Harbor task folders: `task.toml`, `instruction.md`, `environment/Dockerfile`, `tests/test.sh`, `solution/solve.sh`.

A dataset is a folder of such folders, or one of them. Read are the instruction, the verifier's time and variables,
the prebuilt image, the workdir and whether the internet is asked for; a task that needs more (several containers or
steps, a verifier's image of its own, an allow-list of hosts, variables of this host) is refused with what it needs.

Departure from Harbor: a task that says nothing of the internet gets none.
"""

import hashlib
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agent_r3.envs.cache import cache_dir
from agent_r3.errors import DataError, boundary
from agent_r3.types import Source, Task

FILE = "task.toml"


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class _Verifier(_Section):
    timeout_sec: float = Field(default=600.0, gt=0)
    env: dict[str, str] = {}
    environment_mode: Literal["shared"] = "shared"
    network_mode: Literal["public", "no-network"] | None = None


class _Environment(_Section):
    docker_image: str | None = None
    workdir: str | None = None
    allow_internet: bool = False
    network_mode: Literal["public", "no-network"] | None = None
    env: dict[str, str] = Field(default={}, max_length=0)


class HarborFile(_Section):
    """The part of task.toml that is read. What it does not know is left alone, as Harbor does."""

    verifier: _Verifier = _Verifier()
    environment: _Environment = _Environment()
    steps: list[object] = Field(default=[], max_length=0)

    @property
    def network(self) -> bool:
        return self.environment.allow_internet or self.environment.network_mode == "public"


class Image(BaseModel):
    """A built image, and what building found out of it."""

    tag: str
    workdir: str


def harbor_tasks(folder: Path) -> list[Task]:
    """The tasks of a folder, by name. Raises DataError for a malformed one and for one that is not built."""
    return [_task(path, str(folder)) for path in harbor_folders(folder)]


def harbor_folders(folder: Path) -> list[Path]:
    """The task folders in it, or itself, by name. Raises DataError where there is none."""
    if not folder.is_dir():
        raise DataError(f"task folder {folder} is not there")
    found = [folder] if (folder / FILE).is_file() else sorted(path.parent for path in folder.glob(f"*/{FILE}"))
    if not found:
        raise DataError(f"{folder} holds no Harbor task: neither {FILE} nor folders with one")
    return [path.resolve() for path in found]


def _task(folder: Path, dataset: str) -> Task:
    file = read_file(folder)
    instruction = _text(folder, "instruction.md")
    _text(folder, "tests/test.sh")
    image = _image(folder, file)
    solution = folder / "solution"
    if solution.is_dir():
        _text(folder, "solution/solve.sh")
    variables = "".join(f"{name}={shlex.quote(value)} " for name, value in file.verifier.env.items())
    return Task(
        id=folder.name,
        dataset=dataset,
        repo=folder.name,
        image=image.tag,
        problem_statement=instruction.strip(),
        expected={},
        test_command=f"{variables}bash /tests/test.sh",
        gold_patch="",
        workdir=image.workdir,
        hidden_tests_dir=folder / "tests",
        source=Source.HARBOR,
        network=file.network,
        test_timeout_s=file.verifier.timeout_sec,
        solution_dir=solution if solution.is_dir() else None,
    )


def read_file(folder: Path) -> HarborFile:
    """The folder's task.toml. Raises DataError that names file and key."""
    path = folder / FILE
    with boundary(DataError, f"read {path}", tomllib.TOMLDecodeError, UnicodeDecodeError, OSError):
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    try:
        file = HarborFile.model_validate(tree)
    except ValidationError as exc:
        problems = "; ".join(f"`{'.'.join(map(str, e['loc']))}`: {e['msg']}" for e in exc.errors())
        raise DataError(f"{path}: not supported here: {problems}") from exc
    for name, value in file.verifier.env.items():
        if "${" in value or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise DataError(f"{path}: `verifier.env.{name}` asks for a variable of this host, which no sandbox gets")
    if file.verifier.network_mode == "public" and not file.network:
        raise DataError(
            f"{path}: its verifier asks for a network and its agent for none; here both have one or neither"
        )
    return file


def _text(folder: Path, name: str) -> str:
    path = folder / name
    with boundary(DataError, f"read {path}", UnicodeDecodeError, OSError):
        text = path.read_text(encoding="utf-8")
    if not text.strip():
        raise DataError(f"{path} is empty")
    return text


def image_tag(folder: Path, file: HarborFile) -> str:
    """A content address of what is built. Raises DataError for an environment of several containers."""
    content = hashlib.sha256(repr((file.environment.docker_image, file.environment.workdir)).encode())
    for path in _context(folder):
        link = str(path.readlink()) if path.is_symlink() else ""
        data = b"" if link or path.is_dir() else path.read_bytes()
        entry = (path.relative_to(folder).as_posix(), path.lstat().st_mode, link, hashlib.sha256(data).hexdigest())
        content.update(repr(entry).encode())
    name = re.sub(r"[^a-z0-9]+", "-", folder.name.lower()).strip("-")
    return f"agent-r3/harbor:{name[:60]}-{content.hexdigest()[:12]}"


def _context(folder: Path) -> Iterator[Path]:
    environment = folder / "environment"
    for name in ("docker-compose.yaml", "docker-compose.yml", "compose.yaml"):
        if (environment / name).exists():
            raise DataError(f"{environment / name}: tasks of several containers are not supported here")
    yield from sorted(environment.rglob("*"))


def image_path(tag: str) -> Path:
    """Where building writes what it found out, as `Image`."""
    return cache_dir() / "harbor" / f"{tag.rpartition(':')[2]}.json"


def _image(folder: Path, file: HarborFile) -> Image:
    path = image_path(image_tag(folder, file))
    if not path.is_file():
        raise DataError(f"the image of task {folder.name} is not built here; run `agent-r3 tasks build {folder}`")
    with boundary(DataError, f"read {path}", OSError, ValidationError):
        return Image.model_validate_json(path.read_text())
