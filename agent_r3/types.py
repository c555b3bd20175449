"""The nouns every part shares. Frozen, slotted; arrays are numpy; shapes stand in the field comments.

Letters: T tokens of a trajectory, R routing rows, L MoE layers, K experts per token (top-k), E experts per layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
RowArray = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]


class Source(StrEnum):
    """Where a task comes from: what its image holds, how it is set up and how it is graded."""

    OFFLINE = "offline"  # built here from sdists
    R2E = "r2e"  # R2E-Gym
    SWE_BENCH = "swe-bench"
    SWE_SMITH = "swe-smith"
    HARBOR = "harbor"  # a folder with task.toml


@dataclass(frozen=True, slots=True)
class Task:
    """One software-engineering task. The hidden tests are not in the agent's container.

    `hidden_tests_dir` is a folder on this host that is copied into the grading container, as `<workdir>/r2e_tests`, or
    `/tests` for a Harbor task. Where it is None the image itself carries the tests, at `/r2e_tests` (R2E-Gym) or as
    `test_files` of its repository (SWE-smith), and set-up removes them for the agent.
    """

    id: str
    dataset: str  # "offline", "r2e", or the file or folder it came from
    repo: str
    image: str
    problem_statement: str
    expected: Mapping[str, str]  # test name -> PASSED | FAILED | ERROR
    test_command: str  # run in workdir with bash
    gold_patch: str  # unified diff against what the agent finds; empty where there is none
    workdir: str = "/testbed"
    hidden_tests_dir: Path | None = None
    source: Source = Source.R2E
    network: bool = False  # the agent's sandbox may reach the internet
    bug_patch: str = ""  # makes the image's repository the task's, for the agent and for grading (SWE-smith)
    test_files: tuple[str, ...] = ()  # the repository's own files that are the hidden tests (SWE-smith)
    other_tests: bool = False  # the run may report tests that `expected` does not name; names are whole node ids
    test_timeout_s: float | None = None  # instead of the config's grading.timeout_s
    solution_dir: Path | None = None  # Harbor's solution/, in place of a gold patch
    harness_row: Mapping[str, object] = field(default_factory=dict)  # what swebench's own harness reads (SWE-bench)
    difficulty: str = ""  # as the dataset says it, such as SWE-bench Verified's "15 min - 1 hour"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A parsed call; arguments are still the strings (or JSON values) the model wrote."""

    name: str
    arguments: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Observation:
    """What a tool answered, already cut to the configured size."""

    text: str
    is_error: bool = False  # the call itself was bad (unknown tool, bad arguments); a failing command is not an error
    finished: bool = False  # the agent called `finish`


class Ending(StrEnum):
    """How an episode ended. All of these are data; infrastructure failures are exceptions."""

    FINISH = "finish"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    TIMEOUT = "timeout"
    BAD_CALLS = "bad_calls"


@dataclass(frozen=True, slots=True)
class Routing:
    """Routing rows of consecutive positions. Row i holds the experts chosen when token `start + i` was the input."""

    start: int
    experts: RowArray  # [R, L, K], uint8 up to 256 experts, uint16 above

    @property
    def stop(self) -> int:
        return self.start + len(self.experts)


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn appended to a trajectory: the prompt or observation tokens, then the sampled ones."""

    index: int
    start: int  # position of prompt_ids[0] in the trajectory
    prompt_ids: Int32Array  # newly rendered tokens: prompt (turn 0) or observation, loss mask 0
    sampled_ids: Int32Array  # loss mask 1
    logprobs: Float32Array  # [len(sampled_ids)], of the sampled distribution
    routing: Routing  # rows new in this turn: from max(start - 1, 0) to start + len(prompt) + len(sampled) - 1
    policy_version: int
    cached_tokens: int  # as the engine reported it
    text: str = ""  # the sampled text, for people; never re-encoded
    calls: tuple[ToolCall, ...] = ()
    observations: tuple[Observation, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)  # generate, tools


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A finished episode: T tokens, T-1 routing rows (the last token was never an input)."""

    id: str
    group_id: str
    task_id: str
    tokens: Int32Array  # [T]
    loss_mask: BoolArray  # [T], True on sampled tokens
    logprobs: Float32Array  # [T], 0 where loss_mask is False
    versions: Int32Array  # [T], policy version that produced the token and its row
    routing: Routing  # start 0, [T-1, L, K]
    reward: float
    ending: Ending
    turns: int
    prompt_tokens: int = 0  # tokens sent to the engine, summed over turns
    cached_tokens: int = 0  # of those, served from its prefix cache
    reprefilled_tokens: int = 0  # tokens of earlier turns that the engine had to prefill again


@dataclass(frozen=True, slots=True)
class TrajectoryGroup:
    """The n episodes of one task under one policy version. Infrastructure failures are left out and counted."""

    id: str
    index: int  # place in the run's data order
    task_id: str
    policy_version: int
    trajectory_ids: tuple[str, ...]
    rewards: tuple[float, ...]
    infra_failures: Mapping[str, int] = field(default_factory=dict)  # kind -> count


Outcome = Literal["passed", "failed", "unapplied", "too_large", "timeout", "ended_early", "tampered"]


@dataclass(frozen=True, slots=True)
class Grade:
    """The hidden tests' verdict on one patch.

    `outcome`: the tests came out as expected or not; the patch does not apply or is larger than allowed; the tests
    ran out of time; their process ended before its report did; what came back is not what an honest run gives.
    """

    reward: float
    statuses: Mapping[str, str]
    reason: str  # one line: "all 68 as expected", "2 of 68 differ: ...", "timed out after 300 s"
    seconds: float
    cached: bool = False
    outcome: Outcome = "failed"
    left_out: tuple[str, ...] = ()  # paths of the patch that no patch may change
    flaky: bool = False  # several runs of the same tests disagreed
    log: bytes = b""  # what the tests printed; SWE-bench only, where the verdict is read from it


@dataclass(frozen=True, slots=True)
class MoEShape:
    """What routing rows are checked against; read from the model's config.json."""

    num_layers: int  # MoE layers that are recorded: rows are [R, num_layers, top_k]
    num_experts: int
    top_k: int

    @property
    def dtype(self) -> type[np.uint8] | type[np.uint16]:
        return np.uint8 if self.num_experts <= 256 else np.uint16
