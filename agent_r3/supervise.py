"""`agent-r3 train` on one machine: starts the roles, keeps them alive, shows progress, leaves nothing behind.

The roles are the processes that a cluster runs as services (`agent-r3 rollout`, `agent-r3 trainer`) and the SGLang
server; they meet in the store. A role that dies is started again; what the user must mend ends the run with one line.
"""

import asyncio
import shutil
import signal
import subprocess
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from agent_r3.config import Config, EngineConfig, dump_config, require_trainable_sampling
from agent_r3.envs.backend import require_served
from agent_r3.envs.datasets import join_tasks, load_tasks
from agent_r3.envs.local import reap
from agent_r3.errors import AgentR3Error, ConfigError, ContractError, EngineError, UserError
from agent_r3.held_set import evaluation_config
from agent_r3.hfconfig import ModelInfo, check_tokenizer, read_model
from agent_r3.process import last_lines, signal_group, spawn, stop, until_signalled
from agent_r3.progress import StepProgress
from agent_r3.report import print_table, write_report
from agent_r3.rollout.client import EngineFleet
from agent_r3.rollout.launcher import EngineServer, check_port, free_port
from agent_r3.store import EmbeddedServer, Policy, TrajectoryWriter, check_url, connection_url
from agent_r3.tiny import model_folder
from agent_r3.tools import check_tools
from agent_r3.tracking import check_tracking

_RESTARTS = 5  # of all roles together; a run that needs more has a problem that restarting does not mend
_POLL_S = 0.3
_WORKER_GRACE_S = 20.0
_TRAINER_GRACE_S = 120.0  # it finishes its step and writes a checkpoint
_START_GRACE_S = 3.0  # before the engine is there it has nothing to save, and may be waiting for the engine
_USER_ERROR = 2  # exit code of a role for what the user must mend


class RoleFailedError(AgentR3Error):
    """A role keeps dying."""


async def supervise(config: Config, *, resume: bool = False, overwrite: bool = False) -> int:
    """Run the whole loop until the trainer has made its steps; write the report. Returns the exit code.

    Raises UserError for all that can be known before anything is started.
    """
    config, model = preflight(config)
    folder = prepare_folder(config, resume=resume, overwrite=overwrite)
    signalled = await until_signalled(_Run(config, model, folder, resume=resume).run())
    if signalled:
        print(f"interrupted: all of run {config.run.name} was stopped; --resume goes on from its last checkpoint")
        return 130
    print_table(write_report(folder))
    print(f"report: {folder / 'report.html'}")
    return 0


def preflight(config: Config) -> tuple[Config, ModelInfo]:
    """Check model, tokenizer, tasks, images, tools and services. Returns the config with the model's real folder."""
    require_trainable_sampling(config.sampling)
    check_tracking(config.track)
    if config.service.port is not None:
        raise ConfigError(
            f"service.port={config.service.port}: the roles that `agent-r3 train` starts cannot share a port; leave it "
            "out, or run the roles as services"
        )
    evaluation = evaluation_config(config) if config.eval.every else None
    folder = model_folder(config.model.path)
    model = read_model(folder)
    if config.train.routing != "none":
        model.require_moe()
    check_tokenizer(model)
    check_tools(config.agent)
    if not config.engine.urls:
        EngineServer(config.engine, model, log=config.run.folder / "logs" / "engine.log")  # refuses bad arguments
        if config.engine.port:
            check_port(config.engine.host, config.engine.port)
    tasks = load_tasks(config.tasks)
    if evaluation is not None:
        tasks = join_tasks(tasks, load_tasks(evaluation.tasks))
    require_served(config.sandbox, tasks)
    if config.store.url is not None:
        check_url(connection_url(config.store))
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder)})}), model


def prepare_folder(config: Config, *, resume: bool, overwrite: bool) -> Path:
    """Make the run's folder with its config.yaml. Raises ConfigError when there is one and nobody said what to do."""
    folder = config.run.folder
    if folder.exists() and not resume:
        if not overwrite:
            raise ConfigError(f"run folder {folder} exists; --resume goes on, --overwrite deletes it, or set run.name")
        shutil.rmtree(folder)
    if resume and not folder.exists():
        raise ConfigError(f"--resume: there is no run folder {folder}")
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(dump_config(config))
    return folder


@dataclass(slots=True)
class Role:
    """A process of ours that is started again, with `again`, when it dies."""

    name: str
    command: list[str]
    log: Path
    grace_s: float
    again: list[str]
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = spawn(self.command, log=self.log)

    def start_again(self) -> None:
        """After it died. What it left of its process group, such as helpers of a checkpoint's writer, dies first."""
        if self.process is not None:
            signal_group(self.process, signal.SIGKILL)
        self.process = spawn(self.again, log=self.log)

    def poll(self) -> int | None:
        """Exit code, or None while it runs."""
        return self.process.poll() if self.process is not None else None

    async def stop(self) -> None:
        if self.process is not None:
            await stop(self.process, grace_s=self.grace_s)


class _Run:
    """One supervised run. `run()` returns when the trainer has ended well."""

    def __init__(self, config: Config, model: ModelInfo, folder: Path, *, resume: bool) -> None:
        self._config = config
        self._model = model
        self._folder = folder
        self._resume = resume
        self._restarts = 0
        self._engine: EngineServer | None = None
        self._engine_death: asyncio.Task[None] | None = None
        self._engine_config: EngineConfig | None = None  # None where the user's own servers are used

    async def run(self) -> None:
        async with AsyncExitStack() as stack:
            self._reap()
            stack.callback(self._reap)
            self._progress = await stack.enter_async_context(
                StepProgress(self._folder / "metrics.jsonl", self._config.train.steps)
            )
            self._resolve(stack)
            if self._engine_config is None:
                await self._check_engines()
            # Stopped last, since the trainer may be about to push to it.
            stack.push_async_callback(self._stop_engine)
            trainer = self._trainer_role()
            stack.push_async_callback(trainer.stop)
            trainer.start()
            await self._start_engine(self._model, version=0)
            trainer.grace_s = _TRAINER_GRACE_S
            workers = [self._worker_role(f"worker-{i}") for i in range(self._config.rollout.workers)]
            for worker in workers:
                stack.push_async_callback(worker.stop)
                worker.start()
            self._progress.say(f"{len(workers)} rollout workers and {self._config.train.ranks} trainer ranks started")
            await self._watch(trainer, workers)

    def _reap(self) -> None:
        """Left-over sandboxes of this run; a broker removes a client's own when the client goes."""
        if self._config.sandbox.broker is None:
            reap(self._config.sandbox, self._config.run.name)

    def _resolve(self, stack: AsyncExitStack) -> None:
        """Start the embedded store, choose the engine's port and write the config that the roles read."""
        config = self._config
        if config.store.url is None:
            url = stack.enter_context(EmbeddedServer(self._folder / "store", persist=True)).url
            config = config.model_copy(update={"store": config.store.model_copy(update={"url": url})})
        if not config.engine.urls:
            port = config.engine.port or free_port(config.engine.host)
            self._engine_config = config.engine.model_copy(update={"port": port})
            urls = (f"http://{config.engine.host}:{port}",)
            config = config.model_copy(update={"engine": self._engine_config.model_copy(update={"urls": urls})})
        # Workers are only stopped once the trainer wants nothing more of them.
        self._config = config.model_copy(update={"service": config.service.model_copy(update={"grace_s": 0.0})})
        self._resolved = self._folder / "resolved.yaml"
        self._resolved.write_text(dump_config(self._config))

    def _trainer_role(self) -> Role:
        ranks = self._config.train.ranks
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        command = [sys.executable, *torchrun, "-m", "agent_r3.cli", "trainer", str(self._resolved)]
        return Role(
            "trainer",
            [*command, *(["--resume"] if self._resume else [])],
            self._folder / "logs" / "trainer.log",
            _START_GRACE_S,
            again=[*command, "--resume"],
        )

    def _worker_role(self, name: str) -> Role:
        command = [sys.executable, "-m", "agent_r3.cli", "rollout", str(self._resolved), "--name", name]
        return Role(name, command, self._folder / "logs" / f"{name}.log", _WORKER_GRACE_S, again=command)

    async def _start_engine(self, model: ModelInfo, *, version: int) -> None:
        if self._engine_config is None:
            return
        self._engine = EngineServer(
            self._engine_config,
            model,
            log=self._folder / "logs" / f"engine-{self._restarts}.log",
            weight_version=version,
            seed=self._config.run.seed,
        )
        self._progress.say(f"starting the engine for {model.path.name} on {self._engine_config.device}")
        await self._engine.start()
        self._engine_death = asyncio.create_task(self._engine.watch())
        self._progress.say(f"engine answers at {self._engine.url}")

    async def _check_engines(self) -> None:
        """The user's own servers: each must return routing rows of the model's shape. Raises UserError."""
        engine = self._config.engine
        async with EngineFleet(engine, self._model, self._config.sampling, concurrency=1) as fleet:
            try:
                await fleet.check()
            except EngineError as exc:
                raise UserError(f"engine.urls: {exc}; start that server, or leave engine.urls out") from exc

    async def _stop_engine(self) -> None:
        if self._engine_death is not None:
            self._engine_death.cancel()
            await asyncio.gather(self._engine_death, return_exceptions=True)
        if self._engine is not None:
            await self._engine.stop()

    async def _watch(self, trainer: Role, workers: list[Role]) -> None:
        """Until the trainer ends well; whatever dies before is started again."""
        while (code := trainer.poll()) != 0:
            if code is not None:
                self._count_restart(trainer, code)
                trainer.start_again()
            for worker in workers:
                if (code := worker.poll()) is not None:
                    self._count_restart(worker, code)
                    self._reap()
                    worker.start_again()
            if self._engine_death is not None and self._engine_death.done():
                await self._replace_engine(str(self._engine_death.exception()))
            await asyncio.sleep(_POLL_S)

    async def _replace_engine(self, problem: str) -> None:
        """A new server with the weights of the store's policy; episodes in flight are retried by their workers."""
        self._count(problem)
        await self._stop_engine()
        async with TrajectoryWriter.connect(connection_url(self._config.store), self._config.run.name) as store:
            try:
                policy = await store.policy()
            except ContractError:  # the trainer has not published one yet
                policy = Policy(version=0, weights=str(self._model.path))
        await self._start_engine(read_model(Path(policy.weights)), version=policy.version)

    def _count_restart(self, role: Role, code: int) -> None:
        if code == _USER_ERROR:
            raise UserError(last_lines(role.log, 1).removeprefix("agent-r3: "))
        self._count(f"{role.name} ended with status {code}: {last_lines(role.log, 3)}")

    def _count(self, problem: str) -> None:
        self._restarts += 1
        self._progress.say(f"{problem} (restart {self._restarts} of {_RESTARTS})")
        if self._restarts > _RESTARTS:
            raise RoleFailedError(f"{_RESTARTS} restarts did not help: {problem}; see {self._folder / 'logs'}")
