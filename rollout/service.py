"""The rollout worker as a process: wires sandboxes, tools, engine and store together and stops them cleanly."""

from contextlib import AsyncExitStack
from pathlib import Path

import structlog

from agent_r3.config import Config
from agent_r3.envs.backend import open_backend
from agent_r3.envs.datasets import load_tasks
from agent_r3.errors import ConfigError
from agent_r3.hfconfig import read_model
from agent_r3.process import until_signalled
from agent_r3.rollout.client import EngineFleet
from agent_r3.rollout.tokens import ChatRenderer
from agent_r3.rollout.worker import RolloutWorker
from agent_r3.store import TrajectoryWriter

log = structlog.get_logger(__name__)


async def run_worker(config: Config, name: str) -> None:
    """Work until SIGTERM or SIGINT, then remove this worker's containers. Raises UserError at start."""
    if config.store.url is None or not config.engine.urls:
        raise ConfigError("`agent-r3 rollout` needs store.url and engine.urls; `agent-r3 train` fills them in")
    tasks = load_tasks(config.tasks)
    model = read_model(Path(config.model.path))
    renderer = ChatRenderer.from_folder(model)
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(TrajectoryWriter.connect(config.store.url, config.run.name))
        fleet = await stack.enter_async_context(
            EngineFleet(
                config.engine,
                model,
                config.sampling,
                concurrency=config.rollout.concurrency,
                stop_token_ids=(renderer.stop_id,),
            )
        )
        await fleet.check()
        provider, grader = await stack.enter_async_context(
            open_backend(config.sandbox, config.grading, run=config.run.name, owner=name)
        )
        worker = RolloutWorker(name, config, tasks, renderer, fleet, provider, grader, store)
        log.info("worker started", name=name, tasks=len(tasks))
        await until_signalled(worker.run())
    log.info("worker stopped", name=name)
