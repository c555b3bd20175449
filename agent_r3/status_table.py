"""A run's status on the terminal."""

from collections.abc import Iterable, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from agent_r3.status import Queue, RoleStatus, RunStatus, size, span

_STYLES = {"alive": "green", "late": "yellow", "gone": "bold red", "ended": "dim"}
_NONE = "-"


class StatusTable:
    """Renders the status; `problem` says why there is nothing newer."""

    def __init__(self, status: RunStatus, problem: str | None = None) -> None:
        self.status = status
        self._problem = problem

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Group(*self._parts())

    def _parts(self) -> Iterable[RenderableType]:
        status = self.status
        yield _roles(status)
        yield _figures(status)
        for note in status.notes:
            yield Text(f"! {note}", style="yellow")
        if self._problem is not None:
            yield Text(f"! {self._problem}", style="bold red")


def _roles(status: RunStatus) -> Table:
    names = ("role", "heard", "state", "policy", "running", "done", "held", "failed", "at")
    rows = [_cells(role) for role in status.roles]
    table = Table(title=Text(f"run {status.run}"), title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column, name in enumerate(names):
        # Where the terminal is narrow, state and place are cut first.
        whole = None if name in ("state", "at") else max(len(row[column]) for row in (names, *rows))
        table.add_column(name, justify="right" if name in names[3:8] else "left", no_wrap=True, min_width=whole)
    for role, row in zip(status.roles, rows, strict=True):
        # Text, not markup: a name may contain brackets.
        table.add_row(*map(Text, row), style=_STYLES[role.alive])
    return table


def _cells(role: RoleStatus) -> Sequence[str]:
    alive = f", {role.alive}" if role.alive in ("late", "gone") else ""
    return (
        role.name,
        f"{span(role.age_s)}{alive}",
        role.state or _NONE,
        *map(_number, (role.policy_version, role.episodes_running, role.episodes, role.claims)),
        _number(sum(role.failures.values())),
        role.where or _NONE,
    )


def _figures(status: RunStatus) -> Table:
    table = Table(show_header=False, box=None)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in _rows(status):
        table.add_row(Text(name), Text(value))
    return table


def _rows(status: RunStatus) -> Iterable[tuple[str, str]]:
    made = _number(status.step) + (f" of {status.steps}" if status.steps else "")
    yield "policy", f"version {_number(status.policy_version)} after training steps {made}"
    yield "groups", _queue(status.queue)
    if status.evaluation is not None:
        yield "evaluation", _queue(status.evaluation)
    stored = status.stored
    memory = size(stored.bytes_used) if stored.bytes_used is not None else "size unknown"
    limit = f" of {size(stored.bytes_limit)}" if stored.bytes_limit else ""
    yield (
        "store",
        f"{stored.open} open and {stored.finished} finished trajectories, {stored.tokens:,} tokens; {memory}{limit}",
    )
    rates = status.rates
    over = f"over {span(rates.window_s)}" if rates.window_s is not None else "since the workers started"
    tokens = f", {rates.tokens_per_s:,.0f} tokens a second" if rates.tokens_per_s is not None else ""
    if rates.episodes_per_min is not None:
        yield "throughput", f"{rates.episodes_per_min:.1f} episodes a minute{tokens}, {over}"
    if status.staleness is not None:
        stale = status.staleness
        yield "staleness", f"waiting groups are {stale.mean:.2g} versions behind, at most {stale.max}"
    yield "failures", ", ".join(f"{kind} {count}" for kind, count in status.failures.items()) or "none"
    if status.metrics is not None:
        names = (("reward", "train/reward_mean"), ("pass@1", "eval/pass@1"), ("KL with replay", "r3/kl_replay"))
        figures = [f"{label} {status.metrics[name]:.3g}" for label, name in names if name in status.metrics]
        yield f"step {int(status.metrics['step'])}", ", ".join(figures)


def _queue(queue: Queue) -> str:
    oldest = f" (oldest {span(queue.oldest_unread_s)})" if queue.oldest_unread_s is not None else ""
    held = ", ".join(f"{worker} {count}" for worker, count in queue.claims.items())
    claimed = f"{sum(queue.claims.values())} claimed" + (f" ({held})" if held else "")
    return (
        f"{queue.demand} asked for, next {queue.next}, {claimed}, {queue.published} published, "
        f"{queue.unread} unread{oldest}, {queue.read} with the trainer"
    )


def _number(value: int | None) -> str:
    return _NONE if value is None else f"{value:,}"
