"""Which groups each step trained on: `<run>/groups.jsonl`, a line a step, on the disk before the step's checkpoint.

A trainer that is killed goes on at its last checkpoint and makes the steps after it anew. So the line of a step takes
back all earlier lines of that step and of those after it; what `read_steps` returns is what the policy was trained on.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from agent_r3 import journal
from agent_r3.errors import DataError
from agent_r3.trainer.feed import StepGroups

FILE = "groups.jsonl"


@dataclass(frozen=True, slots=True)
class TrainedGroup:
    """A group that a step consumed."""

    index: int  # in the data order
    policy_version: int
    trajectory_ids: tuple[str, ...]
    kept: bool  # in the loss; dynamic sampling leaves out groups of equal rewards


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """One line."""

    step: int
    groups: tuple[TrainedGroup, ...]


_LINE = TypeAdapter(TrainedStep)


def record_step(run_folder: Path, step: int, groups: StepGroups) -> None:
    """Append the step's line; it is on the disk when this returns."""
    line = TrainedStep(
        step,
        tuple(
            TrainedGroup(group.index, group.policy_version, group.trajectory_ids, group.index in groups.kept)
            for group in (delivery.group for delivery in groups.deliveries)
        ),
    )
    journal.append(run_folder / FILE, asdict(line))


def read_steps(run_folder: Path) -> list[TrainedStep]:
    """The run's steps in order, each once; [] when there are none yet. Raises DataError where one is missing."""
    path = run_folder / FILE
    steps: list[TrainedStep] = []
    for line in journal.read(path, _LINE, "agent-r3 trainer"):
        while steps and steps[-1].step >= line.step:
            steps.pop()
        if steps and steps[-1].step + 1 != line.step:
            raise DataError(f"{path}: step {line.step} follows step {steps[-1].step}")
        steps.append(line)
    return steps
