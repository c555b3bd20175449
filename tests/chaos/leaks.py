"""What a run may have left on the machine, by kind, each thing named."""

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import docker
import psutil

MARK = "AGENT_R3_CHAOS"  # variable in the environment of every process of a run


def on_engine(api: docker.APIClient, networks_before: set[str]) -> dict[str, list[str]]:
    """Containers of any state, and networks that were not there before."""
    networks = {network["Name"] for network in api.networks()}
    return {
        "containers": [f"{found['Names']} {found['Status']}" for found in api.containers(all=True)],
        "networks": sorted(networks - networks_before),
    }


def running(pids: Iterable[int], *names: str) -> Iterator[int]:
    """Those of `pids` that run one of these executables."""
    for pid in pids:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/exe").readlink().name in names:
                yield pid


def on_host(
    mark: str, cgroup: str, folder: Path, spared: set[int], engine_killed_at: float | None = None
) -> dict[str, list[str]]:
    """Processes, sockets, scratch folders, mounts and control groups; `folder` is the run's, its `tmp` their TMPDIR.

    `spared` are processes that still have to be there (this one, the engine's). `engine_orphans` is apart: an engine
    that is killed (at Unix time `engine_killed_at`) forgets shims, half-made containers and mounts of that moment. It
    lists them no more, so nobody can remove them by its API. Only older ones with nothing of ours inside count here.
    """
    scratch = folder / "tmp"
    groups = list(_cgroups(cgroup))
    marked = [pid for pid in _processes() if pid not in spared and _belongs(pid, mark, cgroup)]
    suspects = {pid: _container(pid) for pid in marked if _of_engine(pid) and _started_before(pid, engine_killed_at)}
    busy = {_container(pid) for pid in marked if pid not in suspects}
    orphans = {pid: container for pid, container in suspects.items() if container not in busy}
    mounts = [mount for mount in _mounts() if mount.startswith(f"{folder}/") and mount.endswith("/merged")]
    lost = [mount for mount in mounts if _made_before(Path(mount).parent, engine_killed_at)]
    sockets = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if f"{scratch}/" in line]
    return {
        "processes": [f"{pid} {_command(pid)}" for pid in marked if pid not in orphans],
        "sockets": sorted(set(sockets)),
        "scratch": sorted(str(path) for path in scratch.iterdir()),
        "mounts": [mount for mount in mounts if mount not in lost],
        "cgroups": [str(group) for group in groups if group.name not in orphans.values()],
        "engine_orphans": [*(f"{pid} {_command(pid)}" for pid in orphans), *lost],
    }


def _belongs(pid: int, mark: str, cgroup: str) -> bool:
    return f"\0{MARK}={mark}\0" in f"\0{_read(pid, 'environ')}" or f"/{cgroup}/" in _read(pid, "cgroup")


def _of_engine(pid: int) -> bool:
    """A shim, or a container's first process that was never told to become what it is for."""
    words = _read(pid, "cmdline").split("\0")
    return words[0].endswith("containerd-shim-runc-v2") or words[:2] == ["runc", "init"]


def _started_before(pid: int, moment: float | None) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return moment is not None and psutil.Process(pid).create_time() < moment
    return False


def _made_before(layer: Path, moment: float | None) -> bool:
    """Nothing is added to a layer's folder after it was made."""
    with contextlib.suppress(FileNotFoundError):
        return moment is not None and layer.stat().st_mtime < moment
    return False


def _container(pid: int) -> str:
    """The container that a shim looks after, or that a process is in."""
    words = _read(pid, "cmdline").split("\0")
    return words[words.index("-id") + 1] if "-id" in words else _read(pid, "cgroup").strip().rpartition("/")[2]


def _mounts() -> Iterator[str]:
    return (line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines())


def _processes() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _command(pid: int) -> str:
    return _read(pid, "cmdline").replace("\0", " ")[:120]


def _read(pid: int, name: str) -> str:
    with contextlib.suppress(OSError):  # it ended meanwhile
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
    return ""


def remove_cgroups(name: str) -> None:
    """Remove the engine's groups with the orphans in them; the engine must have stopped."""
    parents = list(Path("/sys/fs/cgroup").glob(f"**/{name}"))
    groups = sorted(
        (path for parent in parents for path in [parent, *parent.rglob("*")] if path.is_dir()), reverse=True
    )
    deadline = time.monotonic() + 10
    while pids := {int(pid) for group in groups for pid in (group / "cgroup.procs").read_text().split()}:
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {pids} in {name} do not end")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    for group in groups:
        group.rmdir()


def _cgroups(name: str) -> Iterator[Path]:
    """Groups of containers; the parent itself is the engine's."""
    return (path for path in Path("/sys/fs/cgroup").glob(f"**/{name}/*") if path.is_dir())
