"""Set-up and grading of tasks by where they come from, in images shaped like the real ones."""

import json
from dataclasses import replace

import pytest

from agent_r3.config import GradingConfig, SandboxConfig
from agent_r3.envs.grading import Grader
from agent_r3.envs.local import open_pool
from agent_r3.envs.pool import SandboxPool
from agent_r3.envs.rows import Origin, task_from_row
from agent_r3.envs.runner_sandbox import RunnerSandbox
from agent_r3.errors import DataError
from agent_r3.types import Task
from tests.support.r2e_rows import r2e_row
from tests.support.swe_rows import bench_row, smith_row

pytestmark = pytest.mark.docker
pytest_plugins = ["tests.support.source_images"]

ORIGIN = Origin("rows.jsonl", 1)
FIX = """diff --git a/core.py b/core.py
--- a/core.py
+++ b/core.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a - b
+    return a + b
"""
BUG = FIX.replace("-    return a - b\n+    return a + b", "-    return a + b\n+    return a - b")
BREAKS_OTHERS = FIX.replace("return a + b", "return a + b if a else 7")


async def run(sandbox: RunnerSandbox, command: str) -> str:
    result = await sandbox.exec(command, timeout_s=60)
    assert result.exit_code == 0, result.text
    return result.text


@pytest.fixture
def grader(pool: SandboxPool) -> Grader:
    return Grader(pool, GradingConfig(retries=0))


@pytest.fixture
def r2e_task(r2e_image: str) -> Task:
    row = r2e_row(docker_image=r2e_image, expected_output_json=json.dumps({"test_add": "PASSED"}))
    return task_from_row(row, ORIGIN)


@pytest.fixture
def bench_task(conda_image: str) -> Task:
    return task_from_row(bench_row(image=conda_image), ORIGIN)


@pytest.fixture
def smith_task(conda_image: str) -> Task:
    row = smith_row(
        patch=BUG, FAIL_TO_PASS=["tests/test_core.py::test_add"], PASS_TO_PASS=["tests/test_other.py::test_zero"]
    )
    return replace(task_from_row(row, ORIGIN), image=conda_image)


async def test_an_r2e_agent_finds_its_environment_and_no_tests(pool: SandboxPool, r2e_task: Task) -> None:
    sandbox = await pool.acquire(r2e_task)
    assert await run(sandbox, "command -v python; python -c 'import sys, pytest; print(sys.prefix)'") == (
        "/testbed/.venv/bin/python\n/testbed/.venv\n"
    )
    assert await run(sandbox, "readlink /root/.venv; /root/.venv/bin/python -c 'import pytest'") == "/testbed/.venv\n"
    assert await run(sandbox, "ls -d /r2e_tests r2e_tests run_tests.sh tests/__pycache__ 2>/dev/null || true") == ""
    assert await run(sandbox, "git log --all --oneline | wc -l; git log --all -S 'a + b' -- core.py") == "1\n"
    assert await run(sandbox, "git status --porcelain") == ""


async def test_an_r2e_task_is_graded_with_the_tests_of_its_image(grader: Grader, r2e_task: Task) -> None:
    noop, gold = await grader.grade(r2e_task, b""), await grader.grade(r2e_task, FIX.encode())
    assert (noop.reward, gold.reward) == (0, 1), (noop.reason, gold.reason)


async def test_the_environments_variables_stay_in_a_persistent_shell(pool: SandboxPool, r2e_task: Task) -> None:
    sandbox = await pool.acquire(r2e_task)
    for command in ("export PATH=/mine:$PATH", "true"):
        await sandbox.exec(command, timeout_s=60, persistent=True)
    shown = await sandbox.exec("echo $PATH", timeout_s=60, persistent=True)
    assert shown.text.startswith("/mine:/testbed/.venv/bin:/root/.local/bin:/usr/")
    assert shown.text.count("/testbed/.venv/bin") == 1


async def test_a_swe_bench_agent_has_conda_s_environment(pool: SandboxPool, bench_task: Task) -> None:
    sandbox = await pool.acquire(bench_task)
    assert await run(sandbox, "python -c 'import sys, pytest; print(sys.prefix)'; conda; echo $CONDA_DEFAULT_ENV") == (
        "/opt/miniconda3/envs/testbed\nconda\ntestbed\n"
    )
    assert await run(sandbox, "git log --all --oneline | wc -l; ls") == "1\ncore.py\ntests\n"


async def test_a_swe_bench_task_of_an_older_dataset_is_not_graded(grader: Grader, bench_task: Task) -> None:
    with pytest.raises(DataError, match="task django__django-11099: its row has no `log_parser`, no `eval_script`"):
        await grader.grade(bench_task, FIX.encode())


async def test_a_swe_smith_agent_finds_the_bug_and_not_the_tests_that_show_it(
    pool: SandboxPool, smith_task: Task
) -> None:
    sandbox = await pool.acquire(smith_task)
    assert await run(sandbox, "python -B -c 'from core import add; print(add(2, 1))'") == "1\n"
    assert await run(sandbox, "git ls-files; git status --porcelain") == "core.py\ntests/test_other.py\n"
    assert await run(sandbox, "git log --all --oneline | wc -l; git log --all -S 'a + b'") == "1\n"
    assert await run(sandbox, "find / -xdev -name '*.patch' -newer /etc/hosts 2>/dev/null || true") == ""
    for folder in ("/testbed/.git", "/var/tmp/agent-r3/base.git"):
        objects = await run(sandbox, f"GIT_DIR={folder} git cat-file --batch-all-objects --batch")
        assert "a - b" in objects and "a + b" not in objects
    assert await sandbox.diff() == b""
    await run(sandbox, "sed -i 's/a - b/a + b/' core.py")
    assert (await sandbox.diff()).decode().endswith("-    return a - b\n+    return a + b\n")


async def test_a_swe_smith_task_is_graded_by_the_tests_that_its_row_names(grader: Grader, smith_task: Task) -> None:
    """A test that always fails and is not named changes nothing; a named one that fails does."""
    for patch, reward in ((b"", 0), (smith_task.gold_patch.encode(), 1), (BREAKS_OTHERS.encode(), 0)):
        grade = await grader.grade(smith_task, patch)
        assert grade.reward == reward, grade.reason


async def test_a_bug_that_does_not_apply_makes_the_image_unusable(pool: SandboxPool, smith_task: Task) -> None:
    with pytest.raises(
        DataError, match=r"cannot be used: its bug does not apply: error: core\.py: patch does not apply"
    ):
        await pool.acquire(replace(smith_task, bug_patch=FIX))


async def test_a_warm_sandbox_of_another_bug_is_not_handed_out(smith_task: Task, run_name: str) -> None:
    sound = replace(smith_task, bug_patch="", test_files=())
    async with open_pool(SandboxConfig(warm=1), run=run_name) as pool:
        await pool.prefetch([sound])
        buggy, also_sound = await pool.acquire(smith_task), await pool.acquire(sound)
        assert await run(buggy, "grep return core.py; ls tests") == "    return a - b\ntest_other.py\n"
        assert (
            await run(also_sound, "grep return core.py; ls tests") == "    return a + b\ntest_core.py\ntest_other.py\n"
        )
