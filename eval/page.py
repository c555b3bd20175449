"""The report of an evaluation as one HTML file."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import yaml

from agent_r3 import report_html as html
from agent_r3.archive import read_info, transcript_path
from agent_r3.eval import charts, wording
from agent_r3.eval.folder import episode_id
from agent_r3.eval.summary import Instance, Part, Report, Sample
from agent_r3.report import number
from agent_r3.statistics import PassRate

_OPEN_UP_TO = 40  # instances: with more, the groups of the table are folded
_PARTS_DRAWN = 24
_TRANSCRIPTS = 8
_REASON_CHARS, _ID_CHARS = 300, 100


def render(folder: Path, config: Mapping[str, Any], report: Report) -> str:
    """The page. Transcripts are shown where the run archived any."""
    name = ", ".join(report.models)
    written = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
    notes = "".join(f"<li>{escape(note)}</li>" for note in wording.notes(report))
    sections = (
        html.tiles(_tiles(report)),
        f'<ul class="notes">{notes}</ul>' if notes else "",
        html.section("Figures", html.figures(_figures(report))),
        *(
            html.section(f"By {heading}", _parts(heading, parts))
            for heading, parts in (("repository", report.by_repo), ("difficulty", report.by_difficulty))
            if parts
        ),
        html.section("Effort", _effort(report)) if report.episodes else "",
        html.section("Failures of the infrastructure", _infrastructure(report)),
        html.section("Gold patches that fail here", _gold(report)) if report.gold_excluded else "",
        html.section("Instances", _instances(report)),
        html.section("A few episodes", _transcripts(folder, report)),
        html.section("Configuration", f"<details><summary>config.yaml</summary><pre>{escape(written)}</pre></details>"),
    )
    return html.page(f"agent_r3 evaluation of {name}", f"Evaluation of {name}", _what(config, report), sections)


def _what(config: Mapping[str, Any], report: Report) -> str:
    parts = [
        f"dataset <b>{escape(report.dataset)}</b>",
        f"<b>{wording.counted(report.samples, 'sample')}</b> per instance",
    ]
    if report.episodes:  # predictions from elsewhere know nothing of our agent
        agent = config.get("agent") or {}
        sampling = (config.get("eval") or {}).get("sampling") or config.get("sampling") or {}
        parts += [
            f"temperature <b>{escape(str(sampling.get('temperature', '?')))}</b>",
            f"at most <b>{escape(str(agent.get('max_turns', '?')))}</b> turns "
            f"and <b>{escape(number(agent.get('max_tokens')))}</b> tokens",
            f"tools <b>{escape(', '.join(map(str, agent.get('tools', ()))))}</b>",
        ]
    return " · ".join(parts)


def _tiles(report: Report) -> Iterable[html.Tile]:
    rate, predicted = report.pass_at_1, sum(report.verdicts.values())
    yield "Pass@1", wording.percent(rate.mean), f"95% interval {wording.interval(rate)}"
    yield "standard error", wording.error(rate), "clustered by instance"
    for estimate in report.pass_at_k[-1:] if len(report.pass_at_k) > 1 else ():
        below = f"unbiased, {wording.counted(estimate.instances, 'instance')}"
        yield f"pass@{estimate.k}", wording.percent(estimate.mean), below
    yield "resolved", f"{report.verdicts['resolved']:,}", f"of {wording.counted(predicted, 'graded prediction')}"
    of = report.instances_in_dataset
    yield "instances", f"{report.instances_graded:,}", f"of {of:,} in the dataset" if of is not None else "graded"
    left_out = len(report.infrastructure.excluded)
    mended = wording.counted(report.infrastructure.mended, "failure")
    yield "left out", f"{left_out:,}", f"samples: infrastructure failed; {mended} mended by a retry"
    for name in ("turns", "sampled_tokens", "seconds"):
        if spread := report.episodes.get(name):
            mean, median, p90 = wording.spread(spread)
            yield f"{wording.EFFORT_NAMES[name]} an episode", mean, f"median {median}, 90% below {p90}"


def _figures(report: Report) -> Iterable[html.Figure]:
    everything = [("all", report.pass_at_1)]
    yield (
        "Verdicts",
        charts.stacked_rows(
            [wording.VERDICT_NAMES[verdict] for verdict in report.verdicts],
            [
                ("", charts.COLORS[verdict], [count if of == verdict else 0 for of in report.verdicts])
                for verdict, count in report.verdicts.items()
            ],
            "predictions",
            "verdicts",
            legend=False,
        ),
        "Every graded prediction. Failures of the infrastructure are no verdict and not in here.",
    )
    yield (
        "Pass@1 by difficulty",
        charts.intervals(everything + _rows(report.by_difficulty), "difficulty") if report.by_difficulty else None,
        "With 95% intervals; instances in brackets.",
    )
    more = len(report.by_repo) - _PARTS_DRAWN
    yield (
        "Pass@1 by repository",
        charts.intervals(everything + _rows(report.by_repo), "repository"),
        "With 95% intervals; instances in brackets." + (f" {more} smaller ones are in the table." if more > 0 else ""),
    )
    yield (
        "pass@k",
        charts.pass_at_ks(report.pass_at_k),
        "Chance that one of k samples resolves the instance, unbiased; the band is two standard errors.",
    )
    yield from _episode_figures([sample for instance in report.instances for sample in instance.samples])


def _rows(parts: Sequence[Part]) -> list[tuple[str, PassRate]]:
    return [(part.name, part.rate) for part in parts[:_PARTS_DRAWN]]


def _episode_figures(samples: Sequence[Sample]) -> Iterable[html.Figure]:
    for name, caption in (
        ("turns", "Model calls of an episode."),
        ("sampled_tokens", "Tokens that the model wrote in an episode."),
        ("seconds", "Wall time of an episode, grading not included."),
    ):
        graded = [(s, getattr(s, name)) for s in samples if s.verdict is not None and getattr(s, name) is not None]
        parts = [
            (label, color, [value for sample, value in graded if sample.resolved is resolved])
            for label, color, resolved in (
                ("resolved", charts.COLORS["resolved"], True),
                ("not resolved", charts.NOT_RESOLVED, False),
            )
        ]
        title = wording.EFFORT_NAMES[name]
        yield title.capitalize(), charts.histogram(parts, title, name, whole=name == "turns"), caption
    ended = [sample for sample in samples if sample.ending is not None]
    endings = [ending for ending, _ in Counter(str(sample.ending) for sample in ended).most_common()]
    counts = Counter((sample.ending, sample.verdict) for sample in ended)
    parts = [
        (
            wording.VERDICT_NAMES[verdict] if verdict else "not graded",
            color,
            [counts[ending, verdict] for ending in endings],
        )
        for verdict, color in charts.COLORS.items()
    ]
    yield (
        "How episodes ended",
        charts.stacked_rows(endings, parts, "episodes", "endings"),
        "Whatever ended an episode, the patch that it left was graded.",
    )


def _parts(heading: str, parts: Sequence[Part]) -> str:
    headings = (heading, "instances", "predictions", "Pass@1", "standard error", "95% interval")
    rows = [
        (
            _id(part.name),
            f"{part.rate.instances:,}",
            f"{part.rate.samples:,}",
            wording.percent(part.rate.mean),
            wording.error(part.rate),
            wording.interval(part.rate),
        )
        for part in parts
    ]
    return html.table(headings, rows, numbers=range(1, 6))


def _effort(report: Report) -> str:
    rows = [
        (escape(wording.EFFORT_NAMES[name]), *wording.spread(spread), f"{spread.episodes:,}")
        for name, spread in report.episodes.items()
    ]
    return html.table(("an episode", "mean", "median", "90% are below", "episodes"), rows, numbers=range(1, 5))


def _infrastructure(report: Report) -> str:
    infrastructure = report.infrastructure
    if not infrastructure.failures:
        return "<p>None.</p>"
    told = (
        f"<p>{wording.counted(infrastructure.failures, 'failure')}, retries included; {infrastructure.mended:,} mended "
        f"by trying again. {wording.counted(len(infrastructure.excluded), 'sample')} left out of all figures.</p>"
    )
    rows = [
        (_id(left_out.instance_id), str(left_out.sample), escape(left_out.stage), escape(left_out.kind), _reason(error))
        for left_out in infrastructure.excluded
        for error in (left_out.error,)
    ]
    headings = ("instance", "sample", "stage", "kind", "error")
    return told + (html.table(headings, rows, numbers=(1,)) if rows else "")


def _gold(report: Report) -> str:
    rows = [(_id(name), _reason(reason)) for name, reason in report.gold_excluded.items()]
    return (
        "<p>No agent can resolve these on this machine, so they are left out of all figures.</p>"
        f"{html.table(('instance', 'what the gold patch gave'), rows)}"
    )


def _instances(report: Report) -> str:
    groups: dict[str, list[Instance]] = {}
    for instance in report.instances:
        groups.setdefault(instance.repo or "unknown", []).append(instance)
    opened = " open" if len(report.instances) <= _OPEN_UP_TO else ""
    return "".join(
        f"<details class='group'{opened}><summary><b>{escape(wording.shortened(repo, _ID_CHARS))}</b> · "
        f"{_resolved(members)}</summary>{_instance_table(members, report)}</details>"
        for repo, members in groups.items()
    )


def _resolved(members: Sequence[Instance]) -> str:
    graded = [instance.pass_rate for instance in members if instance.pass_rate is not None]
    resolved = sum(graded)
    shown = f"{resolved:.0f}" if resolved == round(resolved) else f"{resolved:.1f}"
    return f"{shown} of {wording.counted(len(graded), 'instance')} resolved"


def _instance_table(members: Sequence[Instance], report: Report) -> str:
    difficulty, episodes = bool(report.by_difficulty), bool(report.episodes)
    headings = [
        "instance",
        *(["difficulty"] if difficulty else []),
        "verdict",
        "tests passed",
        *(["turns", "tokens", "seconds", "ended by"] if episodes else []),
        "why",
    ]
    rows = [
        (
            _id(instance.id) if place == 0 else "",
            *([escape(instance.difficulty) if place == 0 else ""] if difficulty else []),
            _verdict(sample),
            f"{sample.tests_passed:,}/{sample.tests:,}" if sample.tests else "",
            *(_episode_cells(sample) if episodes else []),
            _reason(sample.reason + _remarks(sample)),
        )
        for instance in members
        for place, sample in enumerate(instance.samples)
    ]
    right = {"tests passed", "turns", "tokens", "seconds"}
    return html.table(headings, rows, numbers=[place for place, name in enumerate(headings) if name in right])


def _episode_cells(sample: Sample) -> tuple[str, str, str, str]:
    seconds = f"{sample.seconds:,.1f}" if sample.seconds is not None else ""
    return number(sample.turns), number(sample.sampled_tokens), seconds, escape(sample.ending or "")


def _remarks(sample: Sample) -> str:
    touched = f" · changes {wording.listed(sample.tests_touched)}" if sample.tests_touched else ""
    return touched + (" · flaky" if sample.flaky else "")


def _verdict(sample: Sample) -> str:
    if sample.verdict is None:
        return html.badge("not graded", "none")
    return html.badge(wording.VERDICT_NAMES[sample.verdict], sample.verdict)


def _id(name: str) -> str:
    return f"<div class='id'>{escape(wording.shortened(name, _ID_CHARS))}</div>"


def _reason(text: str) -> str:
    return f"<div class='reason'>{escape(wording.shortened(text, _REASON_CHARS))}</div>"


def _transcripts(folder: Path, report: Report) -> str:
    there = [
        (instance, sample, path)
        for instance in report.instances
        for sample in instance.samples
        if (path := transcript_path(folder, episode_id((instance.id, sample.sample)))).is_file()
    ]
    if not there:
        return "<p>None were archived (run.archive_trajectories), or the predictions came from elsewhere.</p>"
    return "".join(_transcript(instance, sample, path) for instance, sample, path in choose(there))


def choose(episodes: Sequence[tuple[Instance, Sample, Path]]) -> list[tuple[Instance, Sample, Path]]:
    """Of each verdict the longest and the shortest episode, resolved first; a few in all."""
    chosen = []
    for verdict in charts.COLORS:
        of_verdict = sorted((e for e in episodes if e[1].verdict == verdict), key=lambda e: -(e[1].turns or 0))
        chosen += of_verdict[:1] + of_verdict[1:][-1:]
    return chosen[:_TRANSCRIPTS]


def _transcript(instance: Instance, sample: Sample, path: Path) -> str:
    info = read_info(path)
    head = (
        f"{_verdict(sample)} <b>{escape(wording.shortened(instance.id, _ID_CHARS))}</b>, sample {sample.sample} · "
        f"{wording.counted(len(info.turns), 'turn')}, {info.tokens:,} tokens · ended by {escape(info.ending)} · "
        f"{escape(wording.printable(sample.reason))}"
    )
    return html.episode(head, info)
