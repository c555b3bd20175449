"""What an evaluation still has to do, and in which order. Pure."""

import random
from collections.abc import Container, Sequence
from dataclasses import dataclass

from agent_r3.eval.records import Key
from agent_r3.types import Task


@dataclass(frozen=True, slots=True)
class Work:
    """One episode to run."""

    task: Task
    sample: int

    @property
    def key(self) -> Key:
        return self.task.id, self.sample


def plan(tasks: Sequence[Task], samples: int, seed: int, done: Container[Key]) -> list[Work]:
    """The episodes that are not `done`: sample 0 of every task first, so that a part of a run is a sound one too.

    The order of tasks is drawn from `seed`, so that slow or hard repositories do not stand together.
    """
    order = list(tasks)
    random.Random(seed).shuffle(order)
    every = [Work(task, sample) for sample in range(samples) for task in order]
    return [work for work in every if work.key not in done]
