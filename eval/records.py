"""What an evaluation leaves on disk: a prediction for each episode, a verdict for each prediction, and its failures.

Predictions have SWE-bench's own three keys; others ignore the rest. With several samples of an instance, `sample`
tells them apart.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, InstanceOf

from agent_r3.types import Ending, Outcome

Key = tuple[str, int]  # instance id, sample

Verdict = Literal["resolved", "failed", "empty_patch", "not_applied", "error"]

VERDICTS: dict[Verdict, str] = {
    "resolved": "the hidden tests came out as they should",
    "failed": "they did not",
    "empty_patch": "the agent changed nothing; not run",
    "not_applied": "the patch does not apply",
    "error": "the tests gave no result: out of time, ended early, too large a patch, no honest run",
}

Text = InstanceOf[str]  # any string, lone surrogates too, which stand for bytes that are not UTF-8


@dataclass(frozen=True, slots=True)
class EpisodeFacts:
    """How the episode went that made a prediction. Tokens are summed over its turns."""

    ending: Ending
    turns: int
    prompt_tokens: int  # sent to the model
    cached_tokens: int  # of those, served from a prefix cache, as far as the model says so
    sampled_tokens: int
    seconds: Mapping[str, float]  # generate, tools, sandbox (waiting for it), total
    attempts: int = 1  # episodes that were begun for it; all but the last were infrastructure failures


def _no_line_break(text: str) -> str:
    if not text.strip() or any(char in text for char in "\n\r\0"):
        raise ValueError("must be a line of text")
    return text


Name = Annotated[str, AfterValidator(_no_line_break)]


@dataclass(frozen=True, slots=True)
class Prediction:
    """One line of `predictions.jsonl`."""

    instance_id: Name
    model_name_or_path: Name
    model_patch: Text  # bytes that are not UTF-8 as lone surrogates (`surrogateescape`)
    sample: Annotated[int, Field(ge=0)] = 0
    episode: EpisodeFacts | None = None  # None for predictions that came from elsewhere

    @property
    def key(self) -> Key:
        return self.instance_id, self.sample

    @property
    def patch(self) -> bytes:
        return self.model_patch.encode(errors="surrogateescape")

    @property
    def empty(self) -> bool:
        return not self.model_patch.strip()


@dataclass(frozen=True, slots=True)
class Graded:
    """One line of `grades.jsonl`; of several for a prediction the last one counts."""

    instance_id: str
    sample: int
    patch_sha256: str  # of what was graded
    verdict: Verdict
    reward: float
    outcome: Outcome | None  # the grading's own word; None where nothing was run
    reason: str
    seconds: float
    tests_passed: int = 0  # of `tests`
    tests: int = 0  # that must pass
    log: str | None = None  # file below the evaluation's folder
    flaky: bool = False
    tests_touched: tuple[Text, ...] = ()  # files of tests or of their configuration that the patch changes

    @property
    def key(self) -> Key:
        return self.instance_id, self.sample


@dataclass(frozen=True, slots=True)
class Failure:
    """One line of `failures.jsonl`: the infrastructure failed, all retries included. The next run tries again."""

    instance_id: str
    sample: int
    stage: Literal["episode", "grading"]
    kind: str  # InfraError.kind
    error: Text
    attempts: int
    time: float = field(default=0.0)  # seconds since the epoch

    @property
    def key(self) -> Key:
        return self.instance_id, self.sample
