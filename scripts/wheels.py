"""Collects the wheels of requirements/images/*.lock into docker/wheels, for images that are built without network.

    .venv/bin/python scripts/wheels.py

pip takes them from wherever this machine's pip is set up to; TORCH_INDEX=URL adds an index for torch. They are kept in
`$AGENT_R3_CACHE/wheels`: when all are there, pip is not asked.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

from agent_r3.envs.cache import cache_dir

ROOT = Path(__file__).parent.parent
Pin = tuple[str, str]  # canonical name, version without the local part


def pins(lock: Path) -> list[Pin]:
    """What a lock holds."""
    pairs = [line.split("==") for line in lock.read_text().split()]
    return [(canonicalize_name(name), Version(version).public) for name, version in pairs]


def wheels(folder: Path) -> dict[Pin, Path]:
    """The wheels in a folder."""
    found = {}
    for path in sorted(folder.glob("*.whl")):
        name, version, _, _ = parse_wheel_filename(path.name)
        found[str(name), version.public] = path
    return found


def collect(wanted: Iterable[Pin], store: Path) -> dict[Pin, Path]:
    """The wheels of all pins, fetched (or built, where there is only a sdist) into `store` when they are not there."""
    store.mkdir(parents=True, exist_ok=True)
    have = wheels(store)
    missing = sorted(set(wanted) - set(have))
    if missing:
        print(f"wheels: {len(missing)} to fetch", file=sys.stderr)
        index = os.environ.get("TORCH_INDEX")
        with tempfile.TemporaryDirectory(dir=store) as scratch:  # a wheel is in the store whole or not at all
            command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
            command += ["--wheel-dir", scratch, *(["--extra-index-url", index] if index else [])]
            command += [f"{name}=={version}" for name, version in missing]
            pip = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
            if pip.returncode:
                sys.exit(f"{pip.stderr[-2000:]}wheels: pip could not fetch them all; see above")
            for path in Path(scratch).glob("*.whl"):
                path.replace(store / path.name)
        have = wheels(store)
    return have


def lay(chosen: Iterable[Path], folder: Path) -> None:
    """Make `folder` hold links to just these wheels."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {path.name: path for path in chosen}
    for path in folder.iterdir():
        if path.name not in names:
            path.unlink()
    for name, path in names.items():
        if not (folder / name).exists():
            try:
                os.link(path, folder / name)
            except FileExistsError:  # another build did it meanwhile
                continue
            except OSError:  # the cache is on another file system
                shutil.copyfile(path, folder / name)


def main() -> None:
    """Collect every lock's wheels."""
    locks = sorted((ROOT / "requirements" / "images").glob("*.lock"))
    have = collect({pin for lock in locks for pin in pins(lock)}, cache_dir() / "wheels")
    for lock in locks:
        lay([have[pin] for pin in pins(lock)], ROOT / "docker" / "wheels" / lock.stem)


if __name__ == "__main__":
    main()
