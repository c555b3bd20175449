"""Figures to Weights & Biases, where `track.wandb` asks for it; and what the section `track` needs to be installed."""

import importlib.metadata
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog

from agent_r3.config import Config, TrackConfig
from agent_r3.errors import InfraError, UserError, boundary

log = structlog.get_logger(__name__)

_ID_FILE = "wandb-id"
_INIT_S = 60.0
_FINISH_S = 60.0  # for what W&B has not taken yet at the end; it stays in the run's folder for `wandb sync`


def check_tracking(track: TrackConfig) -> None:
    """Raises UserError, in one line, for a package that the section needs and that is not installed."""
    needs = {
        "track.wandb": ("wandb", "wandb") if track.wandb else None,
        "track.otlp_endpoint": ("opentelemetry-exporter-otlp-proto-http", "otel") if track.otlp_endpoint else None,
    }
    for key, need in needs.items():
        if need is not None and not _installed(need[0]):
            raise UserError(f"{key} needs the package {need[0]}; `pip install agent-r3[{need[1]}]`")


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def public_settings(config: Config) -> dict[str, Any]:
    """The config as W&B shows it beside the figures, without what may hold a password."""
    settings: dict[str, Any] = config.model_dump(mode="json", exclude={"store", "track"})
    return settings


class WandbBoard:
    """The run on W&B: one id for its whole life, also over restarts.

    W&B knows no step backwards, so `step` is a figure that the others are drawn over. A step that a resume makes again
    is there twice, the later one last; `metrics.jsonl` has it once. W&B failing costs its figures, never the run.
    """

    def __init__(self, run_folder: Path, track: TrackConfig, settings: Mapping[str, Any]) -> None:
        """Raises UserError where W&B cannot be begun; a run that was there before goes on without it."""
        try:
            import wandb
        except ImportError as exc:
            raise UserError("track.wandb needs the package wandb; `pip install agent-r3[wandb]`") from exc
        run_folder.mkdir(parents=True, exist_ok=True)
        run_id, again = _run_id(run_folder)
        self._run: Any = None
        try:
            with boundary(UserError, "track.wandb: W&B cannot be begun", Exception):
                self._run = wandb.init(
                    project=track.wandb_project,
                    id=run_id,
                    name=run_folder.name,
                    resume="allow",
                    mode=track.wandb_mode,
                    dir=str(run_folder),
                    config=dict(settings),
                    settings=wandb.Settings(console="off", silent=True, init_timeout=_INIT_S, finish_timeout=_FINISH_S),
                )
                self._run.define_metric("step")
                self._run.define_metric("*", step_metric="step")
                (run_folder / _ID_FILE).write_text(f"{run_id}\n")
        except UserError as exc:
            if not again:
                raise
            log.warning("the run goes on without W&B", error=str(exc))
            return
        where = self._run.url if track.wandb_mode == "online" else f"{run_folder}/wandb"
        log.info("figures go to W&B too", id=run_id, where=where)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._guarded(lambda run: run.log({"step": step, **values}))

    def close(self, *, failed: bool = False) -> None:
        """Upload the rest, within a minute. Harmless a second time."""
        self._guarded(lambda run: run.finish(exit_code=int(failed)))
        self._run = None

    def _guarded(self, work: Any) -> None:
        if self._run is None:
            return
        try:
            with boundary(InfraError, "W&B", Exception):
                work(self._run)
        except InfraError as exc:
            self._run = None
            log.warning("the run goes on without W&B", error=str(exc))


def _run_id(run_folder: Path) -> tuple[str, bool]:
    """The run's id on W&B, and whether it has been there under it."""
    path = run_folder / _ID_FILE
    return (path.read_text().strip(), True) if path.is_file() else (secrets.token_hex(4), False)
