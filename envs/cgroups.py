"""Control groups for sandboxes that no engine makes them for: version 1, version 2 or a mixture, where we may write.

Nothing is changed but what is made here: a group is made beside or below our own, so that whatever bounds us (a
batch system's job, a container) bounds the sandboxes too. Where that is refused, rlimits stand in.
"""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CONTROLLERS = ("memory", "pids", "cpu")
_PERIOD_US = 100_000


@dataclass(frozen=True, slots=True)
class Limits:
    memory: int  # bytes, swap included
    pids: int
    cpus: float


@dataclass(frozen=True, slots=True)
class Parent:
    """Where groups with some controllers can be made."""

    folder: Path
    version: int
    controllers: tuple[str, ...]

    def settings(self, limits: Limits) -> Iterator[tuple[str, str, bool]]:
        """File, value, and whether the kernel must have it."""
        quota = str(round(limits.cpus * _PERIOD_US))
        if "memory" in self.controllers:
            memory = str(limits.memory)
            if self.version == 1:
                yield "memory.limit_in_bytes", memory, True
                yield "memory.memsw.limit_in_bytes", memory, False
            else:
                yield "memory.max", memory, True
                yield "memory.swap.max", "0", False
        if "pids" in self.controllers:
            yield "pids.max", str(limits.pids), True
        if "cpu" in self.controllers:
            if self.version == 1:
                yield "cpu.cfs_period_us", str(_PERIOD_US), True
                yield "cpu.cfs_quota_us", quota, True
            else:
                yield "cpu.max", f"{quota} {_PERIOD_US}", True


def writable_parents(proc: Path = Path("/proc/self")) -> list[Parent]:
    """Each controller at most once. Empty where no group can be made."""
    own = _own_groups(proc)
    parents: dict[Path, Parent] = {}
    for version, mount, root, controllers in _mounts(proc):
        taken = {name for parent in parents.values() for name in parent.controllers}
        wanted = tuple(name for name in controllers if name not in taken)
        if not wanted:
            continue
        path = own.get(wanted[0] if version == 1 else "", root)
        folder = mount / os.path.relpath(path, root) if Path(path).is_relative_to(root) else mount
        parent = Parent(folder, 1, wanted) if version == 1 else _delegated(folder, mount, wanted)
        if parent is not None and _may_write(parent.folder):
            parents[parent.folder] = parent
    return list(parents.values())


def make_groups(parents: list[Parent], name: str, limits: Limits) -> list[Path]:
    """A group `name` with the limits under each parent. Raises OSError, having removed what it made."""
    made: list[Path] = []
    try:
        for parent in parents:
            group = parent.folder / name
            group.mkdir()
            made.append(group)
            for file, value, needed in parent.settings(limits):
                if needed or (group / file).exists():
                    (group / file).write_text(value)
    except OSError:
        remove_groups(made)
        raise
    return made


def remove_groups(groups: list[Path]) -> bool:
    """Kill what runs in them and remove them. False when they are not empty yet: try again."""
    gone = True
    for group in groups:
        try:
            for pid in (group / "cgroup.procs").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
            group.rmdir()
        except (FileNotFoundError, ProcessLookupError):
            gone = gone and not group.exists()
        except OSError:
            gone = False
    return gone


def _delegated(own: Path, mount: Path, wanted: tuple[str, ...]) -> Parent | None:
    """The nearest group above or at our own whose children have controllers (version 2)."""
    for folder in (own, *own.parents):
        try:
            given = (folder / "cgroup.subtree_control").read_text().split()
        except OSError:
            given = []
        if "memory" in given or "pids" in given:
            return Parent(folder, 2, tuple(name for name in wanted if name in given))
        if folder == mount:
            break
    return None


def _may_write(folder: Path) -> bool:
    return os.access(folder, os.W_OK) and os.access(folder / "cgroup.procs", os.W_OK)


def _own_groups(proc: Path) -> dict[str, str]:
    """Controller -> path of our group in its hierarchy; "" for version 2."""
    groups: dict[str, str] = {}
    for line in (proc / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        groups |= dict.fromkeys(controllers.split(","), path)
    return groups


def _mounts(proc: Path) -> Iterator[tuple[int, Path, str, tuple[str, ...]]]:
    """Version, mount point, group at its root, and those of our controllers that it may have; version 1 first."""
    found = []
    for line in (proc / "mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        root, point = left.split()[3:5]
        kind, _, options = right.split(" ", 2)
        if kind == "cgroup":
            found.append((1, Path(point), root, tuple(name for name in CONTROLLERS if name in options.split(","))))
        elif kind == "cgroup2":
            found.append((2, Path(point), root, CONTROLLERS))
    return iter(sorted(found))
