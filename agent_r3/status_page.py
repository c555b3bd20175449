"""The live page of a run as HTML: whole by itself, drawn by the server, refreshed in place by a few lines of script."""

import base64
import hashlib
import math
import time
from collections.abc import Iterable, Sequence
from html import escape

from agent_r3 import report_html as html
from agent_r3.status import Metrics, Queue, RoleStatus, RunStatus, size, span
from agent_r3.status_charts import Curve, compact, plot
from agent_r3.status_feed import Sample, View

NONE = "–"
_SHARE = (0.0, 1.0)

_SCRIPT = """
async function refresh() {
  try {
    const answer = await fetch("status.json", {cache: "no-store"});
    if (!answer.ok) throw new Error(answer.status);
    for (const [id, html] of Object.entries((await answer.json()).html)) {
      const part = document.getElementById(id);
      const scrolled = [...part.querySelectorAll(".table")].map(table => table.scrollLeft);
      part.innerHTML = html;
      part.querySelectorAll(".table").forEach((table, i) => table.scrollLeft = scrolled[i] || 0);
    }
  } catch (problem) {
    document.getElementById("live").textContent = "agent-r3 status --web does not answer; the page is as it was last";
  }
  setTimeout(refresh, 2000);
}
setTimeout(refresh, 2000);
"""

_STYLE = """
.alive{background:#15803d}.late{background:#b45309}.gone{background:#dc2626}.ended{background:#64748b}
.problem{color:#b91c1c}#figures{margin-top:14px}#roles td{white-space:nowrap}
"""

POLICY = (
    "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; "
    f"script-src 'sha256-{base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()}'"
)
"""Content-Security-Policy of the page: its own script and nothing else, from nowhere else."""


def page(view: View, problem: str | None) -> str:
    """The document, with everything in place before the script has run."""
    parts = fragments(view, problem)

    def held(name: str) -> str:
        return f'<div id="{name}">{parts[name]}</div>'

    sections = (
        held("notes"),
        held("tiles"),
        held("figures"),
        html.section("Roles", held("roles")),
        html.section("Groups", held("queues")),
        html.section("Failures of the infrastructure", held("failures")),
        f"<style>{_STYLE}</style><script>{_SCRIPT}</script>",
    )
    title = f"{view.status.run} · agent_r3 status"
    return html.page(title, view.status.run, f'<span id="live">{parts["live"]}</span>', sections)


def fragments(view: View, problem: str | None) -> dict[str, str]:
    """The parts of the page that change, by the id of their element. `problem`: why there is nothing newer."""
    status = view.status
    return {
        "live": _live(status, problem),
        "notes": _notes(status.notes),
        "tiles": html.tiles(_tiles(status)),
        "figures": html.figures(_figures(view)),
        "roles": _roles(status.roles),
        "queues": _queues(status),
        "failures": _failures(status),
    }


def _live(status: RunStatus, problem: str | None) -> str:
    at = time.strftime("%H:%M:%S UTC", time.gmtime(status.time_s))
    if problem is not None:
        return f'<span class="problem">as of {at}; since then: {escape(problem)}</span>'
    return f"as of {at}"


def _notes(notes: Sequence[str]) -> str:
    entries = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<ul class="notes">{entries}</ul>' if entries else ""


def _tiles(status: RunStatus) -> Iterable[html.Tile]:
    rates, queue, stored, metrics = status.rates, status.queue, status.stored, status.metrics or {}
    running = sum(role.episodes_running or 0 for role in status.roles if role.alive == "alive")
    window = f"over {span(rates.window_s)}" if rates.window_s is not None else "since the workers started"
    yield "training steps", number(status.step), f"of {status.steps}" if status.steps else "made"
    yield "policy version", number(status.policy_version), "that rollouts sample from"
    if "train/reward_mean" in metrics:
        yield "training reward", compact(metrics["train/reward_mean"]), "last step, mean of its episodes"
    yield "episodes running", number(running), f"{sum(queue.claims.values())} groups with workers"
    yield "episodes a minute", number(rates.episodes_per_min), window
    yield "tokens a second", number(rates.tokens_per_s), "appended, prompts and observations included"
    yield "groups waiting", number(queue.unread), f"unread by the trainer; {queue.read} read"
    if status.staleness is not None:
        yield "staleness", compact(status.staleness.mean), f"versions behind, at most {status.staleness.max}"
    yield "infrastructure failures", number(sum(status.failures.values())), "of workers since they started"
    if stored.bytes_used is not None:
        limit = f" of {size(stored.bytes_limit)}" if stored.bytes_limit else ""
        yield "store", size(stored.bytes_used) + limit, f"{stored.open} open, {stored.finished} finished trajectories"


def _figures(view: View) -> Iterable[html.Figure]:
    lines = view.lines
    rewards = _by_step(lines, "train/reward_mean")
    if rewards:
        reward = plot([Curve("mean reward", rewards)], "step", ylim=_SHARE)
    else:
        groups = sorted((group.index, group.reward) for group in view.groups)
        reward = plot([Curve("mean reward", groups)], "group", ylim=_SHARE)
    yield "Training reward", reward, "Mean of a step's episodes." if rewards else "Mean of a group's episodes."
    band = [
        (line["step"], line["eval/pass@1_low"], line["eval/pass@1_high"])
        for line in lines
        if {"eval/pass@1_low", "eval/pass@1_high"} <= line.keys()
    ]
    pass_at_1 = plot([Curve("Pass@1", _by_step(lines, "eval/pass@1"))], "step", ylim=_SHARE, band=band)
    yield "Pass@1 on the held set", pass_at_1, "With its 95% interval."
    kl = [("with replay", "r3/kl_replay"), ("without", "r3/kl_native")]
    curves = [Curve(label, _by_step(lines, name)) for label, name in kl]
    yield "KL between rollout and trainer", plot(curves, "step", log=True), "nat, on the step's sampled tokens."
    yield from _live_figures(view.samples)


def _live_figures(samples: Sequence[Sample]) -> Iterable[html.Figure]:
    long = len(samples) > 1 and samples[-1].time_s - samples[0].time_s > 120
    unit_s, axis = (60, "minutes until now") if long else (1, "seconds until now")

    def over_time(*curves: tuple[str, Sequence[float | None]]) -> str | None:
        now = samples[-1].time_s if samples else 0.0
        times = [(sample.time_s - now) / unit_s for sample in samples]
        return plot([Curve(label, _points(times, values)) for label, values in curves], axis)

    def values(name: str) -> list[float | None]:
        return [getattr(sample, name) for sample in samples]

    yield (
        "Tokens a second",
        over_time(("tokens/s", values("tokens_per_s"))),
        "Appended to trajectories, mean of half a minute.",
    )
    yield (
        "Episodes a minute",
        over_time(("episodes/min", values("episodes_per_min"))),
        "Finished, mean of half a minute.",
    )
    yield (
        "Groups",
        over_time(*((name, values(name)) for name in ("claimed", "unread", "read"))),
        "With workers, waiting for the trainer, and in its hands.",
    )
    yield "Episodes running", over_time(("running", values("episodes_running"))), ""
    staleness = over_time(("versions", values("staleness")))
    yield "Staleness", staleness, "Versions that waiting groups are behind the policy, mean."
    kinds = sorted({kind for sample in samples for kind in sample.failures})
    failures = over_time(*((kind, [sample.failures.get(kind, 0) for sample in samples]) for kind in kinds))
    yield "Failures by kind", failures, "Of workers since they started."


def _by_step(lines: Sequence[Metrics], name: str) -> list[tuple[float, float]]:
    return [(line["step"], line[name]) for line in lines if name in line]


def _points(xs: Sequence[float], values: Sequence[float | None]) -> list[tuple[float, float]]:
    return [(x, math.nan if value is None else value) for x, value in zip(xs, values, strict=True)]


def _roles(roles: Sequence[RoleStatus]) -> str:
    if not roles:
        return "<p class='note'>No role has sent a heartbeat.</p>"
    headings = (
        "role",
        "",
        "heard",
        "state",
        "version",
        "step",
        "running",
        "episodes",
        "groups",
        "failures",
        "up",
        "at",
    )
    rows = [
        (
            escape(role.name),
            html.badge(role.alive, role.alive),
            f"{span(role.age_s)} ago",
            escape(role.state or NONE),
            *map(number, (role.policy_version, role.step, role.episodes_running, role.episodes, role.claims)),
            number(sum(role.failures.values())),
            span(role.uptime_s) if role.uptime_s is not None else NONE,
            escape(role.where or NONE),
        )
        for role in roles
    ]
    return html.table(headings, rows, numbers=range(4, 10))


def _queues(status: RunStatus) -> str:
    def row(name: str, queue: Queue) -> tuple[str, ...]:
        held = ", ".join(f"{escape(worker)} {count}" for worker, count in queue.claims.items()) or NONE
        oldest = span(queue.oldest_unread_s) if queue.oldest_unread_s is not None else NONE
        counts = (queue.demand, queue.next, queue.published, queue.unread, queue.read)
        return name, *map(number, counts), oldest, held

    rows = [row("training", status.queue)]
    if status.evaluation is not None:
        rows.append(row("evaluation", status.evaluation))
    headings = ("", "asked for", "next", "published", "unread", "read", "oldest unread", "claimed by")
    return html.table(headings, rows, numbers=range(1, 6))


def _failures(status: RunStatus) -> str:
    if not status.failures:
        return "<p class='note'>None.</p>"
    workers = [role for role in status.roles if role.failures]
    rows = [
        (escape(kind), number(count), *(number(role.failures.get(kind, 0)) for role in workers))
        for kind, count in status.failures.items()
    ]
    headings = ("kind", "in all", *(role.name for role in workers))
    return html.table(headings, rows, numbers=range(1, len(headings)))


def number(value: float | None) -> str:
    """A count in full, anything else in three digits; a dash for None."""
    if value is None:
        return NONE
    return f"{value:,}" if isinstance(value, int) else compact(value)
