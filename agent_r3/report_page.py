"""The report of a training run as one HTML file: figures by step, failures, a few episodes, the configuration."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from agent_r3 import report_charts as charts
from agent_r3 import report_html as html
from agent_r3.archive import EpisodeInfo, episode_step, list_episodes, read_info
from agent_r3.report import Steps, Summary, cached_share, number, share

_EPISODES_SHOWN = 8


def render(run_folder: Path, config: Mapping[str, Any], steps: Steps, summary: Summary) -> str:
    """The page. Episodes are shown where the run archived any."""
    name = str(config.get("run", {}).get("name", run_folder.name))
    written = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
    sections = (
        html.tiles(_tiles(summary)),
        html.section(
            "Figures by step", f"<p class='note'>{_caution(config)}</p>{html.figures(_figures(steps, summary))}"
        ),
        html.section("Failures of the infrastructure", _failures(summary)),
        html.section("A few episodes", _episodes(run_folder)),
        html.section("Configuration", f"<details><summary>config.yaml</summary><pre>{escape(written)}</pre></details>"),
    )
    return html.page(f"agent_r3 run {name}", name, _what(config, summary), sections)


def _what(config: Mapping[str, Any], summary: Summary) -> str:
    train, rollout = config.get("train", {}), config.get("rollout", {})
    parts = [
        f"model <b>{escape(str(config.get('model', {}).get('path', '?')))}</b>",
        f"tasks <b>{escape(str(config.get('tasks', {}).get('dataset', '?')))}</b>",
        f"<b>{rollout.get('groups_per_step', '?')} x {rollout.get('samples_per_task', '?')}</b> episodes a step",
        f"routing <b>{escape(str(train.get('routing', '?')))}</b>",
        f"rollout in <b>{escape(str(config.get('engine', {}).get('dtype', '?')))}</b>, "
        f"trainer in <b>{escape(str(train.get('dtype', '?')))}</b>",
        f"learning rate <b>{train.get('lr', '?')}</b>",
        f"seed <b>{summary['seed']}</b>",
    ]
    return " · ".join(parts)


def _caution(config: Mapping[str, Any]) -> str:
    tiny = "tiny" in Path(str(config.get("model", {}).get("path", ""))).name
    text = (
        "Rewards are training rewards: hidden tests on the tasks the policy is trained on, not generalisation. "
        "KL is heavy-tailed (rare route flips make the outliers), so read the pooled figures and the largest ratio; "
        "single steps differ little. Both curves of a pair come from the same samples."
    )
    if tiny:
        text += (
            " The tiny policy was warmed up on these same tasks: what the curve shows is that the loop learns. "
            "No benefit of replay for learning can be seen at this scale, and none is claimed."
        )
    return text


def _tiles(summary: Summary) -> list[html.Tile]:
    total = summary["wall_s"].get("step")
    rewards = f"{number(summary['reward_first3'])} → {number(summary['reward_last3'])}"
    return [
        ("training reward", rewards, "first, last 3 steps"),
        ("steps", number(summary["steps"]), f"{number(summary['episodes'])} episodes"),
        ("turns", number(summary["turns_mean"]), "mean of an episode"),
        ("routing rows", share(summary["r3_coverage"]), f"{number(summary['rows_missing'])} missing"),
        ("KL with replay", number(summary["kl_replay"]), f"{number(summary['kl_native'])} without"),
        ("F(2) with replay", number(summary["f2_replay"]), f"{number(summary['f2_native'])} without"),
        ("largest ratio", number(summary["max_ratio_replay"]), f"{number(summary['max_ratio_native'])} without replay"),
        ("routers that differ", share(summary["route_mismatch"]), "trainer's own choice against the rollout's"),
        (
            "prefix cache",
            share(cached_share(summary)),
            f"{number(summary['reprefilled_tokens'])} tokens prefilled again",
        ),
        ("wall time", f"{total / 60:.1f} min" if total else "-", "all steps"),
    ]


def _figures(steps: Steps, summary: Summary) -> Iterable[html.Figure]:
    yield (
        "Training reward",
        charts.lines(steps, [("mean reward", "train/reward_mean")], "mean reward", ylim=(-0.03, 1.03)),
        "Mean over all episodes of the step, also of groups left out of the loss.",
    )
    yield (
        "Pass@1 on the held set",
        charts.banded(steps, "eval/pass@1", ("eval/pass@1_low", "eval/pass@1_high"), "Pass@1", ylim=(-0.03, 1.03)),
        "Evaluations of the policy during training, with their 95% interval over the held set's tasks.",
    )
    yield from _replay_figures(steps, summary)
    yield from _rollout_figures(steps)
    yield "Entropy", charts.lines(steps, [("entropy", "train/entropy")], "nat"), "Mean over sampled tokens."
    yield "Gradient norm", charts.lines(steps, [("norm", "train/grad_norm")], "before clipping"), ""
    groups = [(label, charts.series(steps, f"train/groups_{label}")) for label in ("kept", "equal")]
    yield (
        "Groups",
        charts.stacked(steps, groups, "groups"),
        "Kept for training, or of equal rewards and so without a gradient.",
    )


def _replay_figures(steps: Steps, summary: Summary) -> Iterable[html.Figure]:
    pooled = {name: (summary[f"{name}_replay"], summary[f"{name}_native"]) for name in ("kl", "f2", "max_ratio")}
    yield (
        "KL between rollout and trainer",
        charts.pair(steps, "r3/kl_replay", "r3/kl_native", "KL (nat)", pooled["kl"]),
        "mean(r - 1 - log r) on sampled tokens, r = trainer's probability over the rollout's.",
    )
    yield (
        "F(2)",
        charts.pair(steps, "r3/f2_replay", "r3/f2_native", "share of tokens", pooled["f2"]),
        "Share of sampled tokens whose ratio is above 2 or below 1/2.",
    )
    yield (
        "Largest ratio",
        charts.pair(steps, "r3/max_ratio_replay", "r3/max_ratio_native", "max(r, 1/r)", pooled["max_ratio"], "run's"),
        "The worst sampled token of each step.",
    )
    mismatch = [(level, f"r3/mismatch_{level}") for level in ("routers", "tokens", "sequences")]
    yield (
        "Routing mismatch",
        charts.lines(steps, mismatch, "share that differs", log=True),
        "Expert sets that the trainer would choose by itself and the rollout did not; replay removes the difference.",
    )


def _rollout_figures(steps: Steps) -> Iterable[html.Figure]:
    yield (
        "Prompt tokens by origin",
        charts.stacked(steps, _cache_parts(steps), "tokens"),
        "Tokens sent to the engine: served from its prefix cache, new, or of earlier turns and computed again.",
    )
    stages = [stage for stage in charts.kinds(steps, "perf/", "_s") if stage not in ("step", "rollout")]
    yield (
        "Time of a step",
        charts.stacked(steps, [(stage, charts.series(steps, f"perf/{stage}_s")) for stage in stages], "seconds"),
        "Stages of the trainer's step; it waits for the rollouts in the part called wait.",
    )
    episode_stages = charts.kinds(steps, "rollout/seconds/")
    yield (
        "Time inside episodes",
        charts.stacked(
            steps, [(stage, charts.series(steps, f"rollout/seconds/{stage}")) for stage in episode_stages], "seconds"
        ),
        "Summed over the episodes of a step, which run at the same time.",
    )
    endings = [
        (kind, charts.series(steps, f"rollout/ending/{kind}")) for kind in charts.kinds(steps, "rollout/ending/")
    ]
    yield "How episodes ended", charts.stacked(steps, endings, "episodes"), "Every ending is data and has its reward."
    yield (
        "Length",
        charts.stacked(steps, _length_parts(steps), "tokens an episode"),
        "Mean trajectory: sampled tokens carry the loss; prompts and observations do not.",
    )


def _cache_parts(steps: Steps) -> list[tuple[str, charts.FloatArray]]:
    prompt, cached, again = (
        np.nan_to_num(charts.series(steps, f"rollout/{name}_tokens")) for name in ("prompt", "cached", "reprefilled")
    )
    return [("cached", cached), ("new", np.clip(prompt - cached - again, 0, None)), ("again", again)]


def _length_parts(steps: Steps) -> list[tuple[str, charts.FloatArray]]:
    episodes = np.maximum(np.nan_to_num(charts.series(steps, "rollout/episodes")), 1)
    total, sampled = (charts.series(steps, f"rollout/{name}") / episodes for name in ("tokens", "sampled_tokens"))
    return [("sampled", sampled), ("observed", total - sampled)]


def _failures(summary: Summary) -> str:
    failures = {kind: count for kind, count in summary["infra_failures"].items() if count}
    if not failures:
        return "<p>None.</p>"
    rows = [(escape(kind), f"{count:,}") for kind, count in failures.items()]
    return (
        "<p>Each was tried again, then left out of its group; none became a reward or an observation.</p>"
        f"{html.table(('kind', 'times'), rows, numbers=(1,))}"
    )


def _episodes(run_folder: Path) -> str:
    if not (run_folder / "trajectories").is_dir():
        return "<p>The run archived no episodes (run.archive_trajectories).</p>"
    chosen = choose([(episode_step(path), read_info(path)) for path in _candidates(list_episodes(run_folder))])
    return "".join(_episode(step, info) for step, info in chosen)


def _candidates(paths: Sequence[Path]) -> list[Path]:
    """Episodes of the first, the middle and the last step: enough to see what changed, without opening every file."""
    steps = sorted({episode_step(path) for path in paths})
    wanted = {steps[0], steps[len(steps) // 2], steps[-1]}
    return [path for path in paths if episode_step(path) in wanted]


def choose(episodes: Sequence[tuple[int, EpisodeInfo]]) -> list[tuple[int, EpisodeInfo]]:
    """The longest-lived good and bad episode of each step, and the run's episode with the most turns of all."""
    chosen: dict[str, tuple[int, EpisodeInfo]] = {}
    for step in sorted({step for step, _ in episodes}):
        of_step = sorted((e for e in episodes if e[0] == step), key=lambda e: -len(e[1].turns))
        good = [e for e in of_step if e[1].good]
        bad = [e for e in of_step if not e[1].good]
        for entry in (*good[:1], *bad[:1]):
            chosen[entry[1].id] = entry
    for entry in sorted(episodes, key=lambda e: -len(e[1].turns))[:1]:
        chosen.setdefault(entry[1].id, entry)
    return list(chosen.values())[:_EPISODES_SHOWN]


def _episode(step: int, info: EpisodeInfo) -> str:
    head = (
        f"{html.badge(number(info.reward), 'good' if info.good else 'bad')} step {step} · "
        f"<b>{escape(info.task_id)}</b> · {len(info.turns)} turns, {info.tokens:,} tokens · "
        f"ended by {escape(info.ending)} · {escape(info.reason)}"
    )
    return html.episode(head, info)
