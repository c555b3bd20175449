"""Who started a sandbox, in words that another process can check later."""

import os
import socket
from pathlib import Path


def owner_label(name: str) -> str:
    """Names this process: NAME@HOST/PIDS:PID:START.

    PIDS is the inode of its pid namespace, START its start time in ticks since boot.
    """
    return f"{name}@{_place()}:{os.getpid()}:{_start_ticks(os.getpid())}"


def has_ended(label: str) -> bool:
    """Whether the labelled process ran on this host, in this process's pid namespace, and does so no more."""
    place, pid, ticks = label.rpartition("@")[2].rsplit(":", 2)
    return place == _place() and _start_ticks(int(pid)) != ticks


def _place() -> str:
    """Where a process id means the same as here: workers in containers may share a host name and an engine."""
    return f"{socket.gethostname()}/{Path('/proc/self/ns/pid').stat().st_ino}"


def _start_ticks(pid: int) -> str | None:
    """The start time of a running process, None for one that has ended (a zombie has)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else fields[19]
