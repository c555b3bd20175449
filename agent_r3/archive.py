"""Finished episodes on disk: `trajectories/step_N/<id>.safetensors`, arrays as tensors, everything else as JSON.

Tensors: tokens int32 [T], loss_mask bool [T], logprobs float32 [T], versions int32 [T], rows uint8 or uint16
[T-1, L, K]. The JSON under the metadata key `episode` has the task, the reward and why, the grading's outcome, the
ending, the agent's patch, and each turn's span, text, calls, observations, cached tokens and seconds.

An evaluation has no arrays to keep: its episodes are `trajectories/step_0/<id>.json`, that JSON alone.
"""

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from agent_r3.errors import ContractError, DataError, boundary
from agent_r3.journal import usual_mode
from agent_r3.trajectory import TrajectoryEnd, TurnRecord, engine_counters, splice
from agent_r3.types import Ending, Grade, Observation, Outcome, Routing, ToolCall, Trajectory, Turn

_FORMAT = "agent-r3 episode 2"
_TENSORS = ("tokens", "loss_mask", "logprobs", "versions", "rows")
_ARRAYS, _TEXT = ".safetensors", ".json"
_PATCH_CHARS = 200_000


@dataclass(frozen=True, slots=True)
class TurnText:
    """One turn for people; token `start + prompt + sampled - 1` is its last."""

    index: int
    start: int
    prompt: int  # newly rendered tokens
    sampled: int
    policy_version: int
    cached_tokens: int
    text: str
    calls: tuple[ToolCall, ...]
    observations: tuple[Observation, ...]
    seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class EpisodeInfo:
    """What is known without the arrays. Without a reward it was not graded yet, and without an outcome not by tests."""

    id: str
    group_id: str
    task_id: str
    reward: float | None
    reason: str  # of the reward
    ending: Ending
    patch: str
    turns: tuple[TurnText, ...]
    prompt_tokens: int
    cached_tokens: int
    reprefilled_tokens: int
    outcome: Outcome | None  # of the grading
    left_out: tuple[str, ...]  # files of the patch that no patch may change
    flaky: bool  # runs of the hidden tests disagreed

    @property
    def tokens(self) -> int:
        """T."""
        return sum(turn.prompt + turn.sampled for turn in self.turns)

    @property
    def good(self) -> bool:
        return self.reward is not None and self.reward > 0

    @property
    def policy_version(self) -> int:
        return self.turns[0].policy_version


@dataclass(frozen=True, slots=True)
class ArchivedEpisode:
    """An episode read back."""

    info: EpisodeInfo
    trajectory: Trajectory


def write_episode(
    run_folder: Path,
    step: int,
    *,
    trajectory_id: str,
    group_id: str,
    task_id: str,
    turns: Sequence[Turn],
    ending: Ending,
    grade: Grade,
    patch: bytes = b"",
) -> Path:
    """Write `run_folder/trajectories/step_<step>/<id>.safetensors`, whole or not at all; an earlier one is replaced.

    Raises ContractError (RoutingError) when the turns do not splice into T tokens with T-1 rows.
    """
    counters = engine_counters(turns)
    end = TrajectoryEnd(trajectory_id, group_id, task_id, grade.reward, ending, **counters)
    trajectory = splice([TurnRecord.of(turn) for turn in turns], end)
    info = EpisodeInfo(
        id=trajectory_id,
        group_id=group_id,
        task_id=task_id,
        reward=grade.reward,
        reason=grade.reason,
        ending=ending,
        patch=patch_text(patch),
        turns=tuple(turn_text(turn) for turn in turns),
        prompt_tokens=end.prompt_tokens,
        cached_tokens=end.cached_tokens,
        reprefilled_tokens=end.reprefilled_tokens,
        outcome=grade.outcome,
        left_out=grade.left_out,
        flaky=grade.flaky,
    )
    tensors = {
        "tokens": trajectory.tokens,
        "loss_mask": trajectory.loss_mask,
        "logprobs": trajectory.logprobs,
        "versions": trajectory.versions,
        "rows": np.ascontiguousarray(trajectory.routing.experts),
    }
    metadata = {"format": _FORMAT, "episode": json.dumps(asdict(info)), "crc32": str(_checksum(tensors))}
    path = _place(run_folder, step, trajectory_id, _ARRAYS)
    partial = _partial(path)
    save_file(tensors, partial, metadata)
    usual_mode(partial)
    partial.replace(path)
    return path


def write_transcript(run_folder: Path, info: EpisodeInfo) -> Path:
    """Write `run_folder/trajectories/step_0/<id>.json`, whole or not at all; an earlier one is replaced."""
    path = _place(run_folder, 0, info.id, _TEXT)
    partial = _partial(path)
    partial.write_text(json.dumps({"format": _FORMAT, "episode": asdict(info)}))
    partial.replace(path)
    return path


def transcript_path(run_folder: Path, trajectory_id: str) -> Path:
    """Where `write_transcript` writes an episode."""
    return run_folder / "trajectories" / "step_0" / f"{trajectory_id}{_TEXT}"


def read_info(path: Path) -> EpisodeInfo:
    """The episode without its arrays; reads only the file's header. Raises DataError for a file that is not one."""
    if path.suffix == _TEXT:
        with boundary(DataError, f"episode {path}", OSError, ValueError, KeyError, TypeError):
            content = json.loads(path.read_text())
            return _parse_info(path, content["format"], content["episode"])
    with boundary(DataError, f"episode {path}", SafetensorError, OSError), safe_open(path, framework="numpy") as file:
        metadata = file.metadata() or {}
    return _read_header(path, metadata)


def read_episode(path: Path) -> ArchivedEpisode:
    """The episode with its arrays, checked. Raises DataError for a damaged file, ContractError for broken lengths."""
    if path.suffix == _TEXT:
        raise DataError(f"episode {path} is of an evaluation: it has its text (`agent-r3 trajectory show`), no arrays")
    with boundary(DataError, f"episode {path}", SafetensorError, OSError), safe_open(path, framework="numpy") as file:
        metadata = file.metadata() or {}
        missing = set(_TENSORS) - set(file.keys())
        if missing:
            raise DataError(f"episode {path}: no {', '.join(sorted(missing))}")
        tensors = {name: file.get_tensor(name) for name in _TENSORS}
    info = _read_header(path, metadata)
    if str(_checksum(tensors)) != metadata.get("crc32"):
        raise DataError(f"episode {path}: its arrays do not match their checksum")
    trajectory = Trajectory(
        **{name: tensors[name] for name in ("tokens", "loss_mask", "logprobs", "versions")},
        **{name: getattr(info, name) for name in ("id", "group_id", "task_id", "reward", "ending")},
        **{name: getattr(info, name) for name in ("prompt_tokens", "cached_tokens", "reprefilled_tokens")},
        routing=Routing(start=0, experts=tensors["rows"]),
        turns=len(info.turns),
    )
    episode = ArchivedEpisode(info, trajectory)
    check_trajectory(episode)
    return episode


def list_episodes(run_folder: Path) -> list[Path]:
    """Files of a run's or an evaluation's episodes by step, then id. Raises DataError when there are none."""
    found = [path for kind in (_ARRAYS, _TEXT) for path in (run_folder / "trajectories").glob(f"step_*/[!.]*{kind}")]
    if not found:
        raise DataError(f"no episodes under {run_folder / 'trajectories'}; was run.archive_trajectories off?")
    return sorted(found, key=lambda path: (episode_step(path), path.name))


def find_episode(run_folder: Path, trajectory_id: str) -> Path:
    """The file of one episode, of the last step that has it. Raises DataError when there is none."""
    found = [path for path in list_episodes(run_folder) if path.stem == trajectory_id]
    if not found:
        raise DataError(f"run {run_folder} has no episode {trajectory_id}; `agent-r3 trajectory list {run_folder}`")
    return found[-1]


def episode_step(path: Path) -> int:
    """The training step whose folder holds the file."""
    return int(path.parent.name.removeprefix("step_"))


def check_trajectory(episode: ArchivedEpisode) -> None:
    """T tokens, T-1 rows, turns that join to exactly the tokens, loss and log-probs on sampled tokens only.

    Raises ContractError with the numbers.
    """
    trajectory, info = episode.trajectory, episode.info
    what, total = f"episode {info.id}", len(trajectory.tokens)
    lengths = {len(trajectory.loss_mask), len(trajectory.logprobs), len(trajectory.versions), total}
    if len(lengths) != 1:
        raise ContractError(f"{what}: tokens, mask, log-probs and versions differ in length: {sorted(lengths)}")
    if trajectory.routing.experts.ndim != 3 or len(trajectory.routing.experts) != total - 1:
        shape = trajectory.routing.experts.shape
        raise ContractError(f"{what}: {total} tokens need {total - 1} routing rows, the rows have shape {shape}")
    sampled = np.zeros(total, np.bool_)
    versions = np.zeros(total, np.int32)
    length = 0
    for place, turn in enumerate(info.turns):
        if turn.index != place or turn.start != length:
            raise ContractError(f"{what}: turn {turn.index} starts at {turn.start}; turn {place} at {length} expected")
        stop = length + turn.prompt + turn.sampled
        sampled[length + turn.prompt : stop] = True
        versions[length:stop] = turn.policy_version
        length = stop
    if length != total:
        raise ContractError(f"{what}: its turns have {length} tokens together, {total} are stored")
    if not np.array_equal(sampled, trajectory.loss_mask):
        wrong = np.flatnonzero(sampled != trajectory.loss_mask)
        raise ContractError(f"{what}: the loss mask differs from the sampled spans at {wrong.size} tokens, {wrong[:5]}")
    if trajectory.logprobs[~sampled].any():
        raise ContractError(f"{what}: log-probs on tokens that were not sampled")
    if not np.array_equal(versions, trajectory.versions):
        raise ContractError(f"{what}: token versions differ from their turns' policy versions")


def export(path: Path, *, rows: bool) -> dict[str, Any]:
    """The episode as plain JSON values: token_ids, loss_mask (0/1), logprobs, versions, rows_shape, turns, and rows."""
    episode = read_episode(path)
    trajectory = episode.trajectory
    fields = asdict(episode.info)
    turns = fields.pop("turns")
    out = {
        **fields,
        "step": episode_step(path),
        "token_ids": trajectory.tokens.tolist(),
        "loss_mask": trajectory.loss_mask.astype(int).tolist(),
        "logprobs": trajectory.logprobs.astype(float).tolist(),
        "versions": trajectory.versions.tolist(),
        "rows_shape": list(trajectory.routing.experts.shape),
        "rows_dtype": str(trajectory.routing.experts.dtype),
        "turns": turns,
    }
    return out | {"rows": trajectory.routing.experts.tolist()} if rows else out


def patch_text(patch: bytes) -> str:
    """A patch for people to read: very long ones are cut."""
    return patch.decode(errors="replace")[:_PATCH_CHARS]


def turn_text(turn: Turn) -> TurnText:
    """A turn without its arrays."""
    return TurnText(
        index=turn.index,
        start=turn.start,
        prompt=len(turn.prompt_ids),
        sampled=len(turn.sampled_ids),
        policy_version=turn.policy_version,
        cached_tokens=turn.cached_tokens,
        text=turn.text,
        calls=tuple(ToolCall(call.name, dict(call.arguments)) for call in turn.calls),
        observations=turn.observations,
        seconds=dict(turn.seconds),
    )


def _place(run_folder: Path, step: int, trajectory_id: str, suffix: str) -> Path:
    """The episode's file, its folder made."""
    folder = run_folder / "trajectories" / f"step_{step}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{trajectory_id}{suffix}"


def _partial(path: Path) -> Path:
    """Where the file is written before it takes its name."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def _read_header(path: Path, metadata: Mapping[str, str]) -> EpisodeInfo:
    with boundary(DataError, f"episode {path}", ValueError, KeyError, TypeError):
        return _parse_info(path, metadata.get("format"), json.loads(metadata.get("episode", "{}")))


def _parse_info(path: Path, form: object, fields: dict[str, Any]) -> EpisodeInfo:
    if form != _FORMAT:
        raise DataError(f"{path} is not an episode of this version: format {form!r}")
    fields["ending"] = Ending(fields["ending"])
    fields["left_out"] = tuple(fields["left_out"])
    fields["turns"] = tuple(_parse_turn(turn) for turn in fields["turns"])
    return EpisodeInfo(**fields)


def _parse_turn(fields: dict[str, Any]) -> TurnText:
    fields["calls"] = tuple(ToolCall(**call) for call in fields["calls"])
    fields["observations"] = tuple(Observation(**observation) for observation in fields["observations"])
    return TurnText(**fields)


def _checksum(tensors: Mapping[str, "np.ndarray[Any, Any]"]) -> int:
    checksum = 0
    for name in _TENSORS:
        checksum = zlib.crc32(np.ascontiguousarray(tensors[name]).tobytes(), checksum)
    return checksum
