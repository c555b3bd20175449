"""What a run was: `summary.json` from its metrics, a table for the terminal, and a self-contained HTML page."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from agent_r3.errors import DataError, UserError
from agent_r3.journal import write_whole
from agent_r3.metrics import read_metrics, trained

_EVALUATION = ("pass@1", "pass@1_low", "pass@1_high", "tasks", "episodes")

Steps = Sequence[Mapping[str, float]]
Summary = dict[str, Any]


def write_report(run_folder: Path) -> Summary:
    """Write `summary.json` and `report.html` into the run's folder and return the summary.

    Raises UserError when the folder holds no run, or none with a finished step.
    """
    steps = read_metrics(run_folder)
    if not steps:
        raise DataError(f"{run_folder / 'metrics.jsonl'} has no finished step; nothing to report")
    config = read_config(run_folder)
    summary = summarize(steps, seed=int(config.get("run", {}).get("seed", 0)))
    from agent_r3.report_page import render  # draws with matplotlib

    page = render(run_folder, config, steps, summary)
    write_whole(run_folder / "summary.json", json.dumps(summary, indent=2, allow_nan=False) + "\n")
    write_whole(run_folder / "report.html", page, errors="replace")
    return summary


def read_config(run_folder: Path) -> dict[str, Any]:
    """The run's resolved configuration as it was written, also by another version. Raises UserError without one."""
    path = run_folder / "config.yaml"
    if not path.is_file():
        raise UserError(f"{run_folder} is not a run's folder: no config.yaml")
    tree = yaml.safe_load(path.read_text())
    if not isinstance(tree, dict):
        raise DataError(f"{path} does not hold sections")
    return tree


def summarize(steps: Steps, *, seed: int) -> Summary:
    """Figures for the whole run; None where no step has them.

    Means of tokens are pooled over the run's tokens (KL is heavy-tailed: single steps say little), the ratio is the
    largest of the run, counts and seconds are sums.
    """
    rewards = [step["train/reward_mean"] for step in steps if "train/reward_mean" in step]
    wall = {stage: round(total, 3) for stage, total in _sums(steps, "perf/", "_s").items()}

    def diagnosed(name: str) -> float | None:
        return _pooled(steps, name, "r3/diagnosed_tokens")

    return {
        "steps": sum(map(trained, steps)),
        "reward": rewards,
        "reward_first3": _mean(rewards[:3]),
        "reward_last3": _mean(rewards[-3:]),
        "evaluations": [
            {"step": int(step["step"]), **{name: step.get(f"eval/{name}") for name in _EVALUATION}}
            for step in steps
            if "eval/pass@1" in step
        ],
        "episodes": _count(steps, "rollout/episodes"),
        "turns_mean": _pooled(steps, "rollout/turns_mean", "rollout/episodes"),
        "r3_coverage": _pooled(steps, "r3/coverage", "rollout/tokens"),
        "rows_missing": _count(steps, "r3/rows_missing"),
        "reprefilled_tokens": _count(steps, "rollout/reprefilled_tokens"),
        "cached_tokens": _count(steps, "rollout/cached_tokens"),
        "prompt_tokens": _count(steps, "rollout/prompt_tokens"),
        "kl_replay": diagnosed("r3/kl_replay"),
        "kl_native": diagnosed("r3/kl_native"),
        "f2_replay": diagnosed("r3/f2_replay"),
        "f2_native": diagnosed("r3/f2_native"),
        "max_ratio_replay": _max(steps, "r3/max_ratio_replay"),
        "max_ratio_native": _max(steps, "r3/max_ratio_native"),
        "route_mismatch": diagnosed("r3/mismatch_routers"),
        "infra_failures": {kind: int(total) for kind, total in _sums(steps, "rollout/infra/").items()},
        "wall_s": wall,
        "seed": seed,
    }


def print_table(summary: Summary) -> None:
    """The summary on the terminal."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{summary['steps']} steps, {number(summary['episodes'])} episodes, seed {summary['seed']}")
    table.add_column("")
    for heading in ("value", "without replay"):
        table.add_column(heading, justify="right")
    table.add_row("training reward, first 3 steps", number(summary["reward_first3"]))
    table.add_row("training reward, last 3 steps", number(summary["reward_last3"]))
    for found in _ends(summary["evaluations"]):
        interval = f"{number(found['pass@1_low'])} to {number(found['pass@1_high'])}"
        table.add_row(f"pass@1 on the held set after {found['step']} steps", number(found["pass@1"]), interval)
    table.add_row("turns an episode", number(summary["turns_mean"]))
    table.add_row("routing rows present", share(summary["r3_coverage"]))
    table.add_row("KL rollout/trainer, pooled", number(summary["kl_replay"]), number(summary["kl_native"]))
    table.add_row("F(2), pooled", number(summary["f2_replay"]), number(summary["f2_native"]))
    table.add_row("largest ratio", number(summary["max_ratio_replay"]), number(summary["max_ratio_native"]))
    table.add_row("routers that would differ", "", share(summary["route_mismatch"]))
    table.add_row("prompt tokens from the cache", share(cached_share(summary)))
    table.add_row("tokens prefilled again", number(summary["reprefilled_tokens"]))
    failures = ", ".join(f"{kind} {count}" for kind, count in summary["infra_failures"].items() if count) or "none"
    table.add_row("infrastructure failures", failures)
    stages = "\n".join(f"{stage} {seconds:.1f} s" for stage, seconds in summary["wall_s"].items())
    table.add_row("wall time", stages)
    Console().print(table)


def cached_share(summary: Summary) -> float | None:
    """Prompt tokens served from the prefix cache, of all sent to the engine."""
    return summary["cached_tokens"] / summary["prompt_tokens"] if summary["prompt_tokens"] else None


def number(value: float | None) -> str:
    """Three significant digits, thousands separated; a dash for None."""
    if value is None:
        return "-"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.3g}"


def share(value: float | None) -> str:
    """Per cent; 100 % only when it is exactly that."""
    if value is None:
        return "-"
    shown = f"{100 * value:.2f}"
    return f"{shown.rstrip('0').rstrip('.')} %" if value == 1 or shown != "100.00" else "> 99.99 %"


def _ends(values: Sequence[Any]) -> Sequence[Any]:
    """The first and the last."""
    return [*values[:1], *values[1:][-1:]]


def _finite(steps: Steps, name: str) -> list[tuple[Mapping[str, float], float]]:
    return [(step, step[name]) for step in steps if name in step and math.isfinite(step[name])]


def _pooled(steps: Steps, name: str, weight: str) -> float | None:
    pairs = [(value, step.get(weight, 0.0)) for step, value in _finite(steps, name)]
    total = sum(w for _, w in pairs)
    return sum(value * w for value, w in pairs) / total if total else None


def _count(steps: Steps, name: str) -> int | None:
    values = [value for _, value in _finite(steps, name)]
    return round(sum(values)) if values else None


def _max(steps: Steps, name: str) -> float | None:
    return max((value for _, value in _finite(steps, name)), default=None)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _sums(steps: Steps, prefix: str, suffix: str = "") -> dict[str, float]:
    totals: dict[str, float] = {}
    for step in steps:
        for name, value in step.items():
            if name.startswith(prefix) and name.endswith(suffix) and math.isfinite(value):
                kind = name[len(prefix) : len(name) - len(suffix)]
                totals[kind] = totals.get(kind, 0.0) + value
    return totals
