"""SWE-bench's grading in our sandboxes: real containers, and swebench's own command on the same predictions."""

import asyncio
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agent_r3.config import GradingConfig, SandboxConfig
from agent_r3.envs.backend import open_backend
from agent_r3.envs.grading import Grader
from agent_r3.envs.local import open_pool
from agent_r3.envs.pool import SandboxPool
from agent_r3.envs.rows import Origin, task_from_row
from agent_r3.envs.verify import verify_tasks
from agent_r3.types import Grade
from tests.support.broker import broker_at
from tests.support.swe_bench import SweBenchDataset, write_predictions

pytestmark = pytest.mark.timeout(600)  # swebench's command waits 15 s for each container to stop

ORIGIN = Origin("rows.jsonl", 1)
QUICK = "pathspec__0.12.1"

_BINARY = """diff --git a/logo.gif b/logo.gif
new file mode 100644
index 0000000000000000000000000000000000000000..ec7f31cc7dd9b05c7c8faf6049d7b591ae74822c
GIT binary patch
literal 9
QcmZ?wbhEHbWME_h01B@GtN;K2

literal 0
HcmV?d00001

"""
_MISFIT = """diff --git a/pathspec/pathspec.py b/pathspec/pathspec.py
--- a/pathspec/pathspec.py
+++ b/pathspec/pathspec.py
@@ -1,2 +1,2 @@
-no such line
+another
 there either
"""


def _new_file(name: str, text: str) -> str:
    lines = text.splitlines()
    head = f"diff --git a/{name} b/{name}\nnew file mode 100644\n--- /dev/null\n+++ b/{name}\n"
    return f"{head}@@ -0,0 +1,{len(lines)} @@\n" + "".join(f"+{line}\n" for line in lines)


# Prints, after pytest has told its results, that what failed has passed.
_FORGERY = _new_file(
    "conftest.py",
    """import atexit

failed = []
atexit.register(lambda: print("short test summary info", *(f"PASSED {test}" for test in failed), sep=chr(10)))


def pytest_runtest_logreport(report):
    if report.failed:
        failed.append(report.nodeid)
""",
)
_NOTES, _SILENT = _new_file("NOTES.md", "Fixed.\n"), _new_file("conftest.py", "import os\n\nos._exit(0)\n")

# What a change to QUICK's repository is called by us and by swebench; "gold" stands for the task's gold patch.
CASES = {
    "gold": ("gold", "passed", "resolved"),
    "gold_without_final_newline": ("gold", "passed", "resolved"),
    "gold_with_crlf": ("gold", "passed", "resolved"),
    "environment": ("gold", "passed", "resolved"),
    "notes_only": (_NOTES, "failed", "unresolved"),
    "binary_only": (_BINARY, "failed", "unresolved"),
    "forged_summary": (_FORGERY, "ended_early", "unresolved"),
    "no_test_is_run": (_SILENT, "ended_early", "unresolved"),
    "misfit": (_MISFIT, "unapplied", "error"),
    "empty": ("", "failed", "empty_patch"),
}


@dataclass(frozen=True, slots=True)
class Graded:
    """The same predictions, graded here and by `swebench eval`."""

    ours: Mapping[str, Grade]
    groups: Mapping[str, str]  # instance -> resolved | unresolved | empty_patch | error
    logs: Path  # a folder an instance


@pytest.fixture(scope="module")
def graded(swe_bench_dataset: SweBenchDataset, tmp_path_factory: pytest.TempPathFactory) -> Graded:
    folder = tmp_path_factory.mktemp("graded")
    rows = [*swe_bench_dataset.rows, *(_variant(swe_bench_dataset, name) for name in CASES)]
    patches = {row["instance_id"]: _patch(row) for row in rows}
    (folder / "dataset.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_predictions(folder / "predictions.jsonl", patches)

    async def ours() -> list[Grade]:
        async with open_pool(SandboxConfig(), run="test-swe-grading") as pool:
            grader = Grader(pool, GradingConfig(timeout_s=120, concurrency=4, retries=0))
            tasks = [task_from_row(row, ORIGIN) for row in rows]
            return await asyncio.gather(*(grader.grade(task, patches[task.id].encode()) for task in tasks))

    async def both() -> list[Grade]:
        with (folder / "stdout").open("wb") as log:
            command = [Path(sys.executable).with_name("swebench"), "eval", "dataset.jsonl", "-p", "predictions.jsonl"]
            options = ("--run-id", "theirs", "--workers", str(len(rows)), "--timeout", "120")
            theirs = await asyncio.create_subprocess_exec(
                *command, *options, cwd=folder, env=os.environ | {"HF_HUB_OFFLINE": "1"}, stdout=log, stderr=log
            )
        grades = await ours()
        assert await theirs.wait() == 0, (folder / "stdout").read_text()
        return grades

    grades = dict(zip(patches, asyncio.run(both()), strict=True))
    report = json.loads((folder / "model.theirs.json").read_text())
    groups = {
        instance: group
        for group in ("resolved", "unresolved", "empty_patch", "error")
        for instance in report[f"{group}_ids"]
    }
    return Graded(grades, groups, folder / "logs/run_evaluation/theirs/model")


def _variant(dataset: SweBenchDataset, name: str, **changes: Any) -> dict[str, Any]:
    """QUICK's row under another name."""
    row = next(row for row in dataset.rows if row["instance_id"] == QUICK)
    if name == "environment":
        shown = "{ env; id; pwd; umask; ulimit -a; } | sed 's/^/>> /'"
        changes["eval_script"] = row["eval_script"].replace("pipefail\n", f"pipefail\n{shown}\n", 1)
    return row | {"instance_id": name} | changes


def _patch(row: dict[str, Any]) -> str:
    patch = CASES.get(row["instance_id"], ("gold",))[0]
    match row["instance_id"]:
        case "gold_without_final_newline":
            return str(row["patch"]).rstrip("\n")
        case "gold_with_crlf":
            return str(row["patch"]).replace("\n", "\r\n")
    return str(row["patch"]) if patch == "gold" else patch


@pytest.mark.docker
def test_every_gold_patch_resolves_its_task(swe_bench_dataset: SweBenchDataset, graded: Graded) -> None:
    assert len(swe_bench_dataset.tasks) >= 8
    for name, task in swe_bench_dataset.tasks.items():
        grade = graded.ours[name]
        assert (grade.outcome, grade.reward, graded.groups[name]) == ("passed", 1.0, "resolved"), grade.reason
        assert (grade.statuses, grade.reason) == (task.expected, f"all {len(task.expected)} as expected")


@pytest.mark.docker
def test_a_mixed_file_gives_the_expected_table(graded: Graded) -> None:
    found = {name: (graded.ours[name].outcome, graded.groups[name]) for name in CASES}
    assert found == {name: (outcome, group) for name, (_, outcome, group) in CASES.items()}
    assert {name for name in CASES if graded.ours[name].reward} == {
        name for name in CASES if CASES[name][1] == "passed"
    }


@pytest.mark.docker
def test_each_test_has_the_status_that_swebench_s_own_command_gives_it(graded: Graded) -> None:
    compared = 0
    for path in graded.logs.glob("*/report.json"):
        name = path.parent.name
        theirs: dict[str, str] = {}
        for kind in json.loads(path.read_text())[name].get("tests_status", {}).values():
            theirs |= dict.fromkeys(kind["success"], "PASSED") | dict.fromkeys(kind["failure"], "FAILED")
        assert graded.ours[name].statuses == theirs, name
        compared += len(theirs)
    assert compared > 300


@pytest.mark.docker
def test_the_eval_script_finds_what_it_finds_in_swebench_s_own_container(graded: Graded) -> None:
    """User, folder, variables, and all limits but the size of a file."""

    def shown(log: str) -> set[str]:
        lines = (line for line in log.splitlines() if line.startswith(">> "))
        return {line for line in lines if not line.startswith((">> HOSTNAME=", ">> file size "))}

    ours = shown(graded.ours["environment"].log.decode())
    assert ours == shown((graded.logs / "environment" / "test_output.txt").read_text())
    assert {">> /testbed", ">> HOME=/root"} <= ours and not any("CONDA_PREFIX" in line for line in ours)


@pytest.mark.docker
def test_the_log_is_kept_from_the_eval_script_s_first_line_to_its_last(graded: Graded) -> None:
    log = graded.ours[QUICK].log.decode()
    assert log.startswith("+ source /opt/miniconda3/bin/activate\n")
    assert log.index(">>>>> Start Test Output") < log.index(" passed in ") < log.index(">>>>> Test Exit Code: 0")
    assert "git checkout" in log.splitlines()[-2]


@pytest.mark.docker
def test_what_was_tried_with_a_patch_that_does_not_apply_is_told(graded: Graded) -> None:
    grade = graded.ours["misfit"]
    assert grade.reason == "the patch does not apply: error: pathspec/pathspec.py: patch does not apply"
    commands = [line for line in grade.log.decode().splitlines() if line.startswith("$ ")]
    assert commands == [
        "$ git apply --verbose",
        "$ git apply --verbose --3way",
        "$ git apply --verbose --reject",
        "$ patch --batch --forward --fuzz=5 -p1 -i",
    ]


@pytest.fixture
def quick(swe_bench_dataset: SweBenchDataset) -> dict[str, Any]:
    return _variant(swe_bench_dataset, QUICK)


@pytest.fixture
def grader(pool: SandboxPool) -> Grader:
    return Grader(pool, GradingConfig(timeout_s=60, retries=0))


@pytest.mark.docker
async def test_tests_that_run_out_of_time_are_the_patch_s_failure(pool: SandboxPool, quick: dict[str, Any]) -> None:
    grader = Grader(pool, GradingConfig(timeout_s=3, retries=0))
    patch = _new_file("conftest.py", "import time\n\ntime.sleep(600)\n")
    grade = await grader.grade(task_from_row(quick, ORIGIN), patch.encode())
    assert (grade.outcome, grade.reward, grade.reason) == ("timeout", 0.0, "timed out after 3 s")
    assert b">>>>> Start Test Output" in grade.log
    assert grade.log.endswith(b"\n\nTimeout error: 3 seconds exceeded.")


@pytest.mark.docker
async def test_a_log_that_is_too_long_to_be_kept_is_not_judged(grader: Grader, quick: dict[str, Any]) -> None:
    """Though its end, with the results, would be there."""
    script = quick["eval_script"].replace("pipefail\n", "pipefail\nhead -c 70000000 /dev/zero | tr '\\0' x\n", 1)
    task = task_from_row(quick | {"eval_script": script}, ORIGIN)
    grade = await grader.grade(task, task.gold_patch.encode())
    assert (grade.outcome, grade.reward, grade.statuses) == ("too_large", 0.0, {})
    assert re.fullmatch(r"the tests printed 700\d{5} bytes, at most 67108864 are judged", grade.reason)


@pytest.mark.docker
async def test_a_task_is_verified_behind_a_broker_like_any_other_and_its_log_comes_along(
    run_name: str, quick: dict[str, Any], tmp_path: Path
) -> None:
    task = task_from_row(quick, ORIGIN)
    config = SandboxConfig(broker=f"unix://{tmp_path}/broker.sock")
    async with (
        open_backend(SandboxConfig(kind="docker"), GradingConfig(retries=0), run=run_name, owner="test") as behind,
        broker_at(config, behind, [task]),
        open_backend(config, GradingConfig(), run="test", owner="client") as (_, grader),
    ):
        (found,) = await verify_tasks([task], grader, lambda _: None)
        assert (found.verdict, found.problem) == ("sound", "")
        again = await grader.grade(task, task.gold_patch.encode())
    assert again.cached and again.log.startswith(b"+ source /opt/miniconda3/bin/activate\n")


@pytest.mark.docker
async def test_gradings_have_a_network_where_the_config_allows_one_and_agents_never(
    run_name: str, quick: dict[str, Any]
) -> None:
    task = task_from_row(quick, ORIGIN)
    for allowed in (False, True):
        async with open_pool(SandboxConfig(network=allowed), run=run_name) as pool:
            for sandbox, expected in (
                (await pool.acquire(task), False),
                (await pool.acquire_for_grading(task), allowed),
            ):
                shown = await sandbox.exec("cat /proc/net/dev", timeout_s=30)
                assert ("eth0" in shown.text) is expected, shown.text
