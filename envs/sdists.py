"""Source releases from the Python package index, fetched without building anything.

`pip download` of a sdist runs the project's build backend (and so its code, on this host) to learn metadata that nobody
asked for; unearth, PDM's finder, resolves and downloads only.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from agent_r3.envs.cache import cache_dir
from agent_r3.errors import UserError, boundary

_TIMEOUT_S = 300
_ATTEMPTS = 3


def configured_index() -> str | None:
    """The package index this user's pip is set to; None for the default one."""
    if url := os.environ.get("PIP_INDEX_URL"):
        return url
    pip = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True, check=False
    )
    return pip.stdout.strip() or None


def fetch_sdist(project: str, version: str, index_url: str | None) -> Path:
    """The release's archive in the cache. Raises UserError when the index cannot be reached or has no such sdist."""
    folder = cache_dir() / "sdists" / f"{project.lower()}-{version}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            target = Path(scratch) / "sdist"
            _download(f"{project}=={version}", target, index_url)
            if not folder.is_dir():  # another build may have been quicker
                target.rename(folder)
    return next(folder.iterdir())


def unpack(archive: Path, into: Path) -> Path:
    """The archive's single top folder, unpacked below `into`; links and paths that lead out of it are refused."""
    with (
        boundary(UserError, f"unpack {archive.name}", tarfile.TarError, OSError, EOFError),
        tarfile.open(archive) as tar,
    ):
        tar.extractall(into, filter="data")
    folders = [path for path in into.iterdir() if path.is_dir()]
    if len(folders) != 1:
        raise UserError(f"unpack {archive.name}: expected one top folder, found {len(folders)}")
    return folders[0]


def _download(requirement: str, target: Path, index_url: str | None) -> None:
    index = ["--index-url", index_url] if index_url else []
    command = [sys.executable, "-m", "unearth", "--no-binary", *index, "--download", str(target), requirement]
    for _ in range(_ATTEMPTS):
        with boundary(UserError, f"download the sdist of {requirement}", subprocess.TimeoutExpired):
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        if done.returncode == 0 and any(target.glob("*.tar.*")):
            return
    reason = (done.stderr.strip() or done.stdout.strip() or "the index has none").splitlines()[-1]
    raise UserError(
        f"download the sdist of {requirement}: {reason}; check the network and pip's index, then build again"
    )
