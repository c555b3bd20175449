"""What the agent finds in its repository, and that its change comes out whole and applies to a fresh container."""

import pytest

from agent_r3.envs.pool import SandboxPool
from agent_r3.envs.runner_sandbox import RunnerSandbox
from agent_r3.types import Task

pytestmark = pytest.mark.docker

FILES = "find . -path ./.git -prune -o ! -type d -print0 | sort -z | xargs -0 ls -ld --time-style=+ | cut -d' ' -f1,5-"
CONTENT = "find . -path ./.git -prune -o -type f -print0 | sort -z | xargs -0 sha256sum"


async def run(sandbox: RunnerSandbox, command: str) -> bytes:
    result = await sandbox.exec(command, timeout_s=60)
    assert result.exit_code == 0, result.text
    return result.output


async def assert_applies(pool: SandboxPool, task: Task, changed: RunnerSandbox, patch: bytes) -> None:
    """`git apply` turns a fresh container's tree into the changed one: same files, modes, links and bytes."""
    fresh = await pool.acquire(task)
    await fresh.put("/tmp/agent.patch", patch)
    await run(fresh, "git apply --whitespace=nowarn /tmp/agent.patch")
    for look in (FILES, CONTENT):
        assert await run(fresh, look) == await run(changed, look)


async def test_the_agent_finds_no_hidden_tests(sandbox: RunnerSandbox) -> None:
    left = await run(sandbox, "ls -d /r2e_tests r2e_tests run_tests.sh pkg/__pycache__ 2>/dev/null | wc -l")
    assert left == b"0\n"


async def test_grading_finds_the_image_as_it_is(pool: SandboxPool, sandbox_task: Task) -> None:
    sandbox = await pool.acquire_for_grading(sandbox_task)
    assert await run(sandbox, "ls -d /r2e_tests r2e_tests run_tests.sh | wc -l") == b"3\n"
    with pytest.raises(RuntimeError, match="not set up for an agent"):
        await sandbox.diff()


async def test_an_untouched_repository_has_an_empty_diff(sandbox: RunnerSandbox) -> None:
    """Though the image has a deleted and an untracked file and CRLF where git stores LF."""
    assert await sandbox.diff() == b""


async def test_the_agent_can_use_git(sandbox: RunnerSandbox) -> None:
    await run(sandbox, "echo changed >>plain.py && git diff --stat && git commit -qam mine && git log -1 --format=%an")


async def test_diff_carries_every_kind_of_change(pool: SandboxPool, sandbox: RunnerSandbox, sandbox_task: Task) -> None:
    await sandbox.put("/testbed/new/bytes.bin", bytes(range(256)) * 100)
    await sandbox.put("/testbed/new/no_end.py", b"no newline")
    await sandbox.put("/testbed/new/crlf.txt", b"a\r\nb\r\n")
    await sandbox.put("/testbed/new/exec.sh", b"#!/bin/sh\n", mode=0o755)
    await sandbox.put("/testbed/new/empty", b"")
    await sandbox.put("/testbed/crlf.txt", b"one\r\nTWO\r\n")
    await sandbox.put("/testbed/noend.py", b"still no end")
    await sandbox.put("/testbed/binary.dat", b"a\0c\xff\n")
    await sandbox.put("/testbed/untracked.py", b"edited\n")
    await sandbox.put("/testbed/ignored_tracked.py", b"edited\n")
    await run(
        sandbox,
        "chmod -x tool.sh; ln -s plain.py link; mv pkg/mod.py pkg/moved.py; rm binary.dat; "
        r"echo x >$'w\xeeird \"name\"'; echo x >'back\slash'; echo 'name with space' >'a b'; sed -i s/two/2/ plain.py",
    )
    patch = await sandbox.diff()
    await assert_applies(pool, sandbox_task, sandbox, patch)


async def test_commits_of_the_agent_are_part_of_its_change(
    pool: SandboxPool, sandbox: RunnerSandbox, sandbox_task: Task
) -> None:
    await run(
        sandbox,
        "echo a >>plain.py; git add -A; git commit -qm one; git checkout -qb other; echo b >b.py; git add b.py; "
        "git commit -qm two; echo c >c.py; git stash -uq; git commit --amend -qm three; echo d >d.py",
    )
    await assert_applies(pool, sandbox_task, sandbox, await sandbox.diff())


async def test_diff_leaves_the_agents_index_alone(sandbox: RunnerSandbox) -> None:
    await run(sandbox, "echo a >a.py; echo b >b.py; git add a.py")
    before = await run(sandbox, "git status --porcelain; sha256sum .git/index; find .git | sort")
    assert b"b.py" in await sandbox.diff()
    assert await run(sandbox, "git status --porcelain; sha256sum .git/index; find .git | sort") == before


async def test_diff_again_shows_the_state_of_then(sandbox: RunnerSandbox) -> None:
    await run(sandbox, "echo a >a.py")
    assert b"a.py" in await sandbox.diff()
    await run(sandbox, "rm a.py; echo b >b.py")
    second = await sandbox.diff()
    assert b"a.py" not in second and b"b.py" in second


async def test_no_configuration_of_the_repository_takes_part(
    pool: SandboxPool, sandbox: RunnerSandbox, sandbox_task: Task
) -> None:
    await run(
        sandbox,
        "printf '* filter=evil diff=evil text eol=crlf ident\\n' >.gitattributes; echo '$Id$' >id.py; "
        "for key in filter.evil.clean filter.evil.smudge diff.evil.textconv diff.evil.command core.fsmonitor "
        "diff.external core.pager; do git config $key 'touch /tmp/ran; cat'; "
        "git config --global $key 'touch /tmp/ran'; "
        "done; git config diff.noprefix true; git config --global core.autocrlf true; git config core.bare true; "
        "mkdir -p .git/hooks; printf '#!/bin/sh\\ntouch /tmp/ran' >.git/hooks/post-index-change; "
        "chmod +x .git/hooks/post-index-change; touch .git/index.lock; echo changed >>plain.py",
    )
    patch = await sandbox.diff()
    assert await run(sandbox, "ls /tmp/ran 2>/dev/null | wc -l") == b"0\n"
    await assert_applies(pool, sandbox_task, sandbox, patch)


async def test_build_leftovers_and_huge_files_are_not_part_of_the_change(sandbox: RunnerSandbox) -> None:
    await run(
        sandbox,
        "mkdir -p .venv/lib pkg/__pycache__ .pytest_cache r2e_tests; touch .venv/lib/x pkg/__pycache__/mod.pyc "
        ".pytest_cache/x r2e_tests/t.py run_tests.sh ignored_new; head -c 20M /dev/zero >core.1; echo y >kept.py",
    )
    patch = await sandbox.diff()
    assert patch.count(b"diff --git") == 1 and b"b/kept.py" in patch


async def test_what_the_agent_makes_unreadable_does_not_stop_the_rest(sandbox: RunnerSandbox) -> None:
    await run(sandbox, "echo x >secret.py; chmod 000 secret.py; mkfifo pipe; git init -q nested; echo kept >kept.py")
    assert b"b/kept.py" in await sandbox.diff()


async def test_an_agent_that_destroys_its_container_has_an_empty_change(sandbox: RunnerSandbox) -> None:
    await run(sandbox, "echo changed >>plain.py; rm -f $(command -v git)")
    assert await sandbox.diff() == b""
    await sandbox.exec("rm -rf --no-preserve-root /", timeout_s=60)
    assert await sandbox.diff() == b""
    assert (await sandbox.exec("true", timeout_s=20)).exit_code == 127


async def test_a_folder_without_git_has_a_change_too(sandbox: RunnerSandbox) -> None:
    await run(sandbox, "rm -rf .git")
    await sandbox.set_up()
    await run(sandbox, "echo changed >>plain.py")
    assert b"+changed" in await sandbox.diff()
