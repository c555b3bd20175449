"""Offline tasks: what a task file says, and where its built rows are. `envs/build.py` builds them."""

import hashlib
import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agent_r3.envs.cache import cache_dir
from agent_r3.errors import DataError, boundary

# TZ, hash seed and locale are fixed and plugins are off, so that a test's status and its name depend on the code alone.
TEST_COMMAND = (
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 TZ=UTC LC_ALL=C.UTF-8 PYTHONHASHSEED=0 COLUMNS=200 PYTHONDONTWRITEBYTECODE=1 "
    "PYTHONPATH=.:src PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' "
    ".venv/bin/python -W ignore -m pytest -rA --color=no -p no:cacheprovider r2e_tests"
)


class OfflineTask(BaseModel):
    """One task of a task file: two releases of a project and what is known of the difference."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)

    task_id: str
    """Names the task; `<project>__<fixed version>` by custom."""
    pypi: str
    """Project on the package index."""
    version_with_bug: str
    """Release that is the agent's repository."""
    version_fixed: str
    """Next release: gold patch and hidden tests."""
    problem_statement: str
    """What the agent is told."""
    src_files: tuple[str, ...]
    """Files the gold patch takes from the fixed release."""
    test_files: tuple[str, ...]
    """Hidden tests, copied flat to r2e_tests/test_1.py, test_2.py, ..."""
    support: tuple[str, ...] = ()
    """Files and folders of the fixed release that stand beside the hidden tests."""
    requirements: tuple[str, ...]
    """What the environment needs, pytest included."""
    n_tests: int
    """Tests that the fixed release reports."""
    f2p: tuple[str, ...]
    """Tests that fail before the fix and pass after it."""
    status_counts: dict[str, int]
    """Statuses that the fixed release reports."""
    test_timeout_s: float | None = Field(default=None, gt=0)
    """Wall time of its tests, in place of `grading.timeout_s`: short for a task whose buggy release hangs."""


def offline_spec_path(source: str) -> Path:
    """`offline` is the task file of this package; anything else is a path."""
    return Path(__file__).parent / "offline_tasks.json" if source == "offline" else Path(source)


def is_offline_spec(path: Path) -> bool:
    """Whether a file is a task file (releases to build) and not a dataset of rows."""
    if path.suffix != ".json":
        return False
    tree = _read(path)
    return isinstance(tree, dict) and isinstance(tree.get("tasks"), list)


def read_spec(path: Path) -> list[OfflineTask]:
    """Raises DataError that names the file, the task and the key."""
    tree = _read(path)
    if not isinstance(tree, dict) or not isinstance(tree.get("tasks"), list):
        raise DataError(f"{path}: a task file holds an object with a list `tasks`")
    tasks: dict[str, OfflineTask] = {}
    for number, entry in enumerate(tree["tasks"], start=1):
        try:
            task = OfflineTask.model_validate(entry)
        except ValidationError as exc:
            problems = "; ".join(f"`{'.'.join(map(str, e['loc']))}`: {e['msg']}" for e in exc.errors())
            raise DataError(f"{path}: task {number}: {problems}") from exc
        if task.task_id in tasks:
            raise DataError(f"{path}: task {number}: task_id {task.task_id} stands in it twice")
        tasks[task.task_id] = task
    return list(tasks.values())


def rows_dir() -> Path:
    """Folder of the built rows; their `hidden_tests_dir` is relative to it."""
    folder = cache_dir() / "datasets"
    folder.mkdir(exist_ok=True)
    return folder


def rows_path(path: Path) -> Path:
    """Where the rows of this content of the task file are written."""
    with boundary(DataError, f"read {path}", OSError):
        content = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    return rows_dir() / f"{path.stem}-{content}.jsonl"


def built_rows(path: Path) -> Path:
    """The file of built rows. Raises DataError when the task file, as it is now, was not built."""
    rows = rows_path(path)
    if not rows.is_file():
        source = "offline" if path == offline_spec_path("offline") else str(path)
        raise DataError(f"the tasks of `{source}` are not built here; run `agent-r3 tasks build {source}`")
    return rows


def _read(path: Path) -> object:
    with boundary(DataError, f"read {path} as JSON", json.JSONDecodeError, UnicodeDecodeError, OSError):
        return json.loads(path.read_text(encoding="utf-8"))
