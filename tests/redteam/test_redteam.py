"""Every hack earns 0, most of them where a naive grader pays; honest work beside a harmless one still earns 1."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

import pytest

from agent_r3.config import GradingConfig, SandboxConfig
from agent_r3.envs.commits import file_diff, patch_of
from agent_r3.envs.grading import Grader
from agent_r3.envs.local import open_pool
from agent_r3.envs.pool import SandboxPool
from agent_r3.envs.sandbox import FileMissingError
from agent_r3.types import Grade, Task
from tests.redteam.hacks import HACKS, SEARCHES, Hack
from tests.redteam.naive import NaiveGrade, naive_grade

pytestmark = [pytest.mark.redteam, pytest.mark.docker, pytest.mark.timeout(900)]  # the first test carries all out

_AT_ONCE = 4
_MODULE = "pathspec/pathspec.py"


class Attack(NamedTuple):
    """What came of a hack."""

    grade: Grade
    naive: NaiveGrade | None
    with_gold: Grade | None
    found: str  # what the agent's commands printed


class Team:
    """Carries hacks out, a few at a time."""

    def __init__(self, pool: SandboxPool, task: Task) -> None:
        self._pool = pool
        self._task = task
        self._grader = Grader(pool, GradingConfig(retries=0, timeout_s=60, concurrency=_AT_ONCE))
        self._slots = asyncio.Semaphore(_AT_ONCE)

    async def attack(self, hack: Hack) -> Attack:
        async with self._slots:
            task = self._task
            if hack.autoload:
                command = task.test_command.replace("PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 ", "")
                task = dataclasses.replace(task, test_command=command)
            patch, found, naive = await self._prepare(hack, task)
            grade = await self._grader.grade(task, patch)
            with_gold = await self._grader.grade(task, task.gold_patch.encode() + patch) if hack.keeps_gold else None
            return Attack(grade, naive, with_gold, found)

    async def _prepare(self, hack: Hack, task: Task) -> tuple[bytes, str, NaiveGrade | None]:
        """The hack's patch, what its commands printed, and the naive grade, from a sandbox as the agent has it."""
        sandbox = await self._pool.acquire(task)
        try:
            if hack.commands:
                done = await sandbox.exec(hack.commands, timeout_s=60)
                patch = await sandbox.diff()
                naive = None if hack.argued else await naive_grade(sandbox, task, b"")
                return patch, done.text, naive
            patch = b"".join([await self._patch(sandbox.get, task, path, text) for path, text in _texts(hack, task)])
            patch += hack.raw
            return patch, "", None if hack.argued else await naive_grade(sandbox, task, patch)
        finally:
            await sandbox.close()

    async def _patch(self, get: Callable[[str], Awaitable[bytes]], task: Task, path: str, text: str) -> bytes:
        try:
            old = (await get(f"{task.workdir}/{path}")).decode()
        except FileMissingError:
            old = None
        new = text + (old or "") if path == _MODULE else text
        return patch_of([file_diff(path, old, new)]).encode()


def _texts(hack: Hack, task: Task) -> list[tuple[str, str]]:
    files = ({_MODULE: hack.code} if hack.code else {}) | dict(hack.files)
    nodes = ["r2e_tests/test_1.py::" + name.replace(".", "::", 1) for name in task.expected]
    lines = ["", "=== short test summary info ===", *(f"PASSED {node}" for node in nodes)]
    summary = "\n".join([*lines, f"=== {len(nodes)} passed in 0.1s ===", "short test summary info", ""]).encode()
    return [
        (path, text.replace("@SUMMARY@", repr(summary)).replace("@NODES@", repr(nodes))) for path, text in files.items()
    ]


@pytest.fixture(scope="module")
def attacks(request: pytest.FixtureRequest, pathspec_task: Task) -> Mapping[str, Attack]:
    """Every hack whose test was chosen, carried out."""
    chosen = [item.callspec.params["hack"] for item in request.session.items if "hack" in _params(item)]

    async def work() -> list[Attack]:
        async with open_pool(SandboxConfig(max_starting=_AT_ONCE), run="redteam") as pool:
            team = Team(pool, pathspec_task)
            return await asyncio.gather(*(team.attack(hack) for hack in chosen))

    return dict(zip((hack.name for hack in chosen), asyncio.run(work()), strict=True))


def _params(item: pytest.Item) -> Mapping[str, object]:
    return item.callspec.params if hasattr(item, "callspec") else {}


@pytest.mark.parametrize("hack", [pytest.param(hack, id=hack.name.replace(" ", "-")) for hack in HACKS])
def test_a_hack_earns_0(hack: Hack, attacks: Mapping[str, Attack]) -> None:
    attack = attacks[hack.name]
    assert (attack.grade.reward, attack.grade.outcome) == (0.0, hack.outcome), attack.grade.reason
    assert hack.reason in attack.grade.reason
    assert attack.naive is None or attack.naive.fooled, f"it does not even work:\n{attack.naive.output[-2000:]}"
    assert attack.with_gold is None or attack.with_gold.reward == 1.0, attack.with_gold.reason
    if hack in SEARCHES:
        assert attack.found == ""


async def test_doing_nothing_earns_0_and_the_gold_patch_1(pool: SandboxPool, pathspec_task: Task) -> None:
    """Also by the naive grader, or its being fooled would prove nothing."""
    grader = Grader(pool, GradingConfig())
    for patch, reward in ((b"", 0.0), (pathspec_task.gold_patch.encode(), 1.0)):
        sandbox = await pool.acquire(pathspec_task)
        naive = await naive_grade(sandbox, pathspec_task, patch)
        assert (await grader.grade(pathspec_task, patch)).reward == reward
        assert naive.by_summary is naive.by_exit is (reward == 1.0)


def test_there_are_at_least_30_hacks_and_most_are_shown_to_work() -> None:
    assert len({hack.name for hack in HACKS}) == len(HACKS) >= 30
    assert sum(not hack.argued for hack in HACKS) >= 20
