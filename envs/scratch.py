"""The folders that bwrap sandboxes write to: one each, on this machine's own disk, gone with the sandbox.

    $TMPDIR or /var/tmp / agent-r3-UID / SANDBOX / {upper,work,root,owner.json}

`owner.json` says which run and process it belongs to, so that another process can remove what a killed one left.
"""

import asyncio
import json
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from agent_r3.envs.bwrap import as_owner, sandbox_user
from agent_r3.envs.cgroups import remove_groups
from agent_r3.envs.owners import has_ended
from agent_r3.errors import SandboxError, boundary

log = structlog.get_logger(__name__)

_UNOWNED_S = 600.0  # a folder without a readable owner.json is being made, or its maker was killed while making it
_TRIES, _PAUSE_S = 100, 0.05  # what was killed takes a moment to go


@dataclass(frozen=True, slots=True)
class Scratch:
    """One sandbox's folder, and the control groups that go with it."""

    folder: Path
    groups: tuple[Path, ...]

    async def remove(self) -> None:
        """End what is left in the groups and remove all. Logs what stays; `reap` tries again."""
        for _ in range(_TRIES):
            if remove_groups(list(self.groups)) and await self._removed():
                return
            await asyncio.sleep(_PAUSE_S)
        log.warning("not removed; `reap` will", folder=str(self.folder), groups=[str(group) for group in self.groups])

    async def _removed(self) -> bool:
        process = await asyncio.create_subprocess_exec(*_removal(self.folder), stderr=asyncio.subprocess.DEVNULL)
        await process.wait()
        return not self.folder.exists()


def scratch_root() -> Path:
    """The folder of all sandboxes of this user; made when it is not there. Raises SandboxError."""
    root = Path(os.environ.get("TMPDIR") or "/var/tmp") / f"agent-r3-{os.geteuid()}"
    with boundary(SandboxError, f"make {root}", OSError):
        # Sandboxes run as another user where root starts them: it may pass through, and list nothing.
        root.mkdir(mode=0o711, parents=True, exist_ok=True)
        found = root.lstat()
        if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode):
            raise SandboxError(f"{root} is not a folder of user {os.geteuid()}; remove it or set TMPDIR")
        root.chmod(0o711)  # whatever our umask is
    return root


def make_scratch(root: Path, name: str, run: str, owner: str, groups: Sequence[Path]) -> Scratch:
    """A folder whose sandbox may write to it. Raises OSError."""
    folder = root / name
    user = sandbox_user()
    group = user if user != os.geteuid() else -1
    record = {"run": run, "owner": owner, "groups": [str(group) for group in groups]}
    folder.mkdir(mode=0o700)
    try:
        (folder / "owner.json").write_text(json.dumps(record))
        for path in (folder / "upper", folder / "work", folder / "root"):
            path.mkdir()
            path.chmod(0o755)  # whatever our umask is: the sandbox's root gets it
            os.chown(path, user, group)
        os.chown(folder, user, group)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return Scratch(folder, tuple(groups))


def reap(run: str | None) -> int:
    """Remove what ended processes of this host left of `run`, of every run for None. Returns how many sandboxes.

    What cannot be removed is logged.
    """
    try:
        folders = list(scratch_root().iterdir())
    except (SandboxError, OSError) as exc:
        log.warning("left-over sandboxes not removed", run=run, error=str(exc))
        return 0
    removed = 0
    for folder in folders:
        groups = _left_over(folder, run)
        if groups is None:
            continue
        for _ in range(_TRIES):
            if remove_groups(groups):
                break
            time.sleep(_PAUSE_S)
        subprocess.run(_removal(folder), capture_output=True, check=False)
        if folder.exists():
            log.warning("left-over sandbox not removed", folder=str(folder))
        else:
            removed += 1
    return removed


async def bytes_written(folders: Sequence[Path]) -> dict[Path, int]:
    """Disk blocks that each sandbox's folder takes; those that are gone are left out."""
    if not folders:
        return {}
    arguments = as_owner("du", "--summarize", "--one-file-system", "--block-size=1", *map(str, folders))
    process = await asyncio.create_subprocess_exec(
        *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    output, _ = await process.communicate()
    pairs = (line.split("\t", 1) for line in output.decode(errors="surrogateescape").splitlines())
    return {Path(path): int(size) for size, path in pairs}


def free_bytes(root: Path) -> int:
    return shutil.disk_usage(root).free


def _removal(folder: Path) -> list[str]:
    return as_owner("rm", "-rf", "--one-file-system", str(folder))


def _left_over(folder: Path, run: str | None) -> list[Path] | None:
    """The control groups of a sandbox whose owner has ended; None for one that is not left over."""
    try:
        record = json.loads((folder / "owner.json").read_text())
    except (OSError, ValueError):
        return [] if _age_s(folder) > _UNOWNED_S else None
    if run not in (None, record["run"]) or not has_ended(record["owner"]):
        return None
    return [Path(group) for group in record["groups"]]


def _age_s(folder: Path) -> float:
    try:
        return time.time() - folder.stat().st_mtime
    except FileNotFoundError:
        return 0.0
