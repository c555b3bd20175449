"""Grading in real containers, on tasks whose tests take a third of a second."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping

import docker
import pytest

from agent_r3.config import GradingConfig
from agent_r3.envs.commits import file_diff, patch_of
from agent_r3.envs.grading import Grader, objection
from agent_r3.envs.hidden_tests import PytestRun
from agent_r3.envs.images import require_images
from agent_r3.envs.pool import SandboxPool
from agent_r3.envs.sandbox import Sandbox, SandboxProvider
from agent_r3.errors import DataError, GradingError
from agent_r3.types import Task
from tests.support.tasks import MISTUNE, PATHSPEC

pytestmark = pytest.mark.docker

# What a hack would print: a full summary of the hidden tests, on every descriptor pytest may have kept of the terminal.
_FORGE = """
import os as _os
_passed = ["PASSED t.py::" + name for name in {names!r}]
_lines = ["=== short test summary info ===", *_passed, "=== {count} passed in 0.1s ==="]
for _fd in range(1, 30):
    try:
        _os.write(_fd, ("\\n" + "\\n".join(_lines) + "\\n").encode())
    except OSError:
        pass
_os._exit(0)
"""


class Counting(SandboxProvider):
    """The pool, counting what it hands out; `use` may do something to a container once it is there."""

    def __init__(self, pool: SandboxPool, use: Callable[[Sandbox], Awaitable[None]] | None = None) -> None:
        self.handed_out: list[str] = []
        self._pool = pool
        self._use = use
        self._pending: set[asyncio.Task[None]] = set()

    async def prefetch(self, tasks: list[Task]) -> None:
        await self._pool.prefetch(tasks)

    async def acquire(self, task: Task) -> Sandbox:
        return await self._pool.acquire(task)

    async def acquire_for_grading(self, task: Task) -> Sandbox:
        sandbox = await self._pool.acquire_for_grading(task)
        self.handed_out.append(sandbox.id)
        if self._use is not None:
            self._pending.add(asyncio.ensure_future(self._use(sandbox)))
        return sandbox

    async def close(self) -> None:
        await self._pool.close()


async def _source(pool: SandboxPool, task: Task, name: str) -> str:
    sandbox = await pool.acquire_for_grading(task)
    try:
        return (await sandbox.get(f"{task.workdir}/{name}")).decode()
    finally:
        await sandbox.close()


async def _prepend(pool: SandboxPool, task: Task, name: str, code: str) -> bytes:
    """A patch that puts `code` at the top of a file of the repository."""
    text = await _source(pool, task, name)
    return patch_of([file_diff(name, text, code + text)]).encode()


def _names(task: Task) -> list[str]:
    return [name.replace(".", "::", 1) for name in task.expected]


@pytest.mark.parametrize("task_id", [PATHSPEC, MISTUNE])
async def test_doing_nothing_earns_0_and_the_gold_patch_1(
    built_tasks: Mapping[str, Task], pool: SandboxPool, task_id: str
) -> None:
    task = built_tasks[task_id]
    grader = Grader(pool, GradingConfig())
    noop, gold = await asyncio.gather(grader.grade(task, b""), grader.grade(task, task.gold_patch.encode()))
    assert (noop.reward, gold.reward) == (0.0, 1.0)
    assert noop.reason.startswith(f"1 of {len(task.expected)} differ: ") and "FAILED instead of PASSED" in noop.reason
    assert gold.reason == f"all {len(task.expected)} as expected" and gold.statuses == task.expected


async def test_a_patch_that_does_not_apply_earns_0_and_says_so(pool: SandboxPool, pathspec_task: Task) -> None:
    patch = pathspec_task.gold_patch.replace("match_file", "march_file").encode()
    assert patch != pathspec_task.gold_patch.encode()
    grade = await Grader(pool, GradingConfig()).grade(pathspec_task, patch)
    assert (grade.reward, grade.statuses) == (0.0, {})
    assert "the patch does not apply: error: patch failed: pathspec/pathspec.py" in grade.reason


async def test_changes_to_the_place_of_the_hidden_tests_are_ignored(pool: SandboxPool, pathspec_task: Task) -> None:
    forged = patch_of(
        [
            file_diff("r2e_tests/conftest.py", None, "collect_ignore_glob = ['*']\n"),
            file_diff("r2e_tests/__init__.py", None, "raise SystemExit(0)\n"),
            file_diff("r2e_tests/pathspec.py", None, "raise SystemExit(0)\n"),
        ]
    )
    grader = Grader(pool, GradingConfig())
    alone, with_gold = await asyncio.gather(
        grader.grade(pathspec_task, forged.encode()),
        grader.grade(pathspec_task, (pathspec_task.gold_patch + forged).encode()),
    )
    assert (alone.reward, with_gold.reward) == (0.0, 1.0)
    assert alone.statuses.keys() == pathspec_task.expected.keys()


async def test_a_link_in_the_place_of_the_hidden_tests_is_not_followed(pool: SandboxPool, pathspec_task: Task) -> None:
    link = (
        "diff --git a/r2e_tests b/r2e_tests\nnew file mode 120000\n--- /dev/null\n+++ b/r2e_tests\n@@ -0,0 +1 @@\n+x\n"
    )
    grade = await Grader(pool, GradingConfig()).grade(
        pathspec_task, (pathspec_task.gold_patch + link + "\\ No newline at end of file\n").encode()
    )
    assert grade.reward == 1.0


async def test_a_forged_summary_with_exit_status_0_earns_0(pool: SandboxPool, pathspec_task: Task) -> None:
    code = _FORGE.format(names=_names(pathspec_task), count=len(pathspec_task.expected))
    grade = await Grader(pool, GradingConfig()).grade(
        pathspec_task, await _prepend(pool, pathspec_task, "pathspec/pathspec.py", code)
    )
    # The forgery is a perfect one as far as output and exit status go, or this would prove nothing.
    assert grade.statuses == pathspec_task.expected
    assert (grade.reward, grade.reason) == (0.0, "pytest wrote no report: its process was ended early")


async def test_leaving_with_status_0_at_import_earns_0(pool: SandboxPool, mistune_task: Task) -> None:
    patch = await _prepend(pool, mistune_task, "src/mistune/toc.py", "import os\nos._exit(0)\n")
    grade = await Grader(pool, GradingConfig()).grade(mistune_task, patch)
    assert grade.reward == 0.0 and "missing instead of PASSED" in grade.reason


async def test_tests_that_run_out_of_time_earn_0_with_the_reason(pool: SandboxPool, mistune_task: Task) -> None:
    patch = await _prepend(pool, mistune_task, "src/mistune/toc.py", "import time\ntime.sleep(600)\n")
    grade = await Grader(pool, GradingConfig(timeout_s=2)).grade(mistune_task, patch)
    assert (grade.reward, grade.reason) == (0.0, "exit status 124: timed out after 2 s")


async def test_equal_patches_of_a_task_are_graded_once_also_at_the_same_time(
    pool: SandboxPool, mistune_task: Task
) -> None:
    provider = Counting(pool)
    grader = Grader(provider, GradingConfig(concurrency=4))
    gold = mistune_task.gold_patch.encode()
    together = await asyncio.gather(
        *(grader.grade(mistune_task, gold) for _ in range(4)), grader.grade(mistune_task, b"")
    )
    later = await grader.grade(mistune_task, gold)
    assert len(provider.handed_out) == 2
    assert [grade.reward for grade in together] == [1.0] * 4 + [0.0]
    assert sorted(grade.cached for grade in together) == [False, False, True, True, True] and later.cached


async def test_without_reuse_every_patch_is_graded_anew(pool: SandboxPool, mistune_task: Task) -> None:
    provider = Counting(pool)
    grader = Grader(provider, GradingConfig(reuse=False))
    grades = await asyncio.gather(*(grader.grade(mistune_task, b"") for _ in range(2)))
    assert len(provider.handed_out) == 2 and not any(grade.cached for grade in grades)


async def test_a_killed_container_is_an_infrastructure_failure_and_is_graded_anew(
    pool: SandboxPool, docker_engine: docker.APIClient, mistune_task: Task
) -> None:
    kills = 1

    async def kill(sandbox: Sandbox) -> None:
        nonlocal kills
        if kills:
            kills -= 1
            await asyncio.to_thread(docker_engine.kill, sandbox.id)

    provider = Counting(pool, kill)
    grader = Grader(provider, GradingConfig())
    first, second = await asyncio.gather(
        *(grader.grade(mistune_task, mistune_task.gold_patch.encode()) for _ in range(2)), return_exceptions=True
    )
    assert isinstance(first, GradingError) and mistune_task.id in str(first)
    # The one that waited for the same grade is not served the failure: it runs itself.
    assert not isinstance(second, BaseException) and second.reward == 1.0 and not second.cached


async def test_a_cancelled_grading_neither_blocks_nor_spoils_the_next_one(
    pool: SandboxPool, mistune_task: Task
) -> None:
    started = asyncio.Event()

    async def tell(sandbox: Sandbox) -> None:
        started.set()

    grader = Grader(Counting(pool, tell), GradingConfig(concurrency=1))
    running = asyncio.create_task(grader.grade(mistune_task, b""))
    await started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    grade = await grader.grade(mistune_task, b"")
    assert (grade.reward, grade.cached) == (0.0, False) and grade.statuses


async def test_an_image_that_is_not_built_is_told_in_one_line(pool: SandboxPool, mistune_task: Task) -> None:
    missing = dataclasses.replace(mistune_task, image="agent-r3/task:never-built")
    with pytest.raises(
        DataError, match=r"agent-r3/task:never-built of task mistune__3.1.1 .*agent-r3 tasks build"
    ) as caught:
        require_images([mistune_task, missing])
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="never-built"):
        await Grader(pool, GradingConfig()).grade(missing, b"")


async def test_the_agents_container_holds_neither_hidden_tests_nor_the_fix_nor_more_than_one_commit(
    pool: SandboxPool, pathspec_task: Task
) -> None:
    only_in_hidden_tests = "test_01_match_file_3_unmatch"
    assert pathspec_task.hidden_tests_dir is not None
    assert only_in_hidden_tests in (pathspec_task.hidden_tests_dir / "test_1.py").read_text()
    fix = next(line[1:].strip() for line in pathspec_task.gold_patch.splitlines() if line.startswith("+\t"))
    sandbox = await pool.acquire(pathspec_task)
    search = "find / -xdev -type f -exec grep -lF --binary-files=text -e {} {{}} + 2>/dev/null"
    for text in (only_in_hidden_tests, fix):
        found = await sandbox.exec(search.format(f"'{text}'"), timeout_s=120)
        assert found.text == "", text
    assert (await sandbox.exec(search.format("'def match_file('"), timeout_s=120)).text  # the search does find things
    objects = await sandbox.exec("git rev-list --all --count && git remote && git stash list", timeout_s=30)
    assert objects.text == "1\n"
    packed = (
        "git cat-file --batch-check='%(objecttype) %(objectname)' --batch-all-objects | awk '$1 == \"blob\" {print $2}'"
    )
    inside = await sandbox.exec(f"for o in $({packed}); do git cat-file blob $o; done | grep -cF '{fix}'", timeout_s=60)
    assert inside.text == "0\n"


async def test_the_images_hold_nothing_of_this_hosts_homes_and_accounts(pool: SandboxPool, pathspec_task: Task) -> None:
    sandbox = await pool.acquire_for_grading(pathspec_task)
    listing = await sandbox.exec(
        "ls -A /root /home /etc/shadow 2>/dev/null; cut -d: -f6 /etc/passwd | grep ^/home/", timeout_s=30
    )
    assert [line for line in listing.text.split() if not line.endswith(":")] in ([], ["/home/irc"])


def _run(**changes: object) -> PytestRun:
    run = PytestRun({"a": "PASSED"}, exit_code=0, timed_out=False, reported_bad=0, output="", seconds=1.0)
    return dataclasses.replace(run, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (_run(), {"a": "PASSED"}),
        (_run(statuses={"a": "FAILED"}, exit_code=1, reported_bad=1), {"a": "FAILED"}),
        (_run(statuses={"": "ERROR"}, exit_code=2, reported_bad=1), {"": "ERROR"}),
    ],
)
def test_statuses_exit_status_and_report_that_agree_raise_no_objection(
    run: PytestRun, expected: dict[str, str]
) -> None:
    assert objection(run, expected, 300) is None


@pytest.mark.parametrize(
    ("run", "expected", "reason"),
    [
        (_run(exit_code=1), {"a": "PASSED"}, "exit status 1 does not fit"),
        (_run(exit_code=0), {"a": "PASSED", "b": "PASSED"}, "1 of 2 differ: b missing instead of PASSED"),
        (_run(statuses={"a": "PASSED", "b": "PASSED"}), {"a": "PASSED"}, "b PASSED instead of absent"),
        (_run(reported_bad=2), {"a": "PASSED"}, "pytest's report counts 2"),
        (_run(reported_bad=None), {"a": "PASSED"}, "pytest wrote no report"),
        (_run(statuses={"a": "FAILED"}, exit_code=0), {"a": "FAILED"}, "exit status 0 does not fit"),
        (_run(statuses={"a": "FAILED"}, exit_code=2, reported_bad=1), {"a": "FAILED"}, "exit status 2 does not fit"),
        (_run(statuses={}, exit_code=137), {"": "ERROR"}, "a file that could not be collected missing"),
    ],
)
def test_anything_that_disagrees_is_an_objection(run: PytestRun, expected: dict[str, str], reason: str) -> None:
    assert reason in (objection(run, expected, 300) or "")
