"""The trainer as a service: what it shows while it runs, and where its run stands when it is started again."""

from collections.abc import Callable, Mapping
from typing import Literal

from agent_r3.config import Config
from agent_r3.metrics import read_metrics, trained
from agent_r3.telemetry import Health, Telemetry
from agent_r3.trainer.checkpoint import Checkpoints, TrainerState

Standing = Literal["new", "going_on", "done"]


class TrainerRole:
    """Rank 0 writes; the threads of heartbeat and telemetry read."""

    def __init__(self, run: str) -> None:
        self.telemetry = Telemetry("trainer", run)
        self.health = Health()
        self.state = "starting"  # then waiting, training, evaluating, saving; done or stopped
        self.require_alone: Callable[[], None] = lambda: None
        """Raises UserError when another process trains this run by now: nothing of ours may be published any more."""
        self._step = self._policy_version = 0

    def payload(self) -> dict[str, object]:
        """Of the heartbeat."""
        return {"state": self.state, "step": self._step, "policy_version": self._policy_version}

    def at(self, state: TrainerState) -> None:
        self._step, self._policy_version = state.step, state.version
        self.telemetry.gauge("agent_r3_step").set(state.step)
        self.telemetry.gauge("agent_r3_policy_version").set(state.version)

    def figures(self, line: Mapping[str, float]) -> None:
        """A line of metrics.jsonl. Figures that it lacks stay as they were."""
        for name, value in line.items():
            if name.startswith("perf/") and name.endswith("_s"):
                stage = name.removeprefix("perf/").removesuffix("_s")
                self.telemetry.gauge("agent_r3_step_seconds").labels(stage=stage).set(value)
            if "/" in name:
                self.telemetry.gauge("agent_r3_metric").labels(name=name).set(value)


def standing(config: Config) -> Standing:
    """Where the run of this config stands, by what lies in its folder.

    It is done once a checkpoint has all its steps and, with `eval.every`, the last policy was evaluated.
    """
    folder = config.run.folder
    found = Checkpoints(folder / "checkpoints", keep=1, writer=False, barrier=lambda: None).latest()
    if found is not None and found.state.step >= config.train.steps:
        lines = read_metrics(folder)
        if not config.eval.every or (lines and not trained(lines[-1])):
            return "done"
    if found is not None or any((folder / "weights").glob("v[0-9]*")):
        return "going_on"
    return "new"
