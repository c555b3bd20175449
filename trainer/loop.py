"""The training loop: wait for groups, recompute old log-probs, diagnose, update, push, checkpoint, acknowledge.

`Trainer.step` is one step on every rank. Rank 0 alone talks to the stream, the engines and the metrics; each rank loads
its own trajectories from the store.

A group is acknowledged once a checkpoint holds its step. A trainer that is killed goes on at its last checkpoint: the
groups since then are delivered again, in the same order and under the same versions, so none is lost and none counts
twice; until it has caught up, the engines keep the newer policy that they serve. With `train.save_every=0` there is no
checkpoint to come back to, and groups are acknowledged after their step. One that is killed before its first
checkpoint goes on at the start in the same way, since the store still has every group. There is one trainer at a time:
before it publishes, saves or acknowledges, rank 0 asks the store whether another process has taken its role.

With `eval.every` the policy is evaluated on a held set between steps (`trainer/evaluation.py`), while no training
episode runs. The figures stand in the line of the step that starts from that policy.
"""

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import reduce
from operator import add
from pathlib import Path
from types import FrameType
from typing import TypeVar

import structlog
from structlog.contextvars import bind_contextvars

from agent_r3.config import Config, require_trainable_sampling
from agent_r3.errors import ContractError, UserError
from agent_r3.heartbeat import Heartbeat
from agent_r3.held_set import evaluation_config, is_due
from agent_r3.metrics import MetricsWriter, read_metrics
from agent_r3.store import Delivery, GroupReader
from agent_r3.store import Policy as PublishedPolicy
from agent_r3.telemetry import serve_telemetry
from agent_r3.tracing import annotate, span, tracing
from agent_r3.tracking import WandbBoard, check_tracking, public_settings
from agent_r3.trainer import ranks
from agent_r3.trainer.batch_loader import BatchLoader, samples_of
from agent_r3.trainer.checkpoint import Checkpoints, TrainerState
from agent_r3.trainer.diagnostics import Diagnostics
from agent_r3.trainer.evaluation import Evaluator
from agent_r3.trainer.feed import GroupFeed, StepGroups, Stopped, collect
from agent_r3.trainer.losses import LossSums, load_verl
from agent_r3.trainer.megatron import Policy
from agent_r3.trainer.optimize import diagnose, recompute, update
from agent_r3.trainer.push import WeightPublisher
from agent_r3.trainer.record import record_step
from agent_r3.trainer.role import TrainerRole
from agent_r3.trainer.rollout_metrics import rollout_metrics

log = structlog.get_logger(__name__)

T = TypeVar("T")

_LOGGED = {"reward": "train/reward_mean", "coverage": "r3/coverage", "seconds": "perf/step_s"}
_WAITING = "waiting"  # rank 0 says so regularly: no collective may time out during a long rollout


def main(
    config: Config,
    store_url: str,
    engine_urls: Sequence[str],
    *,
    resume: bool = False,
    finish: Callable[[], None] = lambda: None,
) -> None:
    """Train until `train.steps`, or until SIGTERM or SIGINT: then up to the next step boundary, with a checkpoint.

    One process per rank (torchrun), or one alone. Rank 0 calls `finish` at the end, while it still answers /healthz and
    /metrics. Raises UserError for what can be mended before the first step.
    """
    require_trainable_sampling(config.sampling)
    check_tracking(config.track)
    evaluation = evaluation_config(config) if config.eval.every else None
    bind_contextvars(run=config.run.name, role="trainer")
    role = TrainerRole(config.run.name)
    rank = int(os.environ.get("RANK", "0"))  # torchrun's; torch.distributed has not begun
    with ExitStack() as stack:
        stack.enter_context(tracing(config.track, "trainer", run=config.run.name, rank=rank))
        if rank == 0:
            stack.enter_context(serve_telemetry(config.service, role.telemetry, role.health))
            heartbeat = Heartbeat(config.store, config.run.name, "trainer", role.payload, alone=True)
            role.health.checks.append(stack.enter_context(heartbeat).problem)
            role.require_alone = heartbeat.require_alone
        load_verl()  # now, while the engines start, rather than in the first step
        policy = Policy.from_pretrained(
            Path(config.model.path),
            config.train,
            temperature=config.sampling.temperature,
            replay=config.train.routing == "r3",
            seed=config.run.seed,
        )
        store = stack.enter_context(GroupReader.connect(store_url, config.run.name))
        trainer = Trainer(config, policy, store, engine_urls, role, resume=resume)
        if evaluation is not None and ranks.rank() == 0:
            held = stack.enter_context(GroupReader.connect(store_url, evaluation.run.name))
            trainer.evaluate_with(held, evaluation)
        trainer.open(stack)
        trainer.run()
        if rank == 0:
            finish()


class Trainer:
    """One rank of the trainer."""

    def __init__(
        self,
        config: Config,
        policy: Policy,
        store: GroupReader,
        engine_urls: Sequence[str],
        role: TrainerRole,
        *,
        resume: bool,
    ) -> None:
        folder = config.run.folder
        self._config = config
        self._policy = policy
        self._store = store
        self._role = role
        self._leads = ranks.rank() == 0
        self._checkpoints = Checkpoints(
            folder / "checkpoints", keep=config.train.keep_checkpoints, writer=self._leads, barrier=ranks.barrier
        )
        self._publisher = WeightPublisher(engine_urls, folder / "weights", retry_s=config.engine.start_timeout_s)
        self._loader = BatchLoader(store, config, policy.shape if config.engine.routed_experts else None)
        self._stopping = False
        self._unsafe: list[Delivery] = []  # trained, but in no checkpoint yet
        self._seconds: Counter[str] = Counter()
        self._evaluator: Evaluator | None = None  # on rank 0, where the policy is evaluated
        self._figures: dict[str, float] = {}  # of the policy that the next step starts from
        self._resume = resume
        self.state = self._start_state(resume)
        self._saved_step = self.state.step

    def evaluate_with(self, store: GroupReader, config: Config) -> None:
        """For rank 0, before it opens: make evaluations, in the part of the store that is theirs."""
        self._evaluator = Evaluator(store, config, self._idle)

    def open(self, stack: ExitStack) -> None:
        """Take up the run: signals, metrics, the place in the data order, the policy in the engines."""
        for signum in (signal.SIGTERM, signal.SIGINT):
            stack.callback(signal.signal, signum, signal.signal(signum, self._on_signal))
        if self._leads:
            self._metrics = stack.enter_context(self._metrics_writer())
            self._feed = GroupFeed(self._store, self.state.groups, self._idle)
        self._served = ranks.share(self._open_store() if self._leads else None)
        if self._evaluator is not None:
            began = self.state.step if self._resume else -1
            self._evaluator.take_up(lost_after=None if self._served >= 0 else began)
        self._role.at(self.state)
        self._role.health.starting = None  # the first push waits for the engines, which say so themselves
        self._push()
        for line in read_metrics(self._config.run.folder)[-1:]:
            self._role.figures(line)

    def run(self) -> None:
        """All remaining steps. Returns early, at a step boundary, when the run was asked to stop."""
        steps, save_every = self._config.train.steps, self._config.train.save_every
        while self.state.step < steps and self._evaluate():
            bind_contextvars(step=self.state.step, policy_version=self.state.version)
            with self._timed("step"):
                self._role.state = "waiting"
                with self._timed("wait"):
                    groups = self._next_groups()
                if groups is None:
                    break
                self._role.state = "training"
                metrics = self.step(groups)
            self._role.at(self.state)
            if self._leads:  # like the metrics before the checkpoint, so that no checkpointed step lacks its line
                record_step(self._config.run.folder, self.state.step - 1, groups)
            self._write(self.state.step - 1, metrics)
            if not save_every:
                self._acknowledge()
            elif self.state.step % save_every == 0:
                self._save()
        if self.state.step != self._saved_step:
            self._save()
        if self.state.step >= steps and self._evaluate() and self._figures:
            self._write(self.state.step, {})
        self._role.state = "done" if self.state.step >= steps else "stopped"
        log.info("trainer ends", step=self.state.step, of=steps, policy_version=self.state.version)

    def step(self, groups: StepGroups) -> dict[str, float]:
        """Train on `groups` and publish the new policy. Returns the step's metrics, the same on every rank."""
        step, version = self.state.step, self.state.version
        with self._timed("load"):
            batch = self._loader.load(samples_of(groups), step, version)
        losses, diagnostics, figures = LossSums(), Diagnostics(rows=batch.rows), {"train/skipped_steps": 1.0}
        if batch.mini_batches:
            with self._timed("logprobs"):
                old = recompute(self._policy, batch.mini_batches, replay=self._config.train.routing == "r3")
            with self._timed("diagnostics"):
                diagnostics += diagnose(self._policy, self._loader, batch, self._config)
            with self._timed("update"):
                losses, figures = update(self._policy, batch.mini_batches, old, self._config)
            version += 1
        all_losses, all_diagnostics, rollouts = zip(*ranks.gather((losses, diagnostics, batch.rollout)), strict=True)
        self.state = TrainerState(step + 1, version, groups.stop)
        if batch.mini_batches:
            with self._timed("push"):
                self._push()
        self._unsafe += groups.deliveries
        annotate(policy_version=version, groups=len(groups.deliveries), loss_groups=len(groups.kept))
        return {
            **rollout_metrics(rollouts, groups.deliveries),
            **reduce(add, all_losses).metrics(len(batch.mini_batches)),
            **reduce(add, all_diagnostics).metrics(),
            **figures,
            "train/groups_kept": float(len(groups.kept)),
            "train/groups_equal": float(len(groups.deliveries) - groups.mixed),
            "train/refills": float(groups.refills),
            "train/policy_version": float(version),
        }

    def _start_state(self, resume: bool) -> TrainerState:
        found = self._checkpoints.latest()
        if not resume and found is not None:
            raise UserError(
                f"{self._config.run.folder} holds a checkpoint of step {found.state.step}: continue that run with "
                "--resume, or choose another run.name"
            )
        if found is None:
            if resume:
                log.warning("there is no checkpoint to resume from; the run starts at step 0")
            return TrainerState()
        self._policy.load(found.policy)
        log.info("resumed", step=found.state.step, policy_version=found.state.version, groups=found.state.groups)
        return found.state

    def _metrics_writer(self) -> MetricsWriter:
        folder, track = self._config.run.folder, self._config.track
        wandb = WandbBoard(folder, track, public_settings(self._config)) if track.wandb else None
        return MetricsWriter(folder, first_step=self.state.step, wandb=wandb)

    def _open_store(self) -> int:
        """Set the place in the data order where the store does not know it. Returns the policy version in use, or -1.

        A store that knows a policy has lived on since the checkpoint: it delivers again what was not acknowledged, and
        what is in flight goes on under the policy it was started with.
        """
        published = self._published() if self.state.step or self._loses_nothing() else None
        if published is None:
            self._store.reset_position(self.state.groups)
            return -1
        if published.version > self.state.version:
            log.info("catching up", policy_version=self.state.version, published=published.version)
            self._publisher.load(published.version, Path(published.weights))
        return published.version

    def _loses_nothing(self) -> bool:
        """At the start of a run: whether an earlier trainer of it was killed before it had acknowledged any group."""
        published = self._published()
        return (
            self._resume
            and self._config.train.save_every > 0
            and not self._checkpoints.any()
            and published is not None
            and published.weights == str(self._publisher.folder(published.version))
            and Path(published.weights).is_dir()
        )

    def _published(self) -> PublishedPolicy | None:
        try:
            return self._store.policy()
        except ContractError:  # none was set: the store is a new one
            return None

    def _next_groups(self) -> StepGroups | None:
        """The groups of the next step, on every rank; None when the run was asked to stop."""
        return self._led(lambda: collect(self._feed, self._config, self.state.version))

    def _evaluate(self) -> bool:
        """Evaluate the policy where that is due. False, on every rank, when the run was asked to stop."""
        if not self._config.eval.every:
            return True
        with self._timed("eval"):
            figures = self._led(self._evaluation)
        self._figures = figures or {}
        return figures is not None

    def _evaluation(self) -> dict[str, float]:
        """On rank 0: figures of the current policy, {} where it is not to be evaluated."""
        step, version = self.state.step, self.state.version
        assert self._evaluator is not None
        known = self._evaluator.known(step)
        if known is not None or not is_due(self._config, step):
            return known or {}
        if version < self._served:
            log.warning("not evaluated: the engines serve a newer policy", step=step, policy_version=version)
            return {}
        self._role.state = "evaluating"
        return self._evaluator.evaluate(step, version, str(self._publisher.folder(version)))

    def _led(self, work: Callable[[], T]) -> T | None:
        """What `work` gives on rank 0, on every rank; it calls `_idle` while it waits. None when asked to stop."""
        message: T | str | None = _WAITING
        if self._leads:
            try:
                message = work()
            except Stopped:
                message = None
            message = ranks.share(message)
        while message == _WAITING:
            message = ranks.share(None)
        assert not isinstance(message, str)
        return message

    def _idle(self) -> None:
        if self._stopping:
            raise Stopped
        self._role.require_alone()
        ranks.share(_WAITING)

    def _push(self) -> None:
        """Publish the current policy, unless the engines already serve a newer one (after a crash, see above)."""
        version = self.state.version
        if version < self._served:
            return
        if not self._leads:
            self._policy.save_hf(self._publisher.folder(version))
        else:
            self._role.require_alone()
            folder = self._publisher.push(version, self._policy.save_hf)
            self._role.require_alone()
            self._store.set_policy(version, str(folder))
            self._publisher.prune(keep=version)
        self._served = version

    def _save(self) -> None:
        self._role.state = "saving"
        self._role.require_alone()
        with self._timed("checkpoint"):
            self._checkpoints.save(self.state, self._policy.save)
        self._saved_step = self.state.step
        self._acknowledge()

    def _acknowledge(self) -> None:
        if self._leads:
            self._role.require_alone()
            self._store.ack(self._unsafe)
        self._unsafe = []

    def _write(self, step: int, metrics: dict[str, float]) -> None:
        """Before the checkpoint, so that no checkpointed step lacks its line; its seconds count in the next one's."""
        if self._leads:
            stages = {f"perf/{stage}_s": seconds for stage, seconds in self._seconds.items()}
            line = metrics | self._figures | stages
            self._metrics.write(step, line)
            self._role.figures(line)
            if metrics:
                log.info("step made", **{name: round(line[key], 4) for name, key in _LOGGED.items() if key in line})
        self._seconds.clear()

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._stopping = True

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            with span("train_step", step=self.state.step) if stage == "step" else span(stage):
                yield
        finally:
            self._seconds[stage] += time.perf_counter() - began  # type: ignore[assignment]
