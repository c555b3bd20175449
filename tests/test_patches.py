"""What a patch may change, and that what it may change arrives in a fresh container byte for byte."""

import shlex

import pytest

from agent_r3.envs.patches import apply_patch, escaped, numstat_names, protected
from agent_r3.envs.pool import SandboxPool
from agent_r3.envs.runner_sandbox import RunnerSandbox
from agent_r3.types import Task

_LISTING = (
    "find . -path ./.git -prune -o ! -type d -print0 | sort -z | xargs -0 ls -ld --time-style=+ | cut -d' ' -f1,5-; "
    "find . -path ./.git -prune -o -type f -print0 | sort -z | xargs -0 sha256sum"
)


@pytest.mark.parametrize(
    "path",
    [
        *("tests/util.py", "a/test/data.txt", "test_x.py", "pkg/x_test.py", "r2e_tests", "r2e_tests/a.py"),
        *("conftest.py", "a/b/conftest.py", "pytest.ini", "a/.pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml"),
        *("noxfile.py", ".github/workflows/x.yml", ".gitlab-ci.yml", ".travis.yml", ".gitattributes", "a/.gitignore"),
        *(".git/config", "a/.git/hooks/x", "run_tests.sh", ".venv/bin/python", "venv/bin/python", "a/x.pth"),
        *("sitecustomize.py", "src/sitecustomize/__init__.py", "usercustomize.so", "sitecustomize.cpython-311-x.so"),
        *("__pycache__/conftest.cpython-311-pytest-8.4.2.pyc", "pkg/mod.pyc", "x.egg-info/entry_points.txt"),
        *("x-1.0.dist-info/METADATA", "/etc/passwd", "../x", "a/../../x", ""),
    ],
)
def test_tests_and_what_decides_about_them_may_not_be_changed(path: str) -> None:
    assert protected(path)


@pytest.mark.parametrize(
    "path",
    [
        *("pkg/mod.py", "src/testing/x.py", "pkg/_testing/x.py", "contest.py", "my_conftest.py", "pkg/setup.py"),
        *(
            "setup.py",
            "docs/pytest.ini.rst",
            "a b.py",
            "we[i]rd*.py",
            "site.py",
            "lib/venv/x.py",
            "a..b/c.py",
            "git.py",
        ),
        *("requirements.txt", "tasks.py", "Makefile"),
    ],
)
def test_all_else_may(path: str) -> None:
    assert not protected(path)


def test_names_come_from_gits_list_whatever_is_in_them() -> None:
    both = b"1\t1\ta b\n\t.py\0-\t-\tb\xff.bin\0" + b"-\t-\tb\xff.bin\0" + b"1\t1\told\0"
    new, old = numstat_names(both)
    assert list(new) == ["a b\n\t.py", "b\udcff.bin"] and old - new == {"old": 1}


async def _applied(sandbox: RunnerSandbox, task: Task, patch: bytes, *left_out: str) -> None:
    applied = await apply_patch(sandbox, task, patch)
    assert (applied.refused, applied.left_out) == (None, left_out)


async def _run(sandbox: RunnerSandbox, command: str) -> bytes:
    result = await sandbox.exec(command, timeout_s=60)
    assert result.exit_code == 0, result.text
    return result.output


@pytest.mark.docker
async def test_every_kind_of_change_makes_the_round_trip(
    pool: SandboxPool, sandbox: RunnerSandbox, sandbox_task: Task
) -> None:
    """Though the fresh repository's attributes, filters, hooks and configuration would all change what is written."""
    await sandbox.put("/testbed/new/bytes.bin", bytes(range(256)) * 100)
    await sandbox.put("/testbed/new/no_end.py", b"no newline")
    await sandbox.put("/testbed/new/crlf.txt", b"a\r\nb\r\n")
    await sandbox.put("/testbed/new/exec.sh", b"#!/bin/sh\n", mode=0o755)
    await sandbox.put("/testbed/new/empty", b"")
    await sandbox.put("/testbed/crlf.txt", b"one\r\nTWO\r\n")
    await sandbox.put("/testbed/noend.py", b"still no end")
    await sandbox.put("/testbed/ident.txt", b"$Id$ \t\r\n \n")
    await _run(
        sandbox,
        "chmod -x tool.sh; ln -s plain.py link; mv pkg/mod.py pkg/moved.py; rm binary.dat; ln -s /etc absolute; "
        r"echo x >$'w\xeeird \"name\"'; echo x >'back\slash'; echo x >'a b'; echo x >$'new\nline'; "
        "echo x >'[glob]*?'; sed -i s/two/2/ plain.py; rm plain.py; mkdir plain.py; echo x >plain.py/now_a_folder",
    )
    patch = await sandbox.diff()
    fresh = await pool.acquire(sandbox_task)
    await _run(
        fresh,
        "printf '* text eol=crlf ident filter=evil working-tree-encoding=UTF-16\\n' >.git/info/attributes; "
        "git config filter.evil.smudge 'touch /tmp/ran; tr a-z A-Z'; git config filter.evil.clean 'touch /tmp/ran'; "
        "git config core.autocrlf true; git config --global core.safecrlf true; git config apply.whitespace error-all; "
        "git config core.hooksPath /tmp/hooks; git config core.fsmonitor 'touch /tmp/ran'; touch .git/index.lock",
    )
    await _applied(fresh, sandbox_task, patch)
    assert await _run(fresh, _LISTING) == await _run(sandbox, _LISTING)
    assert await _run(fresh, "ls /tmp/ran 2>/dev/null | wc -l") == b"0\n"


@pytest.mark.docker
async def test_protected_files_are_left_out_by_their_exact_names(
    pool: SandboxPool, sandbox: RunnerSandbox, sandbox_task: Task
) -> None:
    names = ("test_[a]*.py", r"test_back\slash.py", "test_\udcee.py", "conftest.py", "tests/sub/x.py", ".gitattributes")
    kept = ("test.py", "tested.py", "pkg/[a]*.py")
    for name in (*names, *kept):
        await sandbox.put(f"/testbed/{name}", b"changed\n")
    patch = await sandbox.diff()
    fresh = await pool.acquire(sandbox_task)
    before = await _run(fresh, "cat .gitattributes")
    await _applied(fresh, sandbox_task, patch, *sorted(name.replace("\udcee", "\ufffd") for name in names))
    for name in kept:
        assert await fresh.get(f"/testbed/{name}") == b"changed\n"
    assert await _run(fresh, "ls -d test_* conftest.py tests 2>/dev/null | wc -l") == b"0\n"
    assert await _run(fresh, "cat .gitattributes") == before


@pytest.mark.docker
async def test_a_patch_is_applied_whole_or_not_at_all(sandbox: RunnerSandbox, sandbox_task: Task) -> None:
    before = await _run(sandbox, _LISTING)
    good = b"diff --git a/n.py b/n.py\nnew file mode 100644\n--- /dev/null\n+++ b/n.py\n@@ -0,0 +1 @@\n+x\n"
    stale = b"diff --git a/plain.py b/plain.py\n--- a/plain.py\n+++ b/plain.py\n@@ -1 +1 @@\n-not there\n+x\n"
    there = good.replace(b"n.py", b"plain.py")
    moved = b"diff --git a/tests/x.py b/y.py\nsimilarity index 100%\nrename from tests/x.py\nrename to y.py\n"
    through = (
        b"diff --git a/link b/link\nnew file mode 120000\n--- /dev/null\n+++ b/link\n@@ -0,0 +1 @@\n+/tmp\n"
        b"\\ No newline at end of file\n" + good.replace(b"n.py", b"link/n.py")
    )
    for patch, complaint in (
        (stale, "patch failed: plain.py:1"),
        (there, "plain.py: already exists"),
        (through, "beyond a symbolic link"),
        (b"no patch at all\n", "No valid patches in input"),
        (stale.replace(b"@@ -1 +1", b"@@ -1,9 +1"), "corrupt patch"),
        (moved, "it renames or copies tests/x.py, which no patch may change"),
    ):
        applied = await apply_patch(sandbox, sandbox_task, good + patch if patch.startswith(b"diff") else patch)
        assert applied.outcome == "unapplied" and complaint in (applied.refused or "")
    assert await _run(sandbox, _LISTING) == before


@pytest.mark.docker
async def test_a_patch_with_nothing_but_protected_files_counts_as_empty(
    sandbox: RunnerSandbox, sandbox_task: Task
) -> None:
    before = await _run(sandbox, _LISTING)
    outside = b"diff --git a/../x b/../x\nnew file mode 100644\n--- /dev/null\n+++ b/../x\n@@ -0,0 +1 @@\n+x\n"
    await _applied(sandbox, sandbox_task, outside, "../x")
    await _applied(sandbox, sandbox_task, b"\n \n")
    assert await _run(sandbox, _LISTING) == before


@pytest.mark.docker
async def test_patterns_match_their_own_path_only(sandbox: RunnerSandbox) -> None:
    """As git reads them: `git apply --exclude` of each name, on a patch that makes all of them."""
    names = ["a*", "ab", "a?", "[a]", "a", r"a\*", "a b"]
    for name in names:
        await _run(sandbox, "rm -rf x")
        for each in names:
            await sandbox.put(f"/testbed/x/{each}", b"x\n")
        await sandbox.put("/tmp/patch", await sandbox.diff())
        await _run(sandbox, f"rm -r x; git apply --exclude={shlex.quote(escaped('x/' + name))} /tmp/patch")
        left = (await _run(sandbox, "cd x; find . -type f -printf '%f\\n'")).decode().splitlines()
        assert sorted(left) == sorted(set(names) - {name})
