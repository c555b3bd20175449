"""Values that travel through the store besides turns, and their JSON forms."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from agent_r3.errors import ContractError
from agent_r3.trajectory import TrajectoryEnd
from agent_r3.types import Ending, TrajectoryGroup

ENDED_STATES = ("done", "stopped")  # last words of a role that has ended as it should
CONSUMER_GROUP = "trainer"
_COUNTERS = ("prompt_tokens", "cached_tokens", "reprefilled_tokens")


@dataclass(frozen=True, slots=True)
class Policy:
    """The policy that rollouts sample from."""

    version: int
    weights: str  # folder of its weights, or how they reached the engine


@dataclass(frozen=True, slots=True)
class Delivery:
    """A finished group as the trainer reads it; `entry_id` is what is acknowledged."""

    entry_id: str
    group: TrajectoryGroup
    seconds: Mapping[str, float]  # by stage, summed over the group's episodes


@dataclass(frozen=True, slots=True)
class RoleState:
    """Last heartbeat of a role."""

    age_s: float
    payload: Mapping[str, object]


def dump(value: object) -> str:
    """JSON with a fixed order, so that equal values are equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def encode_group(group: TrajectoryGroup) -> str:
    if len(group.trajectory_ids) != len(group.rewards) or len(set(group.trajectory_ids)) != len(group.trajectory_ids):
        raise ContractError(
            f"group {group.id}: {len(group.trajectory_ids)} trajectories "
            f"({len(set(group.trajectory_ids))} distinct) with {len(group.rewards)} rewards"
        )
    return dump(asdict(group) | {"infra_failures": dict(group.infra_failures)})


def decode_group(data: bytes) -> TrajectoryGroup:
    fields = json.loads(data)
    fields["trajectory_ids"] = tuple(fields["trajectory_ids"])
    fields["rewards"] = tuple(fields["rewards"])
    return TrajectoryGroup(**fields)


def encode_end(reward: float, ending: Ending, counters: Mapping[str, int]) -> str:
    if set(counters) != set(_COUNTERS):
        raise ContractError(f"counters must be exactly {', '.join(_COUNTERS)}; got {', '.join(sorted(counters))}")
    return dump({"reward": float(reward), "ending": ending.value, **counters})


def decode_end(trajectory_id: str, group_id: str, task_id: str, data: bytes) -> TrajectoryEnd:
    fields = json.loads(data)
    ending = Ending(fields.pop("ending"))
    return TrajectoryEnd(id=trajectory_id, group_id=group_id, task_id=task_id, ending=ending, **fields)


def decode_policy(fields: Mapping[bytes, bytes]) -> Policy:
    if not fields:
        raise ContractError("store: no policy is set yet; the trainer sets it before it asks for groups")
    return Policy(version=int(fields[b"version"]), weights=fields[b"weights"].decode())


def decode_roles(fields: Mapping[bytes, bytes], now_s: float) -> dict[str, RoleState]:
    """Roles by their heartbeats; `now_s` is the time of the server, which also stamped them."""
    states = {}
    for role, data in fields.items():
        beat = json.loads(data)
        states[role.decode()] = RoleState(age_s=max(now_s - beat["time"], 0.0), payload=beat["payload"])
    return states
