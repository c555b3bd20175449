"""Checkpoints: `checkpoints/step_000010/` holds `policy/` (Megatron's) and `trainer.json`; it appears only when whole.

The trainer draws nothing from a running random state: what it samples in a step follows from the seed and the step. So
the step, the policy version and the place in the data order are all that a resumed run needs besides the policy.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog

from agent_r3.errors import DataError

log = structlog.get_logger(__name__)

_STATE = "trainer.json"
_POLICY = "policy"


@dataclass(frozen=True, slots=True)
class TrainerState:
    """Where a run stands between two steps."""

    step: int = 0  # steps made
    version: int = 0  # policy version that the next groups must come from
    groups: int = 0  # groups consumed: the next one has this index


class Checkpoints:
    """The checkpoints of one run.

    checkpoints.save(state, policy.save)                 # every rank calls it; only `writer` touches the folder
    if (found := checkpoints.latest()) is not None:
        policy.load(found.policy)
        state = found.state
    """

    def __init__(self, folder: Path, *, keep: int, writer: bool, barrier: Callable[[], None]) -> None:
        """`writer` is True on rank 0; `barrier` makes all ranks wait for each other."""
        self._folder = folder
        self._keep = keep
        self._writer = writer
        self._barrier = barrier

    def save(self, state: TrainerState, save_policy: Callable[[Path], None]) -> Path:
        """Write the checkpoint of `state`, replacing one of the same step; delete the oldest beyond `keep`."""
        final = self._folder / f"step_{state.step:06d}"
        temporary = self._folder / f".{final.name}.writing"
        if self._writer:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        self._barrier()
        save_policy(temporary / _POLICY)
        self._barrier()
        if self._writer:
            _write_state(temporary, state)
            shutil.rmtree(final, ignore_errors=True)
            temporary.rename(final)
            for old in self._steps()[self._keep :]:
                shutil.rmtree(old, ignore_errors=True)
        self._barrier()
        return final

    def latest(self) -> "Checkpoint | None":
        """The newest whole checkpoint; damaged ones are skipped with a warning. None where there is none."""
        for folder in self._steps():
            try:
                return Checkpoint(folder / _POLICY, _read_state(folder))
            except DataError as exc:
                log.warning("checkpoint skipped", folder=str(folder), reason=str(exc))
        return None

    def any(self) -> bool:
        """Whether there is one, whole or damaged."""
        return bool(self._steps())

    def _steps(self) -> list[Path]:
        return sorted(self._folder.glob("step_[0-9]*"), reverse=True)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    policy: Path
    state: TrainerState


def _write_state(folder: Path, state: TrainerState) -> None:
    content = {"state": asdict(state), "files": _sizes(folder)}
    with (folder / _STATE).open("w") as file:
        json.dump(content, file, indent=2)
        file.flush()
        os.fsync(file.fileno())


def _read_state(folder: Path) -> TrainerState:
    """Raises DataError for a checkpoint that is not whole: every file must have the size it was saved with."""
    try:
        content = json.loads((folder / _STATE).read_text())
        state: dict[str, int] = content["state"]
        wanted: dict[str, int] = content["files"]
        result = TrainerState(**state)
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise DataError(f"{folder / _STATE} cannot be read: {type(exc).__name__}: {exc}") from exc
    found = _sizes(folder)
    for name, size in wanted.items():
        if found.get(name) != size:
            raise DataError(f"{folder / name}: {found.get(name, 'no')} bytes, {size} were saved")
    return result


def _sizes(folder: Path) -> dict[str, int]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != _STATE)
    return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(files)}
