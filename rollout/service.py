"""The rollout worker as a process: wires sandboxes, tools, engine and store together and stops them cleanly."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import structlog

from agent_r3.config import Config
from agent_r3.envs.backend import open_backend
from agent_r3.envs.datasets import join_tasks, load_tasks
from agent_r3.errors import ConfigError, first_failure
from agent_r3.held_set import announcement, evaluation_config
from agent_r3.hfconfig import ModelInfo, read_model
from agent_r3.process import until_signalled
from agent_r3.rollout.client import EngineFleet
from agent_r3.rollout.plans import SharedProvider
from agent_r3.rollout.tokens import ChatRenderer
from agent_r3.rollout.worker import RolloutWorker
from agent_r3.store import TrajectoryWriter

log = structlog.get_logger(__name__)


async def run_worker(config: Config, name: str) -> None:
    """Work until SIGTERM or SIGINT, then remove this worker's containers. Raises UserError at start.

    Where the run evaluates its policy, a second worker on the same sandboxes and grader answers for the held set.
    """
    if config.store.url is None or not config.engine.urls:
        raise ConfigError("`agent-r3 rollout` needs store.url and engine.urls; `agent-r3 train` fills them in")
    evaluation = evaluation_config(config) if config.eval.every else None
    tasks = load_tasks(config.tasks)
    held = load_tasks(evaluation.tasks) if evaluation else []
    join_tasks(tasks, held)  # a task's id is all that grades go by
    model = read_model(Path(config.model.path))
    renderer = ChatRenderer.from_folder(model)
    async with AsyncExitStack() as stack:
        store, fleet = await _connect(stack, config, model, renderer)
        await fleet.check()
        provider, grader = await stack.enter_async_context(
            open_backend(config.sandbox, config.grading, run=config.run.name, owner=name)
        )
        shared = SharedProvider.of(provider)
        workers = [RolloutWorker(name, config, tasks, renderer, fleet, shared, grader, store)]
        if evaluation is not None:
            store, fleet = await _connect(stack, evaluation, model, renderer)
            workers.append(
                RolloutWorker(name, evaluation, held, renderer, fleet, shared.share(), grader, store, held_out=True)
            )
            await store.heartbeat(name, announcement(evaluation, len(held)))
        log.info("worker started", name=name, tasks=len(tasks), held_out=len(held))
        await until_signalled(_run(workers))
    log.info("worker stopped", name=name)


async def _connect(
    stack: AsyncExitStack, config: Config, model: ModelInfo, renderer: ChatRenderer
) -> tuple[TrajectoryWriter, EngineFleet]:
    """The run's part of the store, and the engines under its sampling."""
    store = await stack.enter_async_context(TrajectoryWriter.connect(str(config.store.url), config.run.name))
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


async def _run(workers: Sequence[RolloutWorker]) -> None:
    try:
        async with asyncio.TaskGroup() as running:
            for worker in workers:
                running.create_task(worker.run())
    except BaseExceptionGroup as failed:
        raise first_failure(failed) from None
