"""Is a dataset sound? Doing nothing must give 0 and the gold patch 1, every time, in reasonable time.

Verdicts are appended to a file as they come, so that a dataset of thousands is checked in several goes, and
`tasks.verified` of a training config leaves out what it does not call sound.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from agent_r3 import journal
from agent_r3.envs.sandbox import Grading
from agent_r3.errors import DataError, InfraError
from agent_r3.types import Grade, Task

GoldOf = Callable[[Task], Awaitable[bytes]]
Verdict = Literal["sound", "flaky", "slow", "broken", "ungraded"]

VERDICTS: dict[Verdict, str] = {
    "sound": "nothing gives 0 and gold 1, each time",
    "flaky": "runs of the same patch disagree",
    "slow": "sound, but a run takes longer than --slow",
    "broken": "nothing earns the reward, or gold does not",
    "ungraded": "infrastructure failed; not a verdict on the task",
}


@dataclass(frozen=True, slots=True)
class Run:
    """One grading of one patch."""

    reward: float
    reason: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Verification:
    """What the runs say of one task. `image` is what was run: another one was not verified."""

    task_id: str
    image: str
    verdict: Verdict
    problem: str  # empty for a sound one
    noop: tuple[Run, ...] = ()
    gold: tuple[Run, ...] = ()


_LINE = TypeAdapter(Verification)


async def verify_tasks(
    tasks: Sequence[Task],
    grader: Grading,
    on_done: Callable[[Verification], None],
    *,
    times: int = 1,
    slow_s: float = float("inf"),
    at_once: int = 4,
    gold_of: GoldOf | None = None,
) -> list[Verification]:
    """Grade nothing and gold `times` times each, `at_once` tasks together; verifications in the tasks' order.

    `gold_of` gives a task's gold patch, by default that of its row; a DataError of it means a broken task.
    The grader must not reuse grades: repetition is what shows a flaky test.
    """
    places = asyncio.Semaphore(at_once)

    async def one(task: Task) -> Verification:
        async with places:
            verification = await _verify(task, grader, times, slow_s, gold_of or _gold_of_row)
        on_done(verification)
        return verification

    return list(await asyncio.gather(*(one(task) for task in tasks)))


async def _verify(task: Task, grader: Grading, times: int, slow_s: float, gold_of: GoldOf) -> Verification:
    async def grades(patch: bytes) -> list[Grade]:
        return [await grader.grade(task, patch) for _ in range(times)]

    try:
        patch = await gold_of(task)
        noop, gold = await asyncio.gather(grades(b""), grades(patch) if patch else _none())
    except DataError as exc:
        return Verification(task.id, task.image, "broken", str(exc))
    except InfraError as exc:
        return Verification(task.id, task.image, "ungraded", str(exc))
    verdict, problem = judge(noop, gold, slow_s)
    return Verification(task.id, task.image, verdict, problem, tuple(map(_run, noop)), tuple(map(_run, gold)))


def judge(noop: Sequence[Grade], gold: Sequence[Grade], slow_s: float) -> tuple[Verdict, str]:
    """The verdict on a task and what is wrong with it. Pure; `gold` is empty for a row without a gold patch."""
    for name, grades in (("doing nothing", noop), ("the gold patch", gold)):
        if unsteady := _unsteady(grades):
            return "flaky", f"{len(grades)} runs of {name} disagree: {unsteady}"
    problems = []
    if any(grade.reward != 0 for grade in noop):
        problems.append("doing nothing earns the reward")
    if not gold:
        problems.append("its row has no gold patch that text can say")
    elif any(grade.reward != 1 for grade in gold):
        problems.append(f"the gold patch does not earn it: {gold[0].reason}")
    if problems:
        return "broken", "; ".join(problems)
    longest = max(grade.seconds for grade in (*noop, *gold))
    if longest > slow_s:
        return "slow", f"a run took {longest:.1f} s, more than {slow_s:g} s"
    return "sound", ""


def _unsteady(grades: Sequence[Grade]) -> str:
    """Which tests changed their status from run to run, or that the reward did; empty when nothing did."""
    names = {name for grade in grades for name in grade.statuses}
    changing = sorted(name for name in names if len({grade.statuses.get(name) for grade in grades}) > 1)
    if changing:
        return ", ".join(changing[:3]) + (", ..." if len(changing) > 3 else "")
    rewards = {grade.reward for grade in grades}
    return f"rewards {', '.join(f'{reward:g}' for reward in sorted(rewards))}" if len(rewards) > 1 else ""


async def _gold_of_row(task: Task) -> bytes:
    return task.gold_patch.encode()


async def _none() -> list[Grade]:
    return []


def _run(grade: Grade) -> Run:
    return Run(grade.reward, grade.reason, round(grade.seconds, 3))


def append_verification(path: Path, verification: Verification) -> None:
    """One more line of the file, on disk when this returns."""
    journal.append(path, asdict(verification))


def read_verifications(path: Path) -> dict[str, Verification]:
    """The last verification of each task id.

    Raises DataError for a file that is not there or is not of `agent-r3 tasks verify --out`.
    """
    if not path.exists():
        raise DataError(f"read {path}: there is no such file; `agent-r3 tasks verify --out` writes it")
    lines = journal.read(path, _LINE, "agent-r3 tasks verify --out")
    return {verification.task_id: verification for verification in lines}


def known_verifications(tasks: Sequence[Task], path: Path) -> dict[str, Verification]:
    """What the file says of `tasks` as they are now: another image was not verified, "ungraded" is no verdict.

    Raises DataError; see `read_verifications`.
    """
    found = read_verifications(path)
    return {
        task.id: entry
        for task in tasks
        if (entry := found.get(task.id)) is not None and entry.image == task.image and entry.verdict != "ungraded"
    }
