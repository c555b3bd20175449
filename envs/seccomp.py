"""A seccomp filter for sandboxes that Docker's own profile does not cover: bwrap takes it as a BPF program.

What it refuses is what an agent's work never needs and what most holes of the kernel were reached through: mounts,
new namespaces, keyrings, BPF, io_uring, modules. Everything else is left to the sandbox's lack of capabilities.
"""

import errno
import platform
import struct

_NEW_NAMESPACES = 0x7E02_0000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_X32 = 0x4000_0000  # x86-64's second set of system calls, which nobody uses

# Machine -> its audit number, `clone`, and the refused calls: mount umount2 pivot_root unshare setns keyctl add_key
# request_key bpf perf_event_open userfaultfd open_by_handle_at kexec_load kexec_file_load init_module finit_module
# delete_module reboot swapon swapoff acct quotactl syslog.
_MACHINES = {
    "x86_64": (
        0xC000_003E,
        56,
        "165 166 155 272 308 250 248 249 321 298 323 304 246 320 175 313 176 169 167 168 163 179 103",
    ),
    "aarch64": (
        0xC000_00B7,
        220,
        "40 39 41 97 268 219 217 218 280 241 282 265 104 294 105 273 106 142 224 225 89 60 116",
    ),
}
# Equal on every machine: io_uring_setup/enter/register, open_tree move_mount fsopen fsconfig fsmount fspick,
# mount_setattr.
_EVERYWHERE = (425, 426, 427, 428, 429, 430, 431, 432, 433, 442)
_CLONE3 = 435  # its flags lie in memory, where a filter cannot look; libc falls back to clone

_LOAD, _RETURN = 0x20, 0x06
_JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_ANY_BIT = 0x15, 0x35, 0x45
_ALLOW, _ERRNO = 0x7FFF_0000, 0x0005_0000
_NUMBER_AT, _MACHINE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16  # in struct seccomp_data; the argument's low half


def deny_filter(machine: str | None = None) -> bytes:
    """The program for a machine, by default this one; empty for a machine that the tables do not know."""
    known = _MACHINES.get(machine or platform.machine())
    if known is None:
        return b""
    audit, clone, refused = known
    jumps: list[tuple[int, int, str]] = [(_JUMP_GREATER_EQUAL, _X32, "ENOSYS"), (_JUMP_EQUAL, _CLONE3, "ENOSYS")]
    jumps += [(_JUMP_EQUAL, number, "EPERM") for number in (*map(int, refused.split()), *_EVERYWHERE)]
    returns = {"ALLOW": _ALLOW, "EPERM": _ERRNO | errno.EPERM, "ENOSYS": _ERRNO | errno.ENOSYS}
    labels = list(returns)
    end = 3 + len(jumps) + 3  # index of the first return
    program = [
        (_LOAD, 0, 0, _MACHINE_AT),
        (_JUMP_EQUAL, 0, end + labels.index("ENOSYS") - 2, audit),  # another machine's calls have other numbers
        (_LOAD, 0, 0, _NUMBER_AT),
    ]
    program += [(code, end + labels.index(to) - (3 + i) - 1, 0, value) for i, (code, value, to) in enumerate(jumps)]
    program += [
        (_JUMP_EQUAL, 0, 2, clone),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
        (_JUMP_ANY_BIT, 1, 0, _NEW_NAMESPACES),
    ]
    program += [(_RETURN, 0, 0, value) for value in returns.values()]
    return b"".join(struct.pack("=HBBI", *step) for step in program)
