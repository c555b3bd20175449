"""Evaluations of the policy between two training steps: rank 0 asks for the held set once and waits for it.

`<run>/eval/results.jsonl` has a line for each task of each evaluation, written before its group is acknowledged. So a
trainer that is killed finds there what it had, gets delivered what it had not, and counts nothing twice; an evaluation
that is through is never made again, as long as the policy is the one that it measured.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import structlog
from pydantic import TypeAdapter

from agent_r3 import journal
from agent_r3.config import Config
from agent_r3.errors import ContractError
from agent_r3.held_set import announced_tasks, fingerprint
from agent_r3.statistics import pass_at_1
from agent_r3.store import Delivery, GroupReader

log = structlog.get_logger(__name__)

_RESOLVED = 1.0  # the reward of an episode that resolved its task
_WAIT_SLICE_S = 2.0
_POLL_S = 0.2
_ROLE = "trainer"


@dataclass(frozen=True, slots=True)
class TaskResult:
    """One line of `results.jsonl`: the episodes of one task in one evaluation."""

    step: int  # training steps made before
    policy_version: int
    tasks: int  # of the held set
    index: int  # of the group; task and sample are in its trajectories' ids
    task_id: str
    rewards: tuple[float, ...]  # of the episodes that were graded
    turns: int  # of these together
    infra_failures: Mapping[str, int] = field(default_factory=dict)


_RESULT = TypeAdapter(TaskResult)


class Evaluator:
    """Makes evaluations. Groups of the evaluation after s steps have the indices s*T .. (s+1)*T-1 for T held tasks.

    `idle` is called while waiting; it may raise Stopped, and what has come by then is kept.
    """

    def __init__(self, store: GroupReader, config: Config, idle: Callable[[], None]) -> None:
        """`store` and `config` are the evaluation's own (`held_set.evaluation_config`)."""
        self._store = store
        self._config = config
        self._idle = idle
        self._path = config.run.folder / "results.jsonl"
        self._results: dict[int, dict[int, TaskResult]] = {}  # step -> index -> result
        for result in journal.read(self._path, _RESULT, "agent-r3 trainer"):
            self._results.setdefault(result.step, {})[result.index] = result

    def take_up(self, lost_after: int | None) -> None:
        """Drop, before workers start again, what this process shall not go on with.

        That is an evaluation with other settings, and those of policies after `lost_after` steps, which no checkpoint
        and no store remembers; None where nothing is lost.
        """

        def lost(step: object) -> bool:
            return lost_after is not None and isinstance(step, int) and step > lost_after

        self._drop(lambda result: lost(result.step))
        under_way = self._under_way()
        if under_way and (under_way["evaluating"] != fingerprint(self._config) or lost(under_way["step"])):
            self._store.reset_position(0)
            self._store.heartbeat(_ROLE, {})

    def known(self, step: int) -> dict[str, float] | None:
        """The figures of an evaluation that is through; None of any other."""
        results = list(self._results.get(step, {}).values())
        return figures(results) if results and len(results) == results[0].tasks else None

    def evaluate(self, step: int, version: int, weights: str) -> dict[str, float]:
        """Figures of the policy that the engines serve. Goes on with this evaluation where it was under way already.

        Raises Stopped out of `idle`; ContractError for a group of another policy version, or a task that comes twice.
        """
        began = time.monotonic()
        tasks = self._held_tasks()
        marker = {
            **{"evaluating": fingerprint(self._config), "tasks": tasks},
            **{"step": step, "policy_version": version},
        }
        wanted = range(step * tasks, (step + 1) * tasks)
        if self._under_way() != marker:
            self._begin(step, wanted.start, version, weights)
            self._store.heartbeat(_ROLE, marker)
        self._store.set_demand(wanted.stop)
        results = self._results.setdefault(step, {})
        while len(results) < tasks:
            self._idle()
            for delivery in self._store.read(tasks, _WAIT_SLICE_S):
                self._take(delivery, step, version, tasks)
            self._store.heartbeat(_ROLE, marker)
        found = figures(list(results.values()))
        log.info("evaluated", step=step, seconds=round(time.monotonic() - began, 1), **found)
        return found

    def _held_tasks(self) -> int:
        """Tasks of the held set, which only the workers have; waits for one to say."""
        said = False
        while (tasks := announced_tasks(self._store.roles(), self._config)) is None:
            self._idle()
            if not said:
                log.info("waiting for a rollout worker with the held set", evaluation=fingerprint(self._config))
            said = True
            time.sleep(_POLL_S)
        return tasks

    def _under_way(self) -> Mapping[str, object]:
        """The evaluation that the store is at; {} for none."""
        role = self._store.roles().get(_ROLE)
        return {} if role is None else role.payload

    def _begin(self, step: int, position: int, version: int, weights: str) -> None:
        """Start from nothing; whatever the store still had of another evaluation goes."""
        self._drop(lambda result: result.step == step)
        self._store.reset_position(position)
        self._store.set_policy(version, weights)

    def _take(self, delivery: Delivery, step: int, version: int, tasks: int) -> None:
        group, results = delivery.group, self._results[step]
        if group.policy_version != version:
            raise ContractError(
                f"evaluation after {step} steps: group {group.id} ({group.task_id}) comes from policy version "
                f"{group.policy_version}, the trainer is at {version}"
            )
        if group.index not in results:  # else the trainer was killed between its line and its acknowledgement
            if any(result.task_id == group.task_id for result in results.values()):
                raise ContractError(
                    f"evaluation after {step} steps: task {group.task_id} came twice; do all rollout workers have the "
                    f"same {tasks} tasks?"
                )
            result = TaskResult(
                step=step,
                policy_version=version,
                tasks=tasks,
                index=group.index,
                task_id=group.task_id,
                rewards=group.rewards,
                turns=int(delivery.seconds.get("turns", 0)),
                infra_failures=dict(group.infra_failures),
            )
            journal.append(self._path, asdict(result))
            results[group.index] = result
        self._store.ack([delivery])

    def _drop(self, unwanted: Callable[[TaskResult], bool]) -> None:
        results = [result for of_step in self._results.values() for result in of_step.values()]
        kept = [result for result in results if not unwanted(result)]
        if len(kept) == len(results):
            return
        fresh = self._path.with_suffix(".tmp")
        fresh.unlink(missing_ok=True)
        fresh.touch()
        for result in kept:
            journal.append(fresh, asdict(result))
        fresh.replace(self._path)
        self._results = {}
        for result in kept:
            self._results.setdefault(result.step, {})[result.index] = result


def figures(results: Sequence[TaskResult]) -> dict[str, float]:
    """`eval/*` of one evaluation. Without a graded episode there is no pass@1. Pure."""
    samples = [[float(reward >= _RESOLVED) for reward in result.rewards] for result in results if result.rewards]
    episodes = sum(map(len, samples))
    found = {"eval/policy_version": float(results[0].policy_version), "eval/episodes": float(episodes)}
    if samples:
        rate = pass_at_1(samples)
        found |= {
            "eval/pass@1": rate.mean,
            "eval/pass@1_se": rate.se,
            "eval/pass@1_low": rate.low,
            "eval/pass@1_high": rate.high,
            "eval/tasks": float(rate.instances),
            "eval/turns_mean": sum(result.turns for result in results) / episodes,
        }
    failures: Counter[str] = Counter()
    for result in results:
        failures.update(result.infra_failures)
    return found | {f"eval/infra/{kind}": float(count) for kind, count in failures.items()}
