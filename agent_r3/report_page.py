"""The report as one HTML file: no script, no external resource, everything that came from a model escaped."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from agent_r3 import report_charts as charts
from agent_r3.archive import EpisodeInfo, TurnText, episode_step, list_episodes, read_info
from agent_r3.report import Steps, Summary, cached_share, number, share

Figure = tuple[str, str | None, str]  # title, SVG or None when the run has no such metric, caption

_EPISODES_SHOWN = 8
_TEXT_CHARS = 4_000


def render(run_folder: Path, config: Mapping[str, Any], steps: Steps, summary: Summary) -> str:
    """The page. Episodes are shown where the run archived any."""
    name = str(config.get("run", {}).get("name", run_folder.name))
    figures = "".join(_figure(*parts) for parts in _figures(steps, summary))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>agent_r3 run {escape(name)}</title><style>{_CSS}</style></head><body>"
        f"<header><h1>{escape(name)}</h1><p>{_what(config, summary)}</p></header>"
        f'<section class="tiles">{_tiles(summary)}</section>'
        f"<section><h2>Figures by step</h2><p class='note'>{_caution(config)}</p>"
        f'<div class="figures">{figures}</div></section>'
        f"<section><h2>Failures of the infrastructure</h2>{_failures(summary)}</section>"
        f"<section><h2>A few episodes</h2>{_episodes(run_folder)}</section>"
        f"<section><h2>Configuration</h2><details><summary>config.yaml</summary><pre>"
        f"{escape(yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True))}</pre></details></section>"
        f"</body></html>\n"
    )


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


def _tiles(summary: Summary) -> str:
    total = summary["wall_s"].get("step")
    rewards = f"{number(summary['reward_first3'])} → {number(summary['reward_last3'])}"
    pairs = [
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
    return "".join(
        f'<div class="tile"><span>{escape(label)}</span><b>{escape(value)}</b><small>{escape(below)}</small></div>'
        for label, value, below in pairs
    )


def _figures(steps: Steps, summary: Summary) -> Iterable[Figure]:
    yield (
        "Training reward",
        charts.lines(steps, [("mean reward", "train/reward_mean")], "mean reward", ylim=(-0.03, 1.03)),
        "Mean over all episodes of the step, also of groups left out of the loss.",
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


def _replay_figures(steps: Steps, summary: Summary) -> Iterable[Figure]:
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


def _rollout_figures(steps: Steps) -> Iterable[Figure]:
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


def _figure(title: str, svg: str | None, caption: str) -> str:
    if svg is None:
        return ""
    return f"<figure><h3>{escape(title)}</h3>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def _failures(summary: Summary) -> str:
    failures = {kind: count for kind, count in summary["infra_failures"].items() if count}
    if not failures:
        return "<p>None.</p>"
    rows = "".join(f"<tr><td>{escape(kind)}</td><td>{count:,}</td></tr>" for kind, count in failures.items())
    return (
        "<p>Each was tried again, then left out of its group; none became a reward or an observation.</p>"
        f"<table><tr><th>kind</th><th>times</th></tr>{rows}</table>"
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
        good = [e for e in of_step if e[1].reward > 0]
        bad = [e for e in of_step if e[1].reward <= 0]
        for entry in (*good[:1], *bad[:1]):
            chosen[entry[1].id] = entry
    for entry in sorted(episodes, key=lambda e: -len(e[1].turns))[:1]:
        chosen.setdefault(entry[1].id, entry)
    return list(chosen.values())[:_EPISODES_SHOWN]


def _episode(step: int, info: EpisodeInfo) -> str:
    verdict = "good" if info.reward > 0 else "bad"
    head = (
        f'<span class="badge {verdict}">{number(info.reward)}</span> step {step} · <b>{escape(info.task_id)}</b> · '
        f"{len(info.turns)} turns, {info.tokens:,} tokens · ended by {escape(info.ending)} · {escape(info.reason)}"
    )
    turns = "".join(map(_turn, info.turns))
    patch = f"<h4>patch</h4><pre>{_cut(info.patch)}</pre>" if info.patch.strip() else ""
    ids = (
        f"<p class='note'>{escape(info.id)}, {info.cached_tokens:,} of {info.prompt_tokens:,} prompt tokens cached</p>"
    )
    return f"<details class='episode'><summary>{head}</summary>{ids}{turns}{patch}</details>"


def _turn(turn: TurnText) -> str:
    seconds = ", ".join(f"{name} {value:.2f} s" for name, value in turn.seconds.items())
    head = (
        f"turn {turn.index + 1} · tokens {turn.start}..{turn.start + turn.prompt + turn.sampled - 1} "
        f"({turn.prompt} new, {turn.sampled} sampled, {turn.cached_tokens} cached) · policy {turn.policy_version}"
        + (f" · {seconds}" if seconds else "")
    )
    observations = "".join(
        f"<pre class='observation{' wrong' if observation.is_error else ''}'>{_cut(observation.text)}</pre>"
        for observation in turn.observations
    )
    return f"<div class='turn'><h4>{escape(head)}</h4><pre class='sampled'>{_cut(turn.text)}</pre>{observations}</div>"


def _cut(text: str) -> str:
    if len(text) <= _TEXT_CHARS:
        return escape(text)
    half = _TEXT_CHARS // 2
    return f"{escape(text[:half])}\n[… {len(text) - 2 * half:,} characters …]\n{escape(text[-half:])}"


_CSS = """
body{font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif;color:#0f172a;background:#f8fafc;margin:0 auto;
max-width:1180px;padding:24px}
h1{margin:0;font-size:26px}h2{font-size:19px;margin:34px 0 10px}h3{font-size:14px;margin:0 0 4px}
h4{font-size:12px;font-weight:600;color:#475569;margin:14px 0 4px}
header p,.note,figcaption,small{color:#64748b}header p{margin:4px 0 18px}.note{font-size:13px;max-width:900px}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(200px,1fr));gap:10px}
.tile,figure,.episode{background:#fff;border:1px solid #e2e8f0;border-radius:8px}
.tile{padding:10px 14px;display:flex;flex-direction:column}.tile span{font-size:12px;color:#64748b}
.tile b{font-size:20px}.tile small{font-size:12px}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(480px,100%),1fr));gap:14px}
figure{margin:0;padding:12px 14px}figure svg{width:100%;height:auto;display:block}figcaption{font-size:12px}
table{border-collapse:collapse}td,th{padding:3px 18px 3px 0;text-align:left}
.episode{margin:8px 0;padding:8px 14px}summary{cursor:pointer}
.badge{display:inline-block;min-width:22px;text-align:center;border-radius:10px;padding:0 7px;color:#fff}
.badge{font-size:12px}
.good{background:#16a34a}.bad{background:#dc2626}
pre{font:12px/1.45 ui-monospace,"SF Mono",Menlo,Consolas,monospace;background:#f1f5f9;border-radius:6px;
padding:8px 10px;margin:4px 0;white-space:pre-wrap;overflow-wrap:anywhere;max-height:420px;overflow:auto}
.sampled{background:#eff6ff;border-left:3px solid #2563eb}.observation{border-left:3px solid #94a3b8}
.observation.wrong{background:#fef2f2;border-left-color:#dc2626}
"""
