"""The folder of one evaluation: append-only, so that a killed run goes on where it stopped and pays nothing twice.

config.yaml          what is evaluated, and how
predictions.jsonl    SWE-bench's format, a line an episode
grades.jsonl         a verdict on each
failures.jsonl       infrastructure failures, which are no verdict
logs/                what the tests printed, a file a prediction
trajectories/        what the agent did, for `agent-r3 trajectory`
report.json report.html
"""

import fcntl
import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter

from agent_r3 import journal
from agent_r3.errors import DataError, UserError
from agent_r3.eval.records import Failure, Graded, Key, Prediction

_PREDICTIONS, _GRADES, _FAILURES = "predictions.jsonl", "grades.jsonl", "failures.jsonl"
_PREDICTION, _GRADED, _FAILURE = TypeAdapter(Prediction), TypeAdapter(Graded), TypeAdapter(Failure)
_WRITER = "agent-r3 eval"
_LONGEST_NAME = 120


class EvaluationFolder:
    """Reads what is there, appends what comes. One process writes at a time: `with EvaluationFolder.locked(path)`."""

    def __init__(self, path: Path) -> None:
        """Raises DataError for files that another program wrote, or two predictions under one key."""
        self.path = path
        self.predictions: dict[Key, Prediction] = {}
        for prediction in journal.read(path / _PREDICTIONS, _PREDICTION, _WRITER):
            if prediction.key in self.predictions:
                raise DataError(
                    f"{path / _PREDICTIONS}: {prediction.instance_id}, sample {prediction.sample}, is twice"
                )
            self.predictions[prediction.key] = prediction
        self.grades = {graded.key: graded for graded in journal.read(path / _GRADES, _GRADED, _WRITER)}
        self.failures = list(journal.read(path / _FAILURES, _FAILURE, _WRITER))

    @classmethod
    @contextmanager
    def locked(cls, path: Path) -> Iterator["EvaluationFolder"]:
        """The folder, made where it is not there, while no other process writes to it. Else raises UserError."""
        path.mkdir(parents=True, exist_ok=True)
        with (path / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as exc:
                raise UserError(f"another process evaluates into {path}; wait for it, or choose another --out") from exc
            yield cls(path)

    def add_prediction(self, prediction: Prediction) -> None:
        if prediction.key in self.predictions:
            raise DataError(f"{self.path}: {prediction.instance_id} has a sample {prediction.sample} already")
        journal.append(self.path / _PREDICTIONS, asdict(prediction))
        self.predictions[prediction.key] = prediction

    def add_grade(self, graded: Graded) -> None:
        journal.append(self.path / _GRADES, asdict(graded))
        self.grades[graded.key] = graded

    def add_failure(self, failure: Failure) -> None:
        journal.append(self.path / _FAILURES, asdict(failure))
        self.failures.append(failure)

    def grade_of(self, prediction: Prediction) -> Graded | None:
        """The verdict on this very patch, if there is one."""
        graded = self.grades.get(prediction.key)
        return graded if graded is not None and graded.patch_sha256 == digest(prediction) else None

    def log_path(self, key: Key) -> Path:
        """Where the log of a grading belongs."""
        return self.path / "logs" / f"{episode_id(key)}.log"

    def ungraded(self) -> list[Prediction]:
        return [prediction for prediction in self.predictions.values() if self.grade_of(prediction) is None]


def digest(prediction: Prediction) -> str:
    return hashlib.sha256(prediction.patch).hexdigest()


def episode_id(key: Key) -> str:
    """A name for files and for `agent-r3 trajectory`, whatever characters and length the instance id has."""
    instance_id, sample = key
    name = re.sub(r"[^\w.-]", "_", instance_id, flags=re.ASCII).lstrip(".")
    if name != instance_id or len(name) > _LONGEST_NAME:
        tag = hashlib.sha256(instance_id.encode(errors="surrogateescape")).hexdigest()[:12]
        name = f"{name[: _LONGEST_NAME - len(tag)]}-{tag}"
    return f"{name}.{sample}"
