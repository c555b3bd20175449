"""What bounds bwrap sandboxes, as far as it can be seen without one: the system call filter and control groups."""

import errno
import os
import struct
from pathlib import Path

import pytest

from agent_r3.config import SandboxConfig
from agent_r3.envs.bwrap_host import BwrapHost, stand_ins
from agent_r3.envs.cgroups import Limits, Parent, make_groups, remove_groups, writable_parents
from agent_r3.envs.seccomp import deny_filter
from agent_r3.errors import ConfigError

ALLOW, EPERM, ENOSYS = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
LIMITS = Limits(memory=1 << 30, pids=100, cpus=0.5)


def verdict(program: bytes, audit: int, number: int, argument: int = 0) -> int:
    """What the kernel's interpreter would return for a system call."""
    data = struct.pack("=IIQQ", number, audit, 0, argument)
    steps = list(struct.iter_unpack("=HBBI", program))
    at, value = 0, 0
    while True:
        code, yes, no, k = steps[at]
        at += 1
        match code:
            case 0x20:
                value = int.from_bytes(data[k : k + 4], "little")
            case 0x06:
                return int(k)
            case 0x15:
                at += yes if value == k else no
            case 0x35:
                at += yes if value >= k else no
            case 0x45:
                at += yes if value & k else no
            case _:
                raise AssertionError(f"unknown instruction {code:#x}")


@pytest.mark.parametrize(
    ("machine", "clone", "refused", "allowed"),
    [
        (
            "x86_64",
            56,
            {"mount": 165, "unshare": 272, "keyctl": 250, "bpf": 321},
            {"read": 0, "fork": 57, "ptrace": 101},
        ),
        ("aarch64", 220, {"mount": 40, "unshare": 97, "keyctl": 219, "bpf": 280}, {"read": 63, "ptrace": 117}),
    ],
)
def test_the_filter_refuses_what_reaches_into_the_kernel_and_allows_the_rest(
    machine: str, clone: int, refused: dict[str, int], allowed: dict[str, int]
) -> None:
    program, audit = deny_filter(machine), AUDIT[machine]
    assert {verdict(program, audit, number) for number in [*refused.values(), 425, 428, 442]} == {EPERM}
    assert {verdict(program, audit, number) for number in [*allowed.values(), 424, 434, 436, 443]} == {ALLOW}
    assert verdict(program, audit, clone, 0x0100_0011) == ALLOW  # a fork as libc makes it
    for namespace in (0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert verdict(program, audit, clone, namespace | 17) == EPERM
    assert verdict(program, audit, 435) == ENOSYS  # clone3: libc then uses clone
    assert verdict(program, AUDIT["aarch64" if machine == "x86_64" else "x86_64"], 0) == ENOSYS
    assert verdict(program, audit, 0x4000_0000) == ENOSYS


def test_a_machine_without_a_table_has_no_filter() -> None:
    assert deny_filter("riscv64") == b""


def proc(tmp_path: Path, cgroup: str, mountinfo: str) -> Path:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cgroup").write_text(cgroup)
    (tmp_path / "proc/mountinfo").write_text(mountinfo)
    return tmp_path / "proc"


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True)
    for name, content in {
        "cgroup.procs": "",
        **{key.replace("__", "."): value for key, value in files.items()},
    }.items():
        (folder / name).write_text(content)


def test_in_version_2_groups_are_made_where_controllers_were_delegated(tmp_path: Path) -> None:
    mount = tmp_path / "fs"
    group(mount, cgroup__subtree_control="cpu memory pids")
    group(mount / "user", cgroup__subtree_control="memory pids")
    group(mount / "user/shell", cgroup__subtree_control="")
    parents = writable_parents(proc(tmp_path, "0::/user/shell\n", f"1 2 3:4 / {mount} rw - cgroup2 cgroup2 rw\n"))
    assert parents == [Parent(mount / "user", 2, ("memory", "pids"))]
    (made,) = make_groups(parents, "sandbox", LIMITS)
    assert made == mount / "user/sandbox"
    assert {file.name: file.read_text() for file in made.iterdir()} == {"memory.max": str(1 << 30), "pids.max": "100"}


def test_in_version_2_without_delegation_there_are_none(tmp_path: Path) -> None:
    mount = tmp_path / "fs"
    group(mount, cgroup__subtree_control="")
    place = proc(tmp_path, "0::/\n", f"1 2 3:4 / {mount} rw - cgroup2 cgroup2 rw\n")
    assert writable_parents(place) == []


def test_in_version_1_groups_are_made_in_our_own_and_a_mixture_takes_each_controller_once(tmp_path: Path) -> None:
    memory, cpu, unified = tmp_path / "memory", tmp_path / "cpu,cpuacct", tmp_path / "unified"
    group(memory / "job")
    group(cpu)
    group(unified, cgroup__subtree_control="pids memory")
    mountinfo = "".join(
        f"1 2 3:4 {root} {folder} rw - {kind} cgroup rw{options}\n"
        for root, folder, kind, options in (
            ("/", unified, "cgroup2", ""),
            ("/", memory, "cgroup", ",memory"),
            ("/docker/x", cpu, "cgroup", ",cpu,cpuacct"),
        )
    )
    parents = writable_parents(proc(tmp_path, "4:memory:/job\n3:cpu,cpuacct:/docker/x\n0::/\n", mountinfo))
    assert {(parent.folder, parent.version, parent.controllers) for parent in parents} == {
        (memory / "job", 1, ("memory",)), (cpu, 1, ("cpu",)), (unified, 2, ("pids",)),
    }  # fmt: skip
    made = make_groups(parents, "sandbox", LIMITS)
    values = {file.name: file.read_text() for folder in made for file in folder.iterdir()}
    assert values == {
        "memory.limit_in_bytes": str(1 << 30), "cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "50000",
        "pids.max": "100",
    }  # fmt: skip


def test_a_group_that_cannot_be_limited_is_not_left(tmp_path: Path) -> None:
    group(tmp_path / "one")
    parents = [Parent(tmp_path / "one", 1, ()), Parent(tmp_path / "missing", 1, ("pids",))]
    with pytest.raises(FileNotFoundError):
        make_groups(parents, "sandbox", LIMITS)
    assert remove_groups([tmp_path / "one/none"])


def test_rlimits_stand_in_for_the_groups_that_cannot_be_made() -> None:
    config = SandboxConfig(memory="1g", pids=77)
    assert (stand_ins(config, []).processes, stand_ins(config, []).data) == (77, 1 << 30)
    both = stand_ins(config, [Parent(Path(os.sep), 1, ("memory", "pids"))])
    assert (both.processes, both.data, both.file_size) == (None, None, 1 << 30)


@pytest.mark.parametrize("key", ["memory", "file_size", "disk", "disk_floor"])
def test_a_size_that_is_none_is_the_users_to_mend(key: str) -> None:
    config = SandboxConfig.model_validate({"kind": "bwrap", key: "much"})
    with pytest.raises(ConfigError, match=f"sandbox.{key}: `much` is not a size"):
        BwrapHost(config, "test", "test")
