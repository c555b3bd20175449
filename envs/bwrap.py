"""bwrap on this machine: whom sandboxes run as, what starts one, and whether it can.

A sandbox is started by a chain in which each program turns into the next: a shell joins the control groups; as root,
setpriv becomes a user that owns nothing else; unshare makes a user namespace, in which that user is root, and a mount
namespace; a shell forbids further user namespaces and mounts the sandbox's own copy of the image; bwrap makes the
other namespaces, takes all capabilities away and starts the runner as PID 1. So uid 0 inside is never uid 0 outside,
whoever we are, and root and a normal user take the same path.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agent_r3.envs.launch import LAUNCH, RUNNER
from agent_r3.errors import UserError

_USER = 65_433  # in Debian's reserved range, used by nobody; files of unpacked images belong to it where root unpacks
_SHM_BYTES = 64 << 20  # as Docker gives
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_TOOLS = {
    "bwrap": "bubblewrap", "unshare": "util-linux", "setpriv": "util-linux", "prlimit": "util-linux", "mount": "mount",
}  # fmt: skip
_MEND = (
    "install bubblewrap and allow user namespaces (sysctl user.max_user_namespaces above 0; on Ubuntu also "
    "kernel.apparmor_restrict_unprivileged_userns=0)"
)

_JOIN = 'set -e; for group in $CGROUPS; do echo $$ >"$group/cgroup.procs"; done; exec "$@"'

# Where overlayfs is refused (an old kernel, a file system that cannot carry it) the image is copied. `volatile`: no
# flush of a scratch folder to the disk when it is unmounted. /proc/sys may be read-only, in a container: then the
# system call filter alone keeps new namespaces out.
_MOUNT = """set -eu
scratch=$1 overlay=$2
shift 2
echo 0 2>/dev/null >/proc/sys/user/max_user_namespaces || :
options=lowerdir=rootfs,upperdir=$scratch/upper,workdir=$scratch/work,userxattr,volatile
if [ "$overlay" = 0 ] || ! mount -t overlay overlay -o "$options" "$scratch/root" 2>/dev/null; then
    cp -a --reflink=auto rootfs/. "$scratch/root/"
fi
exec "$@"
"""

_NAMESPACES = ("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try")
_DEVICES = ("--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev", "--size", str(_SHM_BYTES), "--perms", "1777")
_CONTAINED = ("--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv", "--chdir", "/")


@dataclass(frozen=True, slots=True)
class Rlimits:
    """What every process may take. None leaves a limit as it is."""

    file_size: int
    processes: int | None  # of the sandbox; kernels before 5.14 count those of the user instead
    data: int | None  # bytes of private memory, of one process

    def arguments(self) -> list[str]:
        """For prlimit, inside the user namespace: only there is the process count the sandbox's own."""
        limits = {"fsize": self.file_size, "core": 0, "nproc": self.processes, "data": self.data}
        return [f"--{name}={value}:{value}" for name, value in limits.items() if value is not None]


def sandbox_user() -> int:
    """The uid outside that is uid 0 inside: our own, or for root one that has nothing to lose."""
    return _USER if os.geteuid() == 0 and _can_become(_USER) else os.geteuid()


def command(
    scratch: Path,
    name: str,
    limits: Rlimits,
    environment: Mapping[str, str],
    *,
    overlay: bool = True,
    filter_fd: int | None = None,
) -> list[str]:
    """What to run, in the folder that holds the image's `rootfs`; `scratch` has upper, work and root in it.

    Wants CGROUPS in its own environment: the groups to join, separated by spaces.
    """
    inside = {"PATH": _PATH, "HOME": "/root", "HOSTNAME": name, **environment}
    return [
        *_entered("-c", _MOUNT, "mount", str(scratch), str(int(overlay))),
        *("prlimit", *limits.arguments()),
        *("bwrap", "--bind", str(scratch / "root"), "/", *_DEVICES, "--tmpfs", "/dev/shm"),
        *(*_NAMESPACES, "--as-pid-1", "--hostname", name, *_CONTAINED),
        *(("--seccomp", str(filter_fd)) if filter_fd is not None else ()),
        *(part for key, value in inside.items() for part in ("--setenv", key, value)),
        *("--", "/bin/sh", "-c", LAUNCH, RUNNER),
    ]


def as_owner(*arguments: str) -> list[str]:
    """A command that may read and remove what a sandbox has left, whatever modes it has."""
    return list(arguments) if os.geteuid() == 0 else ["unshare", "--map-root-user", *arguments]


def bwrap_problem() -> str | None:
    """One line on why bwrap cannot be used and what to do about it; None where it can. Tries it."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"bwrap cannot be used: no {missing[0]} on PATH; install {_TOOLS[missing[0]]}"
    probe = _entered("-c", 'exec "$@"', "probe", "bwrap", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev")
    try:
        done = subprocess.run(
            [*probe, *_NAMESPACES, *_CONTAINED, "--", "/bin/sh", "-c", ":"],
            env=launch_environment(()),
            capture_output=True,
            text=True,
            timeout=10,
            cwd="/",
        )
    except subprocess.TimeoutExpired:
        return f"bwrap cannot be used: it did not end within 10 s; {_MEND}"
    if done.returncode:
        detail = " ".join(done.stderr.split())[-200:] or f"exit status {done.returncode}"
        return f"bwrap cannot be used ({detail}); {_MEND}"
    return None


def require_bwrap() -> None:
    """Raises UserError where bwrap cannot be used."""
    if problem := bwrap_problem():
        raise UserError(problem)


def launch_environment(groups: Sequence[Path]) -> dict[str, str]:
    """The environment of `command`: nothing of ours but PATH."""
    return {"PATH": os.environ.get("PATH", _PATH), "CGROUPS": " ".join(map(str, groups))}


def _entered(*arguments: str) -> list[str]:
    """A shell with `arguments` as root of a user namespace of `sandbox_user`, with mounts of its own."""
    user = str(sandbox_user())
    drop = ["setpriv", "--reuid", user, "--regid", user, "--clear-groups"] if sandbox_user() != os.geteuid() else []
    return ["sh", "-c", _JOIN, "join", *drop, "unshare", "--map-root-user", "--mount", "sh", *arguments]


def _can_become(uid: int) -> bool:
    """Whether the user namespace we are in knows `uid`."""
    ranges = (map(int, line.split()) for line in Path("/proc/self/uid_map").read_text().splitlines())
    return any(first <= uid < first + count for first, _, count in ranges)
