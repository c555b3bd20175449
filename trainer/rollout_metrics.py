"""What the rollout of a step was like, from its trajectories and groups. Pure sums: they add up over ranks."""

from collections import Counter
from collections.abc import Iterable, Sequence

from agent_r3.store import Delivery
from agent_r3.types import Trajectory

Sums = Counter[str]


def trajectory_sums(trajectories: Iterable[Trajectory]) -> Sums:
    """Totals over the trajectories of one rank."""
    sums: Sums = Counter()
    for trajectory in trajectories:
        sums["episodes"] += 1
        sums["turns"] += trajectory.turns
        sums["tokens"] += len(trajectory.tokens)
        sums["sampled_tokens"] += int(trajectory.loss_mask.sum())
        sums["prompt_tokens"] += trajectory.prompt_tokens
        sums["cached_tokens"] += trajectory.cached_tokens
        sums["reprefilled_tokens"] += trajectory.reprefilled_tokens
        sums[f"ending/{trajectory.ending}"] += 1
    return sums


def rollout_metrics(ranks: Iterable[Sums], deliveries: Sequence[Delivery]) -> dict[str, float]:
    """Every rank's sums and the groups of the step, as `rollout/*`, `train/reward_mean` and `perf/rollout_s`."""
    sums: Sums = Counter()
    for part in ranks:
        sums.update(part)  # unlike `+`, it keeps zeros
    rewards = [reward for delivery in deliveries for reward in delivery.group.rewards]
    metrics = {f"rollout/{name}": float(value) for name, value in sums.items() if name != "turns"}
    metrics.setdefault("rollout/episodes", 0.0)
    if sums["episodes"]:
        metrics["rollout/turns_mean"] = sums["turns"] / sums["episodes"]
    if rewards:
        metrics["train/reward_mean"] = sum(rewards) / len(rewards)
    failures: Counter[str] = Counter()
    for delivery in deliveries:
        failures.update(delivery.group.infra_failures)
    metrics |= {f"rollout/infra/{kind}": float(count) for kind, count in failures.items()}
    return metrics | _seconds(deliveries)


def _seconds(deliveries: Sequence[Delivery]) -> dict[str, float]:
    """Wall time from the first group's start to the last one's end; stages' seconds and grades summed over episodes."""
    metrics: dict[str, float] = {}
    for delivery in deliveries:
        for name, value in delivery.seconds.items():
            if name not in ("began", "ended", "grades_run", "turns"):
                metric = f"rollout/{name}" if name.startswith("grade/") else f"rollout/seconds/{name}"
                metrics[metric] = metrics.get(metric, 0.0) + value
    timed = [delivery.seconds for delivery in deliveries if {"began", "ended"} <= delivery.seconds.keys()]
    if timed:
        metrics["perf/rollout_s"] = max(s["ended"] for s in timed) - min(s["began"] for s in timed)
    graded = [delivery.seconds["grades_run"] for delivery in deliveries if "grades_run" in delivery.seconds]
    if graded:
        metrics["rollout/graded_runs"] = sum(graded)
    return metrics
