"""The model that is evaluated: a policy behind SGLang, launched here where nobody serves it, or an endpoint."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import structlog

from agent_r3.archive import TurnText, turn_text
from agent_r3.config import AgentConfig, Config, EngineConfig
from agent_r3.errors import EngineError, UserError
from agent_r3.hfconfig import ModelInfo, read_model
from agent_r3.rollout.client import EngineFleet
from agent_r3.rollout.conversation import Agent, Conversation, Reply, Speaker, first_prompt
from agent_r3.rollout.launcher import EngineServer, check_port
from agent_r3.rollout.tokens import ChatRenderer
from agent_r3.tools.toolbox import Toolbox
from agent_r3.types import Observation, Task, ToolCall, Turn

if TYPE_CHECKING:
    from agent_r3.eval.endpoint import Endpoint

log = structlog.get_logger(__name__)

_RESTARTS = 5


class Model(Protocol):
    """Speaks in episodes."""

    @property
    def name(self) -> str:
        """What predictions name it."""
        ...

    @property
    def cache_known(self) -> bool:
        """Whether `cached_tokens` of its turns says which tokens had to be computed again."""
        ...

    def speaker(self, instance_id: str, seed: int) -> Speaker[TurnText]:
        """For one episode. `seed` counts where the server takes one."""
        ...

    async def require_answer(self, instance_id: str) -> None:
        """Raises EngineError while it cannot serve that instance's episodes."""
        ...


def require_model(config: Config, tasks: Sequence[Task], log_file: Path) -> ModelInfo | None:
    """Raises UserError for a policy that SGLang cannot serve, a busy port, and a prompt without room for an answer.

    None for an endpoint, of which only `open_model` can tell.
    """
    if config.eval.endpoint is not None:
        return None
    model = read_model(Path(config.model.path))
    renderer = ChatRenderer.from_folder(model)
    tools = Toolbox(config.agent).documentation
    for task in tasks:
        first_prompt(renderer, config.agent, task, tools)
    if not config.engine.urls:
        EngineServer(_engine(config), model, log=log_file)
        if config.engine.port:
            check_port(config.engine.host, config.engine.port)
    return model


@asynccontextmanager
async def open_model(config: Config, model: ModelInfo | None, log_file: Path) -> AsyncIterator[Model]:
    """The config's model, answering. `model` is what `require_model` gave. Raises UserError, EngineError."""
    if model is None:
        from agent_r3.eval.endpoint import open_endpoint  # needs openai, which a policy of our own does not

        async with open_endpoint(config) as endpoint:
            await endpoint.check()
            yield _Served(endpoint, config.model.path)
        return
    renderer = ChatRenderer.from_folder(model)
    async with AsyncExitStack() as stack:
        engine = _engine(config)
        if not engine.urls:
            url = await stack.enter_async_context(_launched(engine, model, log_file, config.eval.seed))
            engine = engine.model_copy(update={"urls": (url,)})
        fleet = await stack.enter_async_context(
            EngineFleet(
                engine,
                model,
                config.eval.sampling or config.sampling,
                concurrency=config.eval.concurrency,
                stop_token_ids=(renderer.stop_id,),
            )
        )
        try:
            await fleet.check()
        except EngineError as exc:
            raise UserError(f"engine.urls: {exc}; start that server, or leave engine.urls out") from exc
        yield _Policy(fleet, renderer, config.agent, policy_name(model.path))


def policy_name(folder: Path) -> str:
    """What predictions call a model folder: its name; `demo/v000026` for runs/demo/weights/v000026. Pure."""
    name = folder.resolve()
    return f"{name.parts[-3]}/{name.name}" if name.parent.name == "weights" and len(name.parts) > 3 else name.name


def _engine(config: Config) -> EngineConfig:
    """Without routing rows: nothing is trained here, and a dense model has none."""
    return config.engine.model_copy(update={"routed_experts": False})


@asynccontextmanager
async def _launched(engine: EngineConfig, model: ModelInfo, log_file: Path, seed: int) -> AsyncIterator[str]:
    """The URL of a server of our own, which is started again when it dies."""
    log.info("starting the engine", model=model.path.name, log=str(log_file))
    async with EngineServer(engine, model, log=log_file, seed=seed) as server:
        keeper = asyncio.create_task(_keep(server))
        try:
            yield server.url
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)


async def _keep(server: EngineServer) -> None:
    for restart in range(1, _RESTARTS + 1):
        try:
            await server.watch()
        except EngineError as exc:
            log.warning("the engine is started again", restart=restart, of=_RESTARTS, problem=str(exc))
        try:
            await server.start()
        except (EngineError, UserError) as exc:
            log.error("the engine did not start", problem=str(exc))
    log.error("the engine is not started again", restarts=_RESTARTS)


class _Policy:
    """A policy behind SGLang, token in and token out."""

    cache_known = True

    def __init__(self, fleet: EngineFleet, renderer: ChatRenderer, agent: AgentConfig, name: str) -> None:
        self._fleet, self._renderer, self._agent = fleet, renderer, agent
        self.name = name

    def speaker(self, instance_id: str, seed: int) -> Speaker[TurnText]:
        return _Told(Agent(self._fleet.at(instance_id), self._renderer, self._agent, seed))

    async def require_answer(self, instance_id: str) -> None:
        await self._fleet.at(instance_id).health()


@dataclass(frozen=True, slots=True)
class _Told:
    """A speaker of token arrays whose turns are kept as text only."""

    speaker: Speaker[Turn]

    @property
    def config(self) -> AgentConfig:
        return self.speaker.config

    def begin(self, task: Task, toolbox: Toolbox) -> "_ToldConversation":
        return _ToldConversation(self.speaker.begin(task, toolbox))


@dataclass(frozen=True, slots=True)
class _ToldConversation:
    conversation: Conversation[Turn]

    async def reply(self) -> Reply | None:
        return await self.conversation.reply()

    def turn(
        self, calls: Sequence[ToolCall], observations: tuple[Observation, ...], seconds: Mapping[str, float]
    ) -> TurnText:
        return turn_text(self.conversation.turn(calls, observations, seconds))

    def observe(self, observations: Sequence[Observation]) -> None:
        self.conversation.observe(observations)


@dataclass(frozen=True, slots=True)
class _Served:
    """Whatever an OpenAI-compatible endpoint serves."""

    endpoint: "Endpoint"
    name: str
    cache_known: bool = False  # few endpoints say what they had cached, and none what they had not to cache

    def speaker(self, instance_id: str, seed: int) -> Speaker[TurnText]:
        return self.endpoint.speaker(seed)

    async def require_answer(self, instance_id: str) -> None:
        try:
            await self.endpoint.check()
        except UserError as exc:
            raise EngineError(str(exc)) from exc
