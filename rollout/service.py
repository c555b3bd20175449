"""The rollout worker as a process: wires sandboxes, tools, engine and store together and stops them cleanly."""

import asyncio
import math
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import structlog
from structlog.contextvars import bind_contextvars

from agent_r3.config import Config
from agent_r3.envs.backend import open_backend
from agent_r3.envs.datasets import join_tasks, load_tasks
from agent_r3.errors import ConfigError, EngineError, first_failure
from agent_r3.heartbeat import Heartbeat
from agent_r3.held_set import announcement, evaluation_config
from agent_r3.hfconfig import ModelInfo, read_model
from agent_r3.process import until_signalled
from agent_r3.rollout.client import EngineFleet
from agent_r3.rollout.plans import SharedProvider
from agent_r3.rollout.tokens import ChatRenderer
from agent_r3.rollout.worker import RolloutWorker
from agent_r3.rollout.worker_metrics import WorkerMetrics
from agent_r3.store import TrajectoryWriter, connection_url
from agent_r3.telemetry import Health, Telemetry, serve_telemetry, watched_loop
from agent_r3.tracing import tracing

log = structlog.get_logger(__name__)

_ENGINE_POLL_S = 1.0


async def run_worker(config: Config, name: str) -> None:
    """Work until SIGTERM or SIGINT, then remove this worker's containers. Raises UserError at start, also where the run
    has a worker of that name.

    After the signal it claims nothing, and has `service.grace_s` to publish the groups that it holds. Where the run
    evaluates its policy, a second worker on the same sandboxes and grader answers for the held set.
    """
    if config.store.url is None or not config.engine.urls:
        raise ConfigError("`agent-r3 rollout` needs store.url and engine.urls; `agent-r3 train` fills them in")
    bind_contextvars(run=config.run.name, role="rollout", worker=name)
    service = _Service(config, name)
    await until_signalled(service.run(), drain=service.drain, grace_s=config.service.grace_s)
    log.info("worker stopped", held_groups_dropped=service.metrics.groups)


class _Service:
    """One worker process."""

    def __init__(self, config: Config, name: str) -> None:
        self._config = config
        self._name = name
        self._telemetry = Telemetry("rollout", config.run.name)
        self._health = Health()
        self._workers: list[RolloutWorker] = []
        self.metrics = WorkerMetrics(self._telemetry)

    def drain(self) -> bool:
        """Claim no more. False where nothing has begun that could come to an end."""
        self.metrics.state = "stopping"
        for worker in self._workers:
            worker.drain()
        return bool(self._workers)

    async def run(self) -> None:
        config, name = self._config, self._name
        evaluation = evaluation_config(config) if config.eval.every else None
        tasks = load_tasks(config.tasks)
        held = load_tasks(evaluation.tasks) if evaluation else []
        join_tasks(tasks, held)  # a task's id is all that grades go by
        model = read_model(Path(config.model.path))
        renderer = ChatRenderer.from_folder(model)
        async with AsyncExitStack() as stack:
            stack.enter_context(tracing(config.track, "rollout", run=config.run.name, worker=name))
            stack.enter_context(serve_telemetry(config.service, self._telemetry, self._health))
            store, fleet = await _connect(stack, config, model, renderer)
            # Two workers of one name would take each other for an earlier process of themselves.
            heartbeat = Heartbeat(config.store, config.run.name, f"worker/{name}", self.metrics.payload, alone=True)
            self._health.checks.append(stack.enter_context(heartbeat).problem)
            self._health.checks.append(await stack.enter_async_context(watched_loop()))
            await self._wait_for_engines(fleet)
            provider, grader = await stack.enter_async_context(
                open_backend(config.sandbox, config.grading, run=config.run.name, owner=name)
            )
            shared = SharedProvider.of(provider)
            common = (renderer, fleet, shared, grader, store)
            workers = [RolloutWorker(name, config, tasks, *common, metrics=self.metrics)]
            if evaluation is not None:
                store, fleet = await _connect(stack, evaluation, model, renderer)
                common = (renderer, fleet, shared.share(), grader, store)
                workers.append(RolloutWorker(name, evaluation, held, *common, metrics=self.metrics, held_out=True))
                stack.enter_context(
                    Heartbeat(config.store, evaluation.run.name, f"worker/{name}", self.metrics.payload)
                )
                await store.heartbeat(name, announcement(evaluation, len(held)))
            log.info("worker started", tasks=len(tasks), held_out=len(held))
            await self._work(workers)

    async def _work(self, workers: Sequence[RolloutWorker]) -> None:
        self._health.starting, self.metrics.state = None, "running"
        try:
            async with asyncio.TaskGroup() as running:
                self._workers += [*workers]
                for worker in workers:
                    running.create_task(worker.run())
        except BaseExceptionGroup as failed:
            raise first_failure(failed) from None

    async def _wait_for_engines(self, fleet: EngineFleet) -> None:
        """Until every server has answered as it must, for as long as one may take to start. Raises EngineError."""
        deadline = time.monotonic() + self._config.engine.start_timeout_s
        self._health.starting = f"waiting for an answer of {', '.join(self._config.engine.urls)}"
        while True:
            try:
                return await fleet.check()
            except EngineError as exc:
                if time.monotonic() > deadline:
                    raise
                if self._health.starting != str(exc):
                    log.info("waiting for the engine", reason=str(exc))
                self._health.starting = str(exc)
            await asyncio.sleep(_ENGINE_POLL_S)


async def _connect(
    stack: AsyncExitStack, config: Config, model: ModelInfo, renderer: ChatRenderer
) -> tuple[TrajectoryWriter, EngineFleet]:
    """The run's part of the store, waited for whenever it is away, and the engines under its sampling."""
    store = await stack.enter_async_context(
        TrajectoryWriter.connect(connection_url(config.store), config.run.name, retry_s=math.inf)
    )
    fleet = await stack.enter_async_context(
        EngineFleet(
            config.engine,
            model,
            config.sampling,
            concurrency=config.rollout.concurrency,
            stop_token_ids=(renderer.stop_id,),
        )
    )
    return store, fleet
