"""Is a dataset sound? Each task must give 0 for doing nothing and 1 for its gold patch."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agent_r3.envs.grading import Grader
from agent_r3.errors import GradingError
from agent_r3.types import Grade, Task


@dataclass(frozen=True, slots=True)
class Verdict:
    """What grading said of one task. `problem` is empty for a sound one."""

    task_id: str
    noop: Grade | None
    gold: Grade | None
    problem: str

    @property
    def sound(self) -> bool:
        return not self.problem


async def verify_tasks(tasks: Sequence[Task], grader: Grader, on_verdict: Callable[[Verdict], None]) -> list[Verdict]:
    """Grade nothing and gold for every task, as many at a time as the grader allows; verdicts in the tasks' order."""

    async def one(task: Task) -> Verdict:
        try:
            noop, gold = await asyncio.gather(grader.grade(task, b""), _gold(grader, task))
            verdict = Verdict(task.id, noop, gold, _problem(noop, gold))
        except GradingError as exc:
            verdict = Verdict(task.id, None, None, f"could not be graded: {exc}")
        on_verdict(verdict)
        return verdict

    return list(await asyncio.gather(*(one(task) for task in tasks)))


async def _gold(grader: Grader, task: Task) -> Grade | None:
    return await grader.grade(task, task.gold_patch.encode()) if task.gold_patch else None


def _problem(noop: Grade, gold: Grade | None) -> str:
    problems = []
    if noop.reward != 0:
        problems.append("doing nothing earns the reward")
    if gold is None:
        problems.append("its row has no gold patch that text can say")
    elif gold.reward != 1:
        problems.append(f"the gold patch does not earn it: {gold.reason}")
    return "; ".join(problems)
