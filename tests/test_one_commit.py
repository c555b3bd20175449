"""The agent's repository is one commit: nothing that git can keep holds a word of the fix."""

import pytest

from agent_r3.envs.pool import SandboxPool
from agent_r3.envs.runner_sandbox import RunnerSandbox
from agent_r3.errors import DataError
from tests.support.docker import make_task

pytestmark = pytest.mark.docker
pytest_plugins = ["tests.support.histories"]

# Every file that holds git objects, but for our own repository's and the agent's.
STRAY = (
    "find / -xdev \\( -name '*.pack' -o -path '*/objects/??/*' \\) ! -path '/testbed/.git/*' "
    "! -path '/var/tmp/agent-r3/base.git/*' 2>/dev/null || true"
)
EVERY_OBJECT = "git cat-file --batch-all-objects --unordered --batch"


async def run(sandbox: RunnerSandbox, command: str) -> str:
    result = await sandbox.exec(command, timeout_s=60)
    assert result.exit_code == 0, result.text
    return result.text


@pytest.fixture
async def agents(pool: SandboxPool, history_image: str) -> RunnerSandbox:
    return await pool.acquire(make_task(history_image))


async def test_the_history_is_one_commit_on_one_branch(agents: RunnerSandbox) -> None:
    assert await run(agents, "git log --all --reflog --format='%an %ae %ad %s' --date=short") == (
        "base base@localhost 2000-01-01 base\n"
    )
    assert await run(agents, "git branch -a; git symbolic-ref HEAD") == "* main\nrefs/heads/main\n"
    for empty in (
        "git remote; git tag; git stash list; git reflog; git notes list; git submodule status; git replace -l",
        "git log --all --reflog -S FUTURE; git log --all -G FUTURE; git worktree list | tail -n +2",
        "git fsck --full --strict --unreachable --lost-found 2>&1; ls -d .git/lost-found 2>/dev/null || true",
        "ls .git/hooks .git/modules .git/worktrees .git/logs .git/objects/info/* .git/*_HEAD .git/BISECT* 2>/dev/null "
        "|| true",
    ):
        assert await run(agents, empty) == ""


async def test_no_object_anywhere_holds_the_fix(agents: RunnerSandbox) -> None:
    assert await run(agents, STRAY) == ""
    for folder in ("/testbed/.git", "/var/tmp/agent-r3/base.git"):
        assert await run(agents, f"GIT_DIR={folder} {EVERY_OBJECT} | grep -ac FUTURE || true") == "0\n"
        assert int(await run(agents, f"GIT_DIR={folder} {EVERY_OBJECT} | wc -c")) > 500
    assert await run(agents, "grep -rlsI FUTURE /testbed /elsewhere /mirror.git /root 2>/dev/null || true") == ""


async def test_no_credential_or_configuration_of_the_image_is_left(agents: RunnerSandbox) -> None:
    config = await run(agents, "git config --list --show-origin; cat ~/.git-credentials 2>/dev/null || true")
    assert "secret" not in config and "credential" not in config and "fsmonitor" not in config
    assert "user.name=someone" in config  # an identity is no secret
    await run(agents, "echo 1 >>plain.py && git commit -qam mine && test ! -e /tmp/ran")


async def test_the_commit_is_what_lay_there_and_the_rest_stays_untracked(agents: RunnerSandbox) -> None:
    assert await run(agents, "git status --porcelain --ignored") == ("?? dep/\n?? untracked.py\n!! ignored.py\n")
    assert await run(agents, "git ls-files") == (
        ".gitattributes\n.gitignore\n.gitmodules\nbinary\ncrlf.eol\ncrlf.txt\nflagged.py\nlink\nplain.py\nsub/part.py\n"
    )
    assert await run(agents, "git show HEAD:plain.py HEAD:flagged.py HEAD:sub/part.py") == (
        "one\ntwo\nthree\nchanged\npart = 1\n"
    )
    # Also when git looks at every file again.
    assert await run(agents, "touch -d tomorrow $(git ls-files) && git status --porcelain -uno") == ""


async def test_the_change_is_measured_whatever_becomes_of_the_agents_repository(agents: RunnerSandbox) -> None:
    await run(
        agents, "echo four >>flagged.py; echo x >sub/part.py; git add -A; git commit -qm mine; echo y >dep/nested/n.py"
    )
    patch = await agents.diff()
    assert [line for line in patch.decode().splitlines() if line[:1] in "+-" and line[1:3] not in ("++", "--")] == [
        "+y", "+four", "-part = 1", "+x",
    ]  # fmt: skip
    await run(
        agents,
        "git checkout -q --orphan none; git reset -q --hard; git reflog expire --expire=now --all; "
        "git gc -q --prune=now; git checkout -q main -- . 2>/dev/null; git branch -D main -q; rm -rf .git",
    )
    assert b"-part = 1" in await agents.diff()


@pytest.mark.parametrize(
    "workdir",
    [
        *("/whole", "/whole/part", "/sha256", "/gitfile", "/worktree", "/damaged", "/noindex", "/split", "/linked"),
        *("/single", "/dirty", "/dangling"),
    ],
)
async def test_every_shape_of_repository_becomes_one_commit(pool: SandboxPool, shapes_image: str, workdir: str) -> None:
    sandbox = await pool.acquire(make_task(shapes_image, workdir=workdir))
    assert await run(
        sandbox, "git log --all --oneline | wc -l; git status --porcelain; git rev-parse --show-toplevel"
    ) == (f"1\n{'/'.join(workdir.split('/')[:2])}\n")
    assert await run(sandbox, "git ls-tree -r --name-only --full-tree HEAD") == "a.py\npart/b.py\n"
    assert "FUTURE" not in await run(sandbox, EVERY_OBJECT)
    kept_elsewhere = {"/gitfile": "/kept/git.dir", "/worktree": "/main/.git", "/linked": "/moved"}.get(workdir)
    assert kept_elsewhere is None or await run(sandbox, f"ls -d {kept_elsewhere} 2>/dev/null || true") == ""
    assert await sandbox.diff() == b""
    await run(sandbox, "echo new >new.py")
    assert b"+new" in await sandbox.diff()


async def test_a_repository_that_is_one_clean_commit_stays_and_loses_its_trappings(
    pool: SandboxPool, shapes_image: str
) -> None:
    sandbox = await pool.acquire(make_task(shapes_image, workdir="/single"))
    assert await run(sandbox, "git log --format=%an%s; ls -A .git") == (
        "someonefirst\nHEAD\nconfig\nindex\ninfo\nobjects\nrefs\n"
    )
    await run(sandbox, "echo c >>a.py; rm -rf .git")
    assert b"\n a\n+c\n" in await sandbox.diff()


async def test_a_repository_without_a_commit_gets_one(pool: SandboxPool, shapes_image: str) -> None:
    sandbox = await pool.acquire(make_task(shapes_image, workdir="/unborn"))
    assert await run(sandbox, "git log --oneline | wc -l; git status --porcelain") == "1\n?? a.py\n"


async def test_what_is_no_repository_is_left_without_one(pool: SandboxPool, shapes_image: str) -> None:
    sandbox = await pool.acquire(make_task(shapes_image, workdir="/broken"))
    assert await run(sandbox, "ls -A; echo b >a.py") == "a.py\n"
    assert b"+b" in await sandbox.diff()


async def test_a_user_who_owns_the_workdir_can_be_the_agent(pool: SandboxPool, user_image: str) -> None:
    sandbox = await pool.acquire(make_task(user_image, workdir="/mine"))
    assert await run(sandbox, "id -un; git log --all --oneline | wc -l; git status --porcelain") == "app\n1\n"
    await run(sandbox, "echo b >a.py && git commit -qam mine")
    assert b"+b" in await sandbox.diff()


@pytest.mark.parametrize(
    ("workdir", "message"),
    [
        ("/roots", r"cannot be used: its user \(app\) cannot remove the history in /roots/.git$"),
        (
            "/testsleft",
            r"cannot be used: its user \(app\) cannot remove the hidden tests \(/r2e_tests ./r2e_tests .*\)$",
        ),
    ],
)
async def test_what_set_up_cannot_remove_makes_the_image_unusable(
    pool: SandboxPool, user_image: str, workdir: str, message: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        await pool.acquire(make_task(user_image, workdir=workdir))
    assert "\n" not in str(caught.value)
