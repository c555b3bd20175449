"""What a run is doing, from what was read of its store: roles, queues, rates, failures. Pure: no I/O, no clock."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from agent_r3.store.shared import ENDED_STATES, RoleState
from agent_r3.store.status_reader import RunReading, WaitingGroup
from agent_r3.store.writer import STALE_S

LATE_S = 10.0  # five heartbeats missed
GONE_S = STALE_S  # from then on its claims are handed to others
_FORGOTTEN_S = 3_600.0  # a worker that was replaced by one of another name is no news forever
_NEARLY_FULL = 0.9

Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RoleStatus:
    """One role by its last heartbeat; None for what it did not say."""

    name: str
    alive: str  # alive, late, gone, or ended, when that was its last word
    age_s: float
    state: str | None
    policy_version: int | None
    step: int | None
    episodes_running: int | None
    groups_running: int | None
    episodes: int | None  # since it started
    claims: int  # groups it holds
    failures: Mapping[str, int]
    uptime_s: float | None
    where: str | None  # host:pid, or the engine's URL


@dataclass(frozen=True, slots=True)
class Queue:
    """Groups on their way: asked for, claimed by a worker, published, read by the trainer, acknowledged."""

    demand: int
    next: int
    claims: Mapping[str, int]  # worker -> groups
    published: int  # since the trainer took up its position
    unread: int  # the trainer's lag
    read: int  # by the trainer, not acknowledged: their step is not safe yet
    oldest_unread_s: float | None


@dataclass(frozen=True, slots=True)
class Stored:
    """Trajectories in the store, and the memory of the whole server."""

    open: int
    finished: int
    tokens: int
    bytes_used: int | None
    bytes_limit: int  # 0: none


@dataclass(frozen=True, slots=True)
class Gain:
    """What was added between two readings; tokens are of all trajectories, prompts and observations included."""

    seconds: float
    episodes: int
    groups: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Rates:
    """Over `window_s` seconds between two readings; None where a rate takes two readings and there is one."""

    window_s: float | None  # None: since each worker's start
    episodes_per_min: float | None
    groups_per_min: float | None
    tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class Staleness:
    """Policy versions between the current one and the one a waiting group was sampled from."""

    mean: float
    max: int


@dataclass(frozen=True, slots=True)
class RunStatus:
    """All that `agent-r3 status` shows of a run."""

    run: str
    time_s: float
    policy_version: int | None
    step: int | None  # steps the trainer has made
    steps: int | None  # of so many, where the run's config is at hand
    roles: tuple[RoleStatus, ...]
    queue: Queue
    stored: Stored
    rates: Rates
    staleness: Staleness | None  # None while no group waits
    failures: Mapping[str, int]  # infrastructure failures by kind, of workers since they started
    evaluation: Queue | None  # of the held set, in training
    metrics: Metrics | None  # last line of metrics.jsonl, where the run's folder is at hand
    notes: tuple[str, ...]  # what deserves a look

    def as_json(self) -> dict[str, Any]:
        """Plain values; a number that JSON does not know is null."""
        return {name: _plain(value) for name, value in asdict(self).items()}


def status_of(
    reading: RunReading, *, rates: Rates | None = None, metrics: Metrics | None = None, steps: int | None = None
) -> RunStatus:
    """The run's status at `reading`. Without `rates` of several readings they are the workers' means since they began.

    `metrics` is the last line of the run's metrics.jsonl and `steps` what it is configured for, where they are known.
    """
    roles = tuple(_role(name, state, reading) for name, state in sorted(reading.roles.items(), key=_role_order))
    version = reading.policy.version if reading.policy else None
    failures: Counter[str] = Counter()
    for role in roles:
        failures.update(role.failures)
    return RunStatus(
        run=reading.run,
        time_s=reading.time_s,
        policy_version=version,
        step=next((role.step for role in roles if role.name == "trainer"), None),
        steps=steps,
        roles=roles,
        queue=_queue(reading),
        stored=_stored(reading),
        rates=rates or _rates_since_start(roles),
        staleness=_staleness(version, reading.groups),
        failures=dict(failures.most_common()),
        evaluation=_queue(reading.evaluation) if reading.evaluation else None,
        metrics=metrics,
        notes=tuple(_notes(reading, roles)),
    )


def gained(earlier: RunReading, later: RunReading) -> Gain:
    """What was added between two readings of a run.

    A trajectory that came and went in between is not seen, so read more often than a step takes. A counter that fell
    belongs to a role that was started again and counts from zero.
    """
    episodes = 0
    for name, state in later.roles.items():
        if (now := _int(state.payload, "episodes")) is not None:
            before = earlier.roles.get(name)
            episodes += _added((_int(before.payload, "episodes") or 0) if before else 0, now)
    tokens = 0
    for id_, trajectory in later.trajectories.items():
        known = earlier.trajectories.get(id_)
        tokens += _added(known.tokens if known else 0, trajectory.tokens)
    groups = _added(earlier.published, later.published)
    return Gain(max(later.time_s - earlier.time_s, 0.0), episodes, groups, tokens)


def rates_over(gains: Sequence[Gain]) -> Rates | None:
    """Rates over the time of all `gains`; None for no time."""
    seconds = sum(gain.seconds for gain in gains)
    if seconds <= 0:
        return None
    episodes, groups, tokens = (
        sum(getattr(gain, name) for gain in gains) / seconds for name in ("episodes", "groups", "tokens")
    )
    return Rates(seconds, 60 * episodes, 60 * groups, tokens)


def _added(before: int, now: int) -> int:
    return now - before if now >= before else now


def _rates_since_start(roles: Sequence[RoleStatus]) -> Rates:
    """Episodes a minute by the live workers' own counters."""
    pairs = [(role.episodes, role.uptime_s) for role in roles if role.alive in ("alive", "late")]
    known = [(episodes, uptime) for episodes, uptime in pairs if episodes is not None and uptime]
    per_minute = sum(60 * episodes / uptime for episodes, uptime in known) if known else None
    return Rates(None, per_minute, None, None)


def _role(name: str, state: RoleState, reading: RunReading) -> RoleStatus:
    payload = state.payload
    said = payload.get("state")
    if isinstance(said, str) and said in ENDED_STATES:
        alive = "ended"
    else:
        alive = "alive" if state.age_s <= LATE_S else "late" if state.age_s <= GONE_S else "gone"
    started = _number(payload, "started")
    host, url = payload.get("host"), payload.get("url")
    where = f"{host}:{_int(payload, 'pid')}" if host else None
    failures = payload.get("failures")
    return RoleStatus(
        name=name,
        alive=alive,
        age_s=state.age_s,
        state=str(said) if said is not None else None,
        policy_version=_int(payload, "policy_version"),
        step=_int(payload, "step"),
        episodes_running=_int(payload, "episodes_running"),
        groups_running=_int(payload, "groups_running"),
        episodes=_int(payload, "episodes"),
        claims=sum(worker == name.removeprefix("worker/") for worker in reading.claims.values()),
        failures={kind: _int(failures, kind) or 0 for kind in failures} if isinstance(failures, Mapping) else {},
        uptime_s=max(reading.time_s - state.age_s - started, 0.0) if started is not None else None,
        where=str(url) if url else where,
    )


def _role_order(item: tuple[str, object]) -> tuple[int, str]:
    name = item[0]
    kinds = ("trainer", "engine", "worker")
    kind = name.partition("/")[0]
    return kinds.index(kind) if kind in kinds else len(kinds), name


def _queue(reading: RunReading) -> Queue:
    unread = [group for group in reading.groups if group.unread]
    return Queue(
        demand=reading.demand,
        next=reading.next,
        claims=dict(sorted(Counter(reading.claims.values()).items())),
        published=reading.published,
        unread=len(unread),
        read=len(reading.groups) - len(unread),
        oldest_unread_s=max(reading.time_s - unread[0].published_s, 0.0) if unread else None,
    )


def _stored(reading: RunReading) -> Stored:
    finished = sum(trajectory.finished for trajectory in reading.trajectories.values())
    return Stored(
        open=len(reading.trajectories) - finished,
        finished=finished,
        tokens=sum(trajectory.tokens for trajectory in reading.trajectories.values()),
        bytes_used=reading.bytes_used,
        bytes_limit=reading.bytes_limit,
    )


def _staleness(version: int | None, groups: Iterable[WaitingGroup]) -> Staleness | None:
    if version is None:
        return None
    behind = [max(version - waiting.group.policy_version, 0) for waiting in groups]
    return Staleness(sum(behind) / len(behind), max(behind)) if behind else None


def _notes(reading: RunReading, roles: Sequence[RoleStatus]) -> Iterable[str]:
    if not roles and reading.policy is None:
        yield f"nothing of run {reading.run} is in the store yet"
        return
    for role in roles:
        if role.alive == "gone" and (role.claims or role.age_s < _FORGOTTEN_S):
            plural = "s" if role.claims > 1 else ""
            held = f" and holds {role.claims} claimed group{plural}" if role.claims else ""
            yield f"{role.name} has been silent for {span(role.age_s)}{held}"
    if not any(role.name == "trainer" for role in roles):
        yield "no trainer has sent a heartbeat"
    if not any(role.name.startswith("worker/") for role in roles):
        yield "no rollout worker has sent a heartbeat"
    if reading.policy is None:
        yield "no policy is set yet; the trainer sets it before it asks for groups"
    if reading.bytes_limit and reading.bytes_used and reading.bytes_used > _NEARLY_FULL * reading.bytes_limit:
        yield f"the store uses {size(reading.bytes_used)} of {size(reading.bytes_limit)}"


def span(seconds: float) -> str:
    """A time span in its two largest units at most: 3 s, 4 min 10 s, 2 h 5 min, 3 d 1 h."""
    whole = int(seconds)
    for unit, small, name, below in ((86_400, 3_600, "d", "h"), (3_600, 60, "h", "min"), (60, 1, "min", "s")):
        if whole >= unit:
            rest = whole % unit // small
            return f"{whole // unit} {name}" + (f" {rest} {below}" if rest else "")
    return f"{whole} s"


def size(count: int) -> str:
    """Bytes in the largest binary unit that leaves a whole number."""
    power = min(int(math.log(count, 1024)), 4) if count > 0 else 0
    value = count / 1024**power
    return f"{value:.0f} B" if power == 0 else f"{value:.1f} {'KMGT'[power - 1]}iB"


def _number(payload: Mapping[str, object], key: str) -> float | None:
    value = payload.get(key)
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good and isinstance(value, int | float) else None


def _int(payload: Mapping[str, object], key: str) -> int | None:
    value = _number(payload, key)
    return None if value is None else int(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
