"""Grading in real containers, on tasks whose tests take a third of a second."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import docker
import pytest

from agent_r3.config import GradingConfig
from agent_r3.envs.commits import file_diff, patch_of
from agent_r3.envs.grading import Grader, judge, require_gradable
from agent_r3.envs.hidden_tests import HiddenRun
from agent_r3.envs.images import require_images
from agent_r3.envs.pool import SandboxPool
from agent_r3.envs.sandbox import Sandbox, SandboxProvider
from agent_r3.errors import DataError, GradingError
from agent_r3.types import Outcome, Source, Task
from tests.support.docker import make_task
from tests.support.tasks import MISTUNE, PATHSPEC

pytestmark = pytest.mark.docker


class Counting(SandboxProvider):
    """The pool, counting what it hands out; `use` may do something to a container once it is there."""

    def __init__(self, pool: SandboxPool, use: Callable[[Sandbox], Awaitable[None]] | None = None) -> None:
        self.handed_out: list[str] = []
        self._pool = pool
        self._use = use

    async def prefetch(self, tasks: list[Task]) -> None:
        await self._pool.prefetch(tasks)

    async def acquire(self, task: Task) -> Sandbox:
        return await self._pool.acquire(task)

    async def acquire_for_grading(self, task: Task) -> Sandbox:
        sandbox = await self._pool.acquire_for_grading(task)
        self.handed_out.append(sandbox.id)
        if self._use is not None:
            await self._use(sandbox)
        return sandbox

    async def close(self) -> None:
        await self._pool.close()


class Nothing(SandboxProvider):
    """A provider that may not be asked."""


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
    assert (
        grade.outcome == "unapplied"
        and "the patch does not apply: error: patch failed: pathspec/pathspec.py" in grade.reason
    )


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


async def test_tests_that_run_out_of_time_earn_0_with_the_reason(pool: SandboxPool, mistune_task: Task) -> None:
    patch = await _prepend(pool, mistune_task, "src/mistune/toc.py", "import time\ntime.sleep(600)\n")
    grade = await Grader(pool, GradingConfig(timeout_s=8)).grade(mistune_task, patch)
    assert (grade.reward, grade.outcome) == (0.0, "timeout")
    assert grade.reason == "exit status 124: timed out after 8 s"


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
    grader = Grader(provider, GradingConfig(retries=0))
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


async def test_a_failure_of_ours_is_graded_again_and_the_grade_is_served(
    pool: SandboxPool, docker_engine: docker.APIClient, mistune_task: Task
) -> None:
    async def kill_the_first(sandbox: Sandbox) -> None:
        if len(provider.handed_out) == 1:
            await asyncio.to_thread(docker_engine.kill, sandbox.id)

    provider = Counting(pool, kill_the_first)
    grade = await Grader(provider, GradingConfig(retries=1)).grade(mistune_task, mistune_task.gold_patch.encode())
    assert grade.reward == 1.0 and len(provider.handed_out) == 2


async def test_tests_that_do_not_start_are_a_failure_of_ours(pool: SandboxPool, mistune_task: Task) -> None:
    task = dataclasses.replace(mistune_task, test_command="/nowhere/python -m pytest r2e_tests")
    with pytest.raises(GradingError, match=r"pytest did not start in .* exit status 127: .*/nowhere/python"):
        await Grader(pool, GradingConfig(retries=0)).grade(task, b"")


async def test_a_test_command_of_another_form_is_told_in_one_line(pool: SandboxPool, mistune_task: Task) -> None:
    task = dataclasses.replace(mistune_task, test_command="./run_tests.sh")
    with pytest.raises(DataError, match=r"task mistune__3.1.1: its test command is not of the form .*: a Python is"):
        await Grader(pool, GradingConfig()).grade(task, b"")


async def test_a_patch_above_the_limit_earns_0_without_a_container(mistune_task: Task) -> None:
    grade = await Grader(Nothing(), GradingConfig(max_patch_bytes=100)).grade(mistune_task, b"x" * 101)
    assert (grade.reward, grade.outcome) == (0.0, "too_large")
    assert grade.reason == "the patch has 101 bytes, at most 100 are graded"


async def test_output_of_40_megabytes_changes_nothing(pool: SandboxPool, pathspec_task: Task) -> None:
    code = (
        "import os as _os\nfor _fd in range(3, 30):\n    try:\n        for _ in range(40):\n"
        "            _os.write(_fd, b'PASSED x\\n' * (1 << 17))\n    except OSError:\n        pass\n"
    )
    with_noise = patch_of(
        [
            file_diff(
                "pathspec/__init__.py", text := await _source(pool, pathspec_task, "pathspec/__init__.py"), code + text
            )
        ]
    )
    grade = await Grader(pool, GradingConfig()).grade(pathspec_task, (pathspec_task.gold_patch + with_noise).encode())
    assert (grade.reward, grade.statuses) == (1.0, pathspec_task.expected)


def _with_tests(task: Task, folder: Path, code: str, **expected: str) -> Task:
    """The task with other hidden tests."""
    (folder / "test_1.py").write_text(code)
    return dataclasses.replace(task, hidden_tests_dir=folder, expected=expected)


async def test_names_with_spaces_dashes_and_a_clock(pool: SandboxPool, mistune_task: Task, tmp_path: Path) -> None:
    code = (
        "import time, pytest\n@pytest.mark.parametrize('p', ['a b', 'c - d', '::', str(time.time())])\n"
        "def test_p(p): pass\n"
    )
    named = {"test_p[a b]": "PASSED", "test_p[c": "PASSED", "test_p[.]": "PASSED", "test_p[1700000000.5]": "PASSED"}
    task = _with_tests(mistune_task, tmp_path, code, **named)
    grade = await Grader(pool, GradingConfig()).grade(task, b"")
    assert (grade.reward, grade.outcome) == (0.0, "failed")
    assert grade.reason.startswith("2 of 4 differ: test_p[") and "test_p[1700000000.5] missing" in grade.reason


async def test_a_file_that_cannot_be_collected_is_an_expected_status_like_others(
    pool: SandboxPool, mistune_task: Task, tmp_path: Path
) -> None:
    task = _with_tests(mistune_task, tmp_path, "import nothing_such\n", **{"": "ERROR"})
    grade = await Grader(pool, GradingConfig()).grade(task, b"")
    assert (grade.reward, grade.statuses) == (1.0, {"": "ERROR"})
    other = dataclasses.replace(task, expected={"test_a": "PASSED"})
    assert "could not be collected ERROR" in (await Grader(pool, GradingConfig()).grade(other, b"")).reason


async def test_runs_that_disagree_earn_0_and_mark_the_grade_flaky(
    pool: SandboxPool, mistune_task: Task, tmp_path: Path
) -> None:
    async def mark_the_second(sandbox: Sandbox) -> None:
        if len(provider.handed_out) == 2:
            await sandbox.put("/tmp/second", b"")

    task = _with_tests(
        mistune_task, tmp_path, "import os\ndef test_a(): assert not os.path.exists('/tmp/second')\n", test_a="PASSED"
    )
    provider = Counting(pool, mark_the_second)
    flaky = await Grader(provider, GradingConfig(runs=3)).grade(task, b"")
    assert (flaky.reward, flaky.outcome, flaky.flaky, len(provider.handed_out)) == (0.0, "failed", True, 3)
    steady = await Grader(pool, GradingConfig(runs=2)).grade(task, b"")
    assert (steady.reward, steady.flaky) == (1.0, False)


async def test_hidden_tests_of_the_image_and_files_beside_them_are_run(
    pool: SandboxPool, mistune_task: Task, tmp_path: Path
) -> None:
    """As R2E-Gym's images have them, at /r2e_tests."""

    async def put(sandbox: Sandbox) -> None:
        await sandbox.put("/r2e_tests/test_1.py", b"from helper import x\ndef test_a(): assert x\n")
        await sandbox.put("/r2e_tests/helper.py", b"x = 1\n")
        await sandbox.put("/r2e_tests/data/a b.txt", b"x = 1\n")

    task = dataclasses.replace(mistune_task, hidden_tests_dir=None, expected={"test_a": "PASSED"})
    assert (await Grader(Counting(pool, put), GradingConfig()).grade(task, b"")).reward == 1.0


async def test_tests_of_the_repository_itself_are_run_as_they_were(pool: SandboxPool, mistune_task: Task) -> None:
    task = dataclasses.replace(
        mistune_task,
        hidden_tests_dir=None,
        test_files=("own/checks.py", "own/test_2.py"),
        test_command=mistune_task.test_command.replace("r2e_tests", "own/checks.py own/test_2.py"),
        expected={"own/checks.py::test_a": "PASSED"},
        other_tests=True,
    )

    async def put(sandbox: Sandbox) -> None:
        await sandbox.put("/testbed/own/checks.py", b"def test_a(): assert 1\ndef test_b(): assert 0\n")
        await sandbox.put("/testbed/own/test_2.py", b"def test_c(): assert 0\n")

    edit = patch_of([file_diff("own/checks.py", None, "def test_a(): assert 0\n")])
    grade = await Grader(Counting(pool, put), GradingConfig()).grade(task, edit.encode())
    assert (grade.reward, grade.left_out) == (1.0, ("own/checks.py",)), grade.reason
    assert grade.statuses["own/checks.py::test_b"] == grade.statuses["own/test_2.py::test_c"] == "FAILED"


@pytest.mark.parametrize(
    ("other_tests", "found", "expected", "reason"),
    [
        (False, {"a": "PASSED"}, {"a": "PASSED"}, None),
        (False, {"": "ERROR"}, {"": "ERROR"}, None),
        (False, {"a": "PASSED"}, {"a": "PASSED", "b": "PASSED"}, "1 of 2 differ: b missing instead of PASSED"),
        (False, {"a": "PASSED", "b": "PASSED"}, {"a": "PASSED"}, "1 of 1 differ: b PASSED instead of absent"),
        (False, {"": "ERROR"}, {"a": "PASSED"}, "a file that could not be collected ERROR instead of absent"),
        (True, {"a": "PASSED", "b": "FAILED"}, {"a": "PASSED"}, None),
        (True, {"b": "PASSED"}, {"a": "PASSED"}, "1 of 1 differ: a missing instead of PASSED"),
    ],
)
def test_the_reward_is_1_exactly_when_the_statuses_are_the_expected_ones(
    other_tests: bool, found: dict[str, str], expected: dict[str, str], reason: str | None
) -> None:
    task = dataclasses.replace(make_task("image"), expected=expected, other_tests=other_tests)
    grade = judge(HiddenRun(found, exit_code=1, output="", seconds=1.0), task)
    assert (grade.reward, grade.outcome) == ((1.0, "passed") if reason is None else (0.0, "failed"))
    assert reason is None or reason in grade.reason


@pytest.mark.parametrize("outcome", ["unapplied", "too_large", "timeout", "ended_early", "tampered", "failed"])
def test_a_run_that_is_no_verdict_earns_0_whatever_it_says(outcome: Outcome) -> None:
    task = dataclasses.replace(make_task("image"), expected={"a": "PASSED"})
    grade = judge(HiddenRun({"a": "PASSED"}, 1, "", 1.0, outcome, "why", ("conftest.py",)), task)
    assert (grade.reward, grade.outcome, grade.statuses, grade.left_out) == (0.0, outcome, {}, ("conftest.py",))
    assert grade.reason.endswith("why")


def test_what_cannot_be_graded_is_known_before_anything_runs() -> None:
    require_gradable(dataclasses.replace(make_task("image:1"), test_command="python -m pytest -rA r2e_tests"))
    for task, complaint in (
        (dataclasses.replace(make_task("image:1", "a"), test_command="make test | tee log"), "not of the form"),
        (dataclasses.replace(make_task("image:1", "a"), source=Source.SWE_BENCH), "use a dataset in the 5.x format"),
    ):
        with pytest.raises(DataError, match=rf"task a.*{complaint}"):
            require_gradable(task)
