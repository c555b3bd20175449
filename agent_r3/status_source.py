"""Where a run's status is read: from a run's folder, a config, a store's URL, or whatever run is here."""

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from agent_r3.config import ENVIRONMENT_PREFIX, StoreConfig, load_config
from agent_r3.errors import ConfigError, UserError
from agent_r3.store import connection_url

_RESOLVED = "resolved.yaml"  # the config with the embedded store's URL, written when a run starts
_RUNS = Path("runs")
_HOW = "name a run's folder (runs/demo), a config, or --store URL"


@dataclass(frozen=True, slots=True)
class Source:
    """A store and what is known of the run in it. `folder` and `steps` come from the run's config."""

    url: str  # with its password: never shown
    run: str | None = None
    folder: Path | None = None
    steps: int | None = None


def find(config: Path | None, store: str | None, run: str | None) -> Source:
    """The source that the command line means; `run` wins over the config's name.

    Without config and store it is the store of the environment, else the run that was started last under ./runs.
    Raises UserError in one line where that leads nowhere.
    """
    if config is not None and store is not None:
        raise ConfigError(f"{config} and --store {_shown(store)} may name different stores; leave one of them out")
    if store is None and config is None:
        store = os.environ.get(f"{ENVIRONMENT_PREFIX}STORE__URL")
    if store is not None:
        password = os.environ.get(f"{ENVIRONMENT_PREFIX}STORE__PASSWORD_FILE")
        known = StoreConfig(url=store, password_file=Path(password) if password else None)
        return Source(connection_url(known), run)
    if config is None:
        config = _newest()
    return _of_config(config, run)


def _of_config(config: Path, run: str | None) -> Source:
    path = config / _RESOLVED if config.is_dir() else config
    if config.is_dir() and not path.is_file():
        raise UserError(f"{config} is not the folder of a run that was started: no {_RESOLVED}; {_HOW}")
    resolved = load_config(path)
    if resolved.store.url is None:  # then it was chosen when the run started
        path = resolved.run.folder / _RESOLVED
        if not path.is_file():
            raise UserError(f"{config}: store.url is not set and there is no run at {resolved.run.folder}; {_HOW}")
        resolved = load_config(path)
    _require_socket(str(resolved.store.url), resolved.run.name, resolved.run.folder)
    url = connection_url(resolved.store)
    if run is not None and run != resolved.run.name:
        return Source(url, run)
    folder = config if config.is_dir() else resolved.run.folder
    return Source(url, resolved.run.name, folder, resolved.train.steps)


def _newest() -> Path:
    started = [path for path in _RUNS.glob(f"*/{_RESOLVED}") if path.is_file()]
    if not started:
        raise UserError(f"there is no run under ./{_RUNS}; {_HOW}")
    return max(started, key=lambda path: path.stat().st_mtime).parent


def _require_socket(url: str, run: str, folder: Path) -> None:
    """An embedded store lives as long as its run. Raises UserError when it has gone."""
    parts = urlsplit(url)
    if parts.scheme == "unix" and not Path(unquote(parts.path)).exists():
        raise UserError(
            f"run {run} is not running: its store {parts.path} is gone; `agent-r3 report {folder}` shows what it left"
        )


def _shown(url: str) -> str:
    """Without credentials."""
    scheme, mark, rest = url.partition("://")
    return f"{scheme}{mark}{rest.rpartition('@')[2]}"
