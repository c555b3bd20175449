"""`agent-r3 status`: what a run is doing."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from rich.console import Console

    from agent_r3.status_feed import StatusFeed

_WATCH_S = "2"
_WEB_PORT = "8642"
_LOG_WIDTH = 140


class Command(TyperCommand):
    """Lets `--watch` and `--web` stand without their number, also before the config."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        full = []
        for index, word in enumerate(args):
            follows = args[index + 1] if index + 1 < len(args) else ""
            usual = {"--watch": _WATCH_S, "--web": _WEB_PORT}.get(word)
            full.append(word if usual is None or _is_number(follows) else f"{word}={usual}")
        parsed: list[str] = super().parse_args(ctx, full)
        return parsed


def status(
    config: Annotated[Path | None, typer.Argument(help="The run's folder (runs/demo) or config.")] = None,
    store: Annotated[str | None, typer.Option(metavar="URL", help="Redis URL of the store, without a config.")] = None,
    run: Annotated[str | None, typer.Option(metavar="NAME", help="Which run, where the store holds several.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object; with --watch one a line.")] = False,
    watch: Annotated[
        float | None, typer.Option(min=0.1, metavar="[SECONDS]", help=f"Show it anew, every {_WATCH_S} s if not said.")
    ] = None,
    web: Annotated[
        int | None,
        typer.Option(min=0, max=65_535, metavar="[PORT]", help=f"Serve a live page, on port {_WEB_PORT} if not said."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address on which --web listens.")] = "127.0.0.1",
) -> None:
    """Show a run while it goes on: its roles by heartbeat, policy version, groups on their way, throughput, failures.

    Nothing is changed by looking. Without config and --store it takes the store of AGENT_R3__STORE__URL, else the run
    that was started last under ./runs. A password is best named in AGENT_R3__STORE__PASSWORD_FILE or the config.

    Example: agent-r3 status runs/demo --web
    """
    from agent_r3.errors import UserError
    from agent_r3.status_feed import StatusFeed
    from agent_r3.status_source import find
    from agent_r3.store.status_reader import StatusReader

    if web is not None and (watch is not None or as_json):
        raise UserError("--web serves a page and /status.json; leave --watch and --json out")
    source = find(config, store, run)
    with StatusReader.connect(source.url) as reader:
        # A page of a configured run may be opened before the run begins.
        named = source.run if web is not None and source.folder is not None else None
        feed = StatusFeed(reader, named or reader.choose(source.run), source.folder, source.steps)
        if web is not None:
            _serve(feed, host, web)
        elif watch is not None:
            _watch(feed, watch, as_json)
        else:
            _show_once(feed, as_json)


def _show_once(feed: "StatusFeed", as_json: bool) -> None:
    import json

    from agent_r3.status_table import StatusTable

    status = feed.poll().status
    if as_json:
        print(json.dumps(status.as_json(), allow_nan=False), flush=True)
    else:
        _console().print(StatusTable(status))


def _watch(feed: "StatusFeed", every_s: float, as_json: bool) -> None:
    """Until a signal. A store that went away after the first look is said, and asked again."""
    import time

    from rich.live import Live

    from agent_r3.errors import StoreError
    from agent_r3.status_table import StatusTable

    console = _console()
    if as_json or not console.is_terminal:
        with _until_signalled():
            while True:
                _show_once(feed, as_json)
                time.sleep(every_s)
        return
    shown = StatusTable(feed.poll().status)
    with _until_signalled(), Live(shown, console=console, auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(every_s)
            try:
                shown = StatusTable(feed.poll().status)
            except StoreError as exc:
                shown = StatusTable(shown.status, str(exc))
            live.update(shown, refresh=True)
    console.print(shown)


def _console() -> "Console":
    """As wide as the terminal; in a pipe or a log wide enough for every column."""
    import os

    from rich.console import Console

    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=_LOG_WIDTH)


def _serve(feed: "StatusFeed", host: str, port: int) -> None:
    import threading

    from agent_r3.status_server import StatusServer

    with _until_signalled(), StatusServer(feed, host, port) as server:
        print(f"{feed.run} is shown at {server.url} until Ctrl-C", flush=True)
        server.follow(until=threading.Event())


@contextmanager
def _until_signalled() -> Iterator[None]:
    """Ctrl-C and SIGTERM are how one stops looking: they end the block and are no failure."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        yield


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()
