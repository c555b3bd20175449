"""Building offline tasks: environments, sources, content addresses, the loud refusal of a task that is not as said."""

import asyncio
import io
import json
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import docker
import pytest

from agent_r3.config import GradingConfig, TasksConfig
from agent_r3.envs.build import build_tasks, canonical, environments
from agent_r3.envs.cache import cache_dir
from agent_r3.envs.commits import is_test_file
from agent_r3.envs.datasets import load_tasks
from agent_r3.envs.grading import Grader
from agent_r3.envs.images import ImageBuilder
from agent_r3.envs.offline import OfflineTask, offline_spec_path, read_spec
from agent_r3.envs.pool import SandboxPool
from agent_r3.envs.sdists import fetch_sdist, unpack
from agent_r3.errors import DataError, UserError
from agent_r3.types import Task
from tests.support.tasks import MISTUNE, PATHSPEC

HANGING = "markdown__3.7"  # its hidden tests never end on Markdown 3.6


def _spec(tmp_path: Path, changed: str, **changes: object) -> Path:
    """The offline task file with one task changed: its environments stay the same ones."""
    tree = json.loads(offline_spec_path("offline").read_text())
    tree["tasks"] = [task | (changes if task["task_id"] == changed else {}) for task in tree["tasks"]]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(tree))
    return path


def _task(task_id: str, pypi: str, *requirements: str) -> OfflineTask:
    entry = json.loads(offline_spec_path("offline").read_text())["tasks"][0]
    return OfflineTask.model_validate(entry | {"task_id": task_id, "pypi": pypi, "requirements": requirements})


def test_tasks_share_one_environment_but_for_those_that_need_another_tasks_project() -> None:
    tasks = [_task("a", "Foo_Bar", "pytest<9"), _task("b", "dotenv", "foo.bar>=1", "pytest<9"), _task("c", "c", "pytz")]
    found = environments(tasks)
    assert found["a"] is found["c"]
    assert (found["a"].requirements, found["a"].projects) == (("pytest<9", "pytz"), ("c", "foo-bar"))
    assert (found["b"].requirements, found["b"].projects) == (("foo.bar>=1", "pytest<9"), ("dotenv",))


def test_the_offline_task_file_holds_33_distinct_well_formed_tasks() -> None:
    tasks = read_spec(offline_spec_path("offline"))
    assert len({task.task_id for task in tasks}) == 33
    for task in tasks:
        assert task.n_tests == sum(task.status_counts.values()), task.task_id
        assert task.f2p and task.src_files and task.test_files and task.problem_statement, task.task_id
        assert not any(is_test_file(path) for path in task.src_files), task.task_id


def test_no_offline_task_runs_where_its_own_fixed_release_could_be_installed_by_name() -> None:
    tasks = read_spec(offline_spec_path("offline"))
    for task_id, environment in environments(tasks).items():
        assert not {canonical(item) for item in environment.requirements} & set(environment.projects), task_id


def test_the_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGENT_R3_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "agent-r3" and cache_dir().is_dir()
    monkeypatch.setenv("AGENT_R3_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"


def test_an_index_that_does_not_answer_is_told_with_the_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENT_R3_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=r"download the sdist of pathspec==0\.12\.1: ") as caught:
        fetch_sdist("pathspec", "0.12.1", "http://127.0.0.1:9/simple")
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "sdists").iterdir()) == []


def test_an_archive_that_leads_out_of_its_folder_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "evil-1.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        entry = tarfile.TarInfo("evil-1/../../escaped.py")
        entry.size = 1
        tar.addfile(entry, io.BytesIO(b"x"))
    (tmp_path / "into").mkdir()
    with pytest.raises(UserError, match=r"unpack evil-1\.tar\.gz"):
        unpack(archive, tmp_path / "into")
    assert not (tmp_path / "escaped.py").exists()


@pytest.mark.docker
async def test_a_second_build_builds_nothing_and_gives_the_same_rows(
    built_tasks: Mapping[str, Task], docker_engine: docker.APIClient, pool: SandboxPool
) -> None:
    before = {image["Id"] for image in docker_engine.images(name="agent-r3/*")}
    stages: list[tuple[str, str]] = []
    again = await build_tasks(
        offline_spec_path("offline"), tuple(built_tasks), ImageBuilder(), pool, lambda *stage: stages.append(stage)
    )
    assert [task.reused for task in again] == [True] * len(built_tasks)
    assert {stage for _, stage in stages} == {"there"}
    assert {image["Id"] for image in docker_engine.images(name="agent-r3/*")} == before
    assert {task.task_id: task.row["docker_image"] for task in again} == {
        task.id: task.image for task in built_tasks.values()
    }


@pytest.mark.docker
def test_built_rows_are_r2e_rows_with_the_facts_of_the_task_file(built_tasks: Mapping[str, Task]) -> None:
    spec = {task.task_id: task for task in read_spec(offline_spec_path("offline"))}
    for task_id, task in built_tasks.items():
        assert len(task.expected) == spec[task_id].n_tests
        assert all(task.expected[name] == "PASSED" for name in spec[task_id].f2p)
        assert task.problem_statement == spec[task_id].problem_statement
        assert [line[6:] for line in task.gold_patch.splitlines() if line.startswith("+++ b/")] == list(
            spec[task_id].src_files
        )
        assert task.hidden_tests_dir is not None and (task.hidden_tests_dir / "test_1.py").is_file()


@pytest.mark.docker
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_tests": 9}, r"gives 8 tests \{'PASSED': 8\}, the task file says 9"),
        ({"f2p": ["TestTocHook.test_nothing"]}, "not passing of f2p: TestTocHook.test_nothing"),
        ({"test_files": ["tests/test_gone.py"]}, r"mistune 3\.1\.1 has no tests/test_gone\.py"),
        (
            {"src_files": ["src/mistune/toc.py", "pyproject.toml"]},
            r"no patch may change pyproject\.toml; see src_files",
        ),
    ],
)
async def test_a_task_that_is_not_as_its_file_says_fails_the_build_and_is_not_kept(
    tmp_path: Path, built_tasks: Mapping[str, Task], pool: SandboxPool, changes: dict[str, object], message: str
) -> None:
    spec = _spec(tmp_path, MISTUNE, **changes)
    with pytest.raises(DataError, match=message):
        await build_tasks(spec, (MISTUNE, PATHSPEC), ImageBuilder(), pool, lambda *_: None)
    with pytest.raises(DataError, match=r"1 of 1 tasks of .* are not built here"):
        load_tasks(TasksConfig(dataset=str(spec), include=(MISTUNE,)))
    # The other task of the same call was built, and the file's rows hold it.
    [task] = load_tasks(TasksConfig(dataset=str(spec), include=(PATHSPEC,)))
    assert task.image == built_tasks[PATHSPEC].image


async def test_an_unknown_task_is_refused_before_anything_is_built(pool: SandboxPool) -> None:
    with pytest.raises(DataError, match="has no task pathspec__0; it has humanize__4"):
        await build_tasks(offline_spec_path("offline"), ("pathspec__0",), ImageBuilder(), pool, lambda *_: None)


@pytest.mark.docker
async def test_a_base_image_that_is_not_there_fails_the_build_with_the_engines_words(
    built_tasks: Mapping[str, Task], pool: SandboxPool
) -> None:
    builder = ImageBuilder("agent-r3-test/never-built:1")
    with pytest.raises(UserError, match=r"build agent-r3/env:\w+"):
        await build_tasks(offline_spec_path("offline"), (PATHSPEC,), builder, pool, lambda *_: None)
    # What an earlier build made is still there.
    assert load_tasks(TasksConfig(dataset="offline", include=(PATHSPEC,)))[0].image == built_tasks[PATHSPEC].image


@pytest.mark.docker
async def test_tests_that_hang_on_the_buggy_release_end_in_a_typed_time_out_and_pass_with_the_fix(
    built_tasks: Mapping[str, Task], pool: SandboxPool
) -> None:
    await build_tasks(offline_spec_path("offline"), (HANGING,), ImageBuilder(), pool, lambda *_: None)
    [task] = load_tasks(TasksConfig(dataset="offline", include=(HANGING,)))
    assert task.test_timeout_s == 30  # as its entry in the task file says
    grader = Grader(pool, GradingConfig(timeout_s=300))
    nothing, gold = await asyncio.gather(
        grader.grade(replace(task, test_timeout_s=8.0), b""), grader.grade(task, task.gold_patch.encode())
    )
    assert (nothing.reward, nothing.outcome, nothing.reason) == (0, "timeout", "exit status 124: timed out after 8 s")
    assert (gold.reward, gold.outcome) == (1, "passed")
