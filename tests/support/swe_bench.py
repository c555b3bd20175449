"""A small SWE-bench: offline tasks as rows of the 5.x schema, and images shaped like the official ones.

An image holds the repository with its history in /testbed, and the environment `testbed` of a stand-in for conda, which
nothing activates but the eval script. That script puts the hidden tests in, between the files of the base commit.
FAIL_TO_PASS and PASS_TO_PASS are what swebench reads in the logs of real runs of nothing and of the gold patch.
"""

import asyncio
import fcntl
import io
import itertools
import json
import os
import shlex
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import pytest

from agent_r3.config import SandboxConfig, TasksConfig
from agent_r3.envs.build import environments
from agent_r3.envs.cache import cache_dir
from agent_r3.envs.datasets import load_tasks
from agent_r3.envs.images import ImageBuilder, digest
from agent_r3.envs.local import open_pool
from agent_r3.envs.offline import OfflineTask, offline_spec_path, read_spec
from agent_r3.envs.rows import Origin, task_from_row
from agent_r3.envs.sdists import configured_index, fetch_sdist, unpack
from agent_r3.envs.swe_grading import grade_swe_bench
from agent_r3.envs.swe_harness import load_harness, spec_of
from agent_r3.types import Task

IDS = (
    "humanize__4.12.1",
    "humanize__4.12.3",
    "pathspec__0.12.1",
    "mistune__3.1.1",
    "cachetools__5.5.0",
    "markdown__3.8__smarty",
    "sqlparse__0.5.2",
    "boltons__24.1.0",
)
DIFFICULTIES = ("<15 min fix", "15 min - 1 hour", "1-4 hours")

_CONDA = "/opt/miniconda3"
# What conda's `activate` does: base becomes active, and there is a function that activates others in its place.
_ACTIVATE = f"""
conda() {{
    [ "$1" = activate ] || return 1
    [ -z "${{CONDA_PREFIX-}}" ] || PATH=${{PATH#"$CONDA_PREFIX/bin:"}}
    CONDA_PREFIX={_CONDA}${{2:+/envs/$2}}
    CONDA_DEFAULT_ENV=${{2:-base}} CONDA_SHLVL=$((${{CONDA_SHLVL:-0}} + 1)) PATH=$CONDA_PREFIX/bin:$PATH
    export CONDA_PREFIX CONDA_DEFAULT_ENV CONDA_SHLVL PATH
}}
conda activate
"""
_CONDA_IMAGE = f"""
FROM {{environment}}
COPY activate {_CONDA}/bin/activate
RUN mkdir -p {_CONDA}/envs && mv /testbed/.venv {_CONDA}/envs/testbed && cd {_CONDA}/envs/testbed \\
 && grep -lrI /testbed/.venv bin | xargs sed -i 's|/testbed/.venv|{_CONDA}/envs/testbed|g' \\
 && printf '/testbed\\n/testbed/src\\n' >$(echo lib/python3*/site-packages)/testbed.pth
ENV VIRTUAL_ENV= PYTHONPATH= PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
"""
_TASK_IMAGE = "FROM {conda}\nCOPY repo/ /testbed/\nWORKDIR /testbed/\n"

_EVAL_SCRIPT = """#!/bin/bash
set -uxo pipefail
source /opt/miniconda3/bin/activate
conda activate testbed
cd /testbed
git config --global --add safe.directory /testbed
cd /testbed
git status
git show
git -c core.fileMode=false diff {base}
source /opt/miniconda3/bin/activate
conda activate testbed
git checkout {base} {old_tests}
git apply -v - <<'EOF_114329324912'
{test_patch}
EOF_114329324912
: '>>>>> Start Test Output'
python -m pytest -rA --color=no -p no:cacheprovider {tests}
: '>>>>> End Test Output'
git checkout {base} {old_tests}
"""


@dataclass(frozen=True, slots=True)
class SweBenchDataset:
    """`path` is a .jsonl file of the rows, as `--dataset` and `swebench eval` take it."""

    path: Path
    rows: tuple[dict[str, Any], ...]
    tasks: Mapping[str, Task]

    def gold(self, instance_id: str) -> str:
        return self.tasks[instance_id].gold_patch


@pytest.fixture(scope="session")
def swe_bench_dataset(docker_engine: docker.APIClient, tmp_path_factory: pytest.TempPathFactory) -> SweBenchDataset:
    """Built in the user's cache, so only the first session pays."""
    folder = cache_dir() / "swe-bench-test"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rows = _build(folder, IDS)
    path = tmp_path_factory.mktemp("swe-bench") / "verified.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = {task.id: task for task in load_tasks(TasksConfig(dataset=str(path)))}
    return SweBenchDataset(path, tuple(rows), tasks)


def write_predictions(path: Path, patches: Mapping[str, str], model: str = "model") -> Path:
    """A file as `swebench eval -p` takes it."""
    lines = (
        json.dumps({"instance_id": instance, "model_name_or_path": model, "model_patch": patch})
        for instance, patch in patches.items()
    )
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def _build(folder: Path, ids: Sequence[str]) -> list[dict[str, Any]]:
    offline = {task.task_id: task for task in read_spec(offline_spec_path("offline"))}
    environment = environments(list(offline.values()))[ids[0]]
    builder = ImageBuilder()
    facts = Path(__file__).read_text(), builder.env_tag(environment)
    known = {name: folder / f"{name}-{digest(*facts, offline[name].model_dump())}.json" for name in ids}
    missing = [name for name, path in known.items() if not _is_there(builder, path)]
    if missing:
        index = configured_index()
        builder.env(environment, index)
        conda = _conda_image(builder, builder.env_tag(environment))
        with ThreadPoolExecutor(4) as threads:
            drafts = list(threads.map(lambda name: _draft(builder, conda, offline[name], index), missing))
        for name, row in zip(missing, asyncio.run(_with_tests(drafts)), strict=True):
            known[name].write_text(json.dumps(row))
    rows = [json.loads(path.read_text()) for path in known.values()]
    return [row | {"difficulty": level} for row, level in zip(rows, itertools.cycle(DIFFICULTIES), strict=False)]


def _is_there(builder: ImageBuilder, path: Path) -> bool:
    return path.exists() and builder.has(json.loads(path.read_text())["image"])


def _conda_image(builder: ImageBuilder, environment: str) -> str:
    dockerfile = _CONDA_IMAGE.format(environment=environment)
    tag = f"agent-r3-test/swe-conda:{digest(dockerfile, _ACTIVATE)}"
    if not builder.has(tag):
        _build_image(builder.api, tag, {"Dockerfile": dockerfile, "activate": _ACTIVATE})
    return tag


def _draft(builder: ImageBuilder, conda: str, task: OfflineTask, index: str | None) -> dict[str, Any]:
    """The row without FAIL_TO_PASS and PASS_TO_PASS; its image is built."""
    with tempfile.TemporaryDirectory() as scratch:
        trees = []
        for version in (task.version_with_bug, task.version_fixed):
            into = Path(scratch) / version
            into.mkdir()
            trees.append(unpack(fetch_sdist(task.pypi, version, index), into))
        repo, fixed = trees
        base = _commit(repo)
        hidden = [name for name in (*task.test_files, *task.support) if (fixed / name).is_file()]
        gold, tests = (_diff(repo, fixed, names) for names in (task.src_files, hidden))
        old_tests = _git(repo, "ls-files", *hidden).split()
        dockerfile = _TASK_IMAGE.format(conda=conda)
        name = task.task_id.replace("__", "_1776_")
        image = f"agent-r3-test/sweb.eval.x86_64.{name}:{digest(dockerfile, base)}"
        if not builder.has(image):
            _build_image(builder.api, image, {"Dockerfile": dockerfile}, repo)
    project = task.pypi.lower()
    return {
        "instance_id": task.task_id,
        "repo": f"{project}/{project}",
        "base_commit": base,
        "patch": gold,
        "test_patch": tests,
        "problem_statement": task.problem_statement,
        "hints_text": "",
        "created_at": "2025-01-01T00:00:00Z",
        "version": task.version_fixed,
        "environment_setup_commit": base,
        "image": image,
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
        "eval_script": _EVAL_SCRIPT.format(
            base=base,
            old_tests=shlex.join(old_tests),
            test_patch=tests.rstrip("\n"),
            tests=shlex.join(task.test_files),
        ),
    }


def _git(repo: Path, *arguments: str) -> str:
    date = "2000-01-01T00:00:00Z"
    own = {"HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1", "GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
    identity = ("-c", "user.name=base", "-c", "user.email=base@localhost")
    return subprocess.check_output(["git", *identity, *arguments], cwd=repo, text=True, env=os.environ | own)


def _commit(repo: Path) -> str:
    """Two commits, of which the second is the base; its hash depends on the content alone."""
    _git(repo, "init", "-q", "-b", "main", ".")
    _git(repo, "add", "-A", "-f", ".")
    _git(repo, "commit", "-q", "-m", "Begin")
    _git(repo, "commit", "-q", "--allow-empty", "-m", "Base")
    return _git(repo, "rev-parse", "HEAD").strip()


def _diff(repo: Path, fixed: Path, names: Sequence[str]) -> str:
    """git's diff from the base to the fixed release, of these files. The repository is left as it was."""
    for name in names:
        (repo / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(fixed / name, repo / name)
    _git(repo, "add", "-A", "-f", "--", *names)
    patch = _git(repo, "diff", "--cached", "--no-renames")
    _git(repo, "reset", "-q", "--hard")
    return patch


async def _with_tests(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run nothing and gold, and say which tests the gold patch mends and which it must not break."""
    places = asyncio.Semaphore(3)

    async def statuses(task: Task, patch: str) -> dict[str, str]:
        async with places:
            grade = await grade_swe_bench(lambda: pool.acquire_for_grading(task), task, patch.encode(), 120)
        with tempfile.NamedTemporaryFile() as file:
            file.write(grade.log)
            file.flush()
            found, read = load_harness().grading.get_logs_eval(spec_of(task), file.name)
        assert read, f"{task.id}: {grade.reason}: {grade.log[-2000:].decode()}"
        return dict(found)

    async def one(row: dict[str, Any]) -> dict[str, Any]:
        task = task_from_row(row | {"FAIL_TO_PASS": ["draft"], "PASS_TO_PASS": []}, Origin(row["instance_id"], 1))
        before, after = await asyncio.gather(statuses(task, ""), statuses(task, row["patch"]))
        passing = [name for name, status in after.items() if status == "PASSED"]
        mended = [name for name in passing if before.get(name) != "PASSED"]
        assert mended, f"{task.id}: its gold patch mends no test"
        kept = [name for name in passing if name not in mended]
        return row | {"FAIL_TO_PASS": json.dumps(mended), "PASS_TO_PASS": json.dumps(kept)}

    async with open_pool(SandboxConfig(), run="swe-bench-test") as pool:
        return list(await asyncio.gather(*map(one, rows)))


def _build_image(api: docker.APIClient, tag: str, files: Mapping[str, str], repo: Path | None = None) -> None:
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as tar:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text.encode())
            tar.addfile(entry, io.BytesIO(text.encode()))
        if repo is not None:
            tar.add(repo, arcname="repo", filter=_as_root)
    context.seek(0)
    options = {"network_mode": "none", "rm": True, "forcerm": True}
    log = list(api.build(fileobj=context, custom_context=True, tag=tag, decode=True, **options))
    assert not any("error" in event for event in log), log[-3:]


def _as_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    return entry
