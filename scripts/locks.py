"""Derives requirements/images/*.lock, one an environment of the images, from requirements/cpu.lock.

    .venv/bin/python scripts/locks.py [--check]

Each holds what its extras of pyproject.toml need, followed through the metadata of what .venv has installed, and
nothing that cpu.lock leaves out (CUDA parts of SGLang, for instance).
"""

import sys
import tomllib
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "requirements" / "images"

# Trainer and engine share one environment, and with it one layer on disk; evaluation, which draws, runs in it too.
EXTRAS = {
    "rollout": ("rollout", "otel"),
    "broker": ("sandbox", "eval", "otel"),
    "learner": ("rollout", "engine", "trainer", "report", "otel", "wandb"),
}
MORE = {"rollout": ("pyarrow",)}  # tasks in parquet files, without the rest of the `sandbox` extra
UNLOCKED = ("torch", "setuptools")  # installed by scripts/setup.sh before the lock


def pinned() -> dict[str, str]:
    """Canonical name to `name==version` of the whole stack."""
    lines = (ROOT / "requirements" / "cpu.lock").read_text().split()
    return {canonicalize_name(line.partition("==")[0]): line for line in lines} | {
        name: f"{name}=={Version(version(name)).public}" for name in UNLOCKED
    }


def needed(wanted: Iterable[str], pins: Mapping[str, str]) -> set[str]:
    """Names in `pins` that the requirements `wanted` need, directly or not."""
    todo, done = [Requirement(text) for text in wanted], set[tuple[str, str]]()
    while todo:
        requirement = todo.pop()
        for extra in ("", *requirement.extras):
            key = (canonicalize_name(requirement.name), extra)
            if key in done or key[0] not in pins:
                continue
            done.add(key)
            for text in _requires(requirement.name):
                one = Requirement(text)
                if one.marker is None or one.marker.evaluate({"extra": extra}):
                    todo.append(one)
    return {name for name, _ in done}


def _requires(name: str) -> list[str]:
    try:
        return requires(name) or []
    except PackageNotFoundError:
        sys.exit(f"locks: {name} of requirements/cpu.lock is not installed; run scripts/setup.sh")


def locks() -> dict[str, str]:
    """Name of a lock to its text."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = pinned()
    texts = {"build": pins["setuptools"] + "\n"}
    for name, extras in EXTRAS.items():
        wanted = [*project["dependencies"], *MORE.get(name, ())]
        for extra in extras:
            wanted += project["optional-dependencies"][extra]
        texts[name] = "".join(f"{pins[package]}\n" for package in sorted(needed(wanted, pins)))
    return texts


def main() -> None:
    """Write the locks, or with --check end with status 1 when one is stale."""
    stale = [name for name, text in locks().items() if not _is(FOLDER / f"{name}.lock", text)]
    if "--check" in sys.argv[1:]:
        if stale:
            sys.exit(f"locks: {', '.join(stale)} differ from cpu.lock and pyproject.toml; run scripts/locks.py")
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in locks().items():
        (FOLDER / f"{name}.lock").write_text(text)


def _is(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text() == text


if __name__ == "__main__":
    main()
