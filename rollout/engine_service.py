"""`agent-r3 serve` as a service: an engine that takes part in a run, and comes back with the run's policy."""

import asyncio
import math
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import structlog
from structlog.contextvars import bind_contextvars

from agent_r3.config import Config
from agent_r3.errors import ContractError, EngineError, first_failure
from agent_r3.heartbeat import Heartbeat
from agent_r3.hfconfig import read_model
from agent_r3.process import until_signalled
from agent_r3.rollout.launcher import EngineServer
from agent_r3.store import Policy, TrajectoryWriter, connection_url
from agent_r3.telemetry import Health, Telemetry, serve_telemetry
from agent_r3.weight_load import load_weights

log = structlog.get_logger(__name__)

_ASK_S = 5.0
_FOLLOW_S = 5.0


async def serve_engine(config: Config, name: str, *, weight_version: int) -> None:
    """Serve until SIGTERM or SIGINT. Raises UserError at start, EngineError when the server dies.

    With `store.url` it serves the policy that the run is at, and comes after it where a push passed it by; `model.path`
    as version `weight_version` where there is none yet, or no store.
    """
    bind_contextvars(run=config.run.name, role="engine")
    await until_signalled(_Service(config, name).run(Policy(weight_version, config.model.path)))
    log.info("engine stopped")


class _Service:
    """One engine process."""

    def __init__(self, config: Config, name: str) -> None:
        self._config = config
        self._name = name
        self._telemetry = Telemetry("engine", config.run.name)
        self._health = Health()
        self._state = "starting"  # then serving
        self._version: int | None = None
        self._server: EngineServer | None = None

    async def run(self, initial: Policy) -> None:
        config = self._config
        async with AsyncExitStack() as stack:
            stack.enter_context(serve_telemetry(config.service, self._telemetry, self._health))
            policy = await current_policy(config) or initial if config.store.url else initial
            server = EngineServer(
                config.engine,
                read_model(Path(policy.weights)),
                log=config.run.folder / "logs" / "engine.log",
                weight_version=policy.version,
                seed=config.run.seed,
            )
            if config.store.url:
                heartbeat = Heartbeat(config.store, config.run.name, f"engine/{self._name}", self._payload)
                self._health.checks.append(stack.enter_context(heartbeat).problem)
            log.info("engine starts", weights=policy.weights, policy_version=policy.version)
            await stack.enter_async_context(server)
            self._server, self._state, self._health.starting = server, "serving", None
            self._health.checks.append(self._silent)
            print(f"serving at {server.url}", flush=True)
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(server.watch())
                    if config.store.url:
                        tasks.create_task(self._follow(server))
            except BaseExceptionGroup as failed:
                raise first_failure(failed) from None

    async def _follow(self, server: EngineServer) -> None:
        """Load the run's policy when it is newer than what is served: it was pushed while this server was starting."""
        config = self._config
        async with TrajectoryWriter.connect(connection_url(config.store), config.run.name, retry_s=math.inf) as store:
            while True:
                await asyncio.sleep(_FOLLOW_S)
                policy = await _policy(store)
                await asyncio.to_thread(self._silent)
                if policy is None or self._version is None or policy.version <= self._version:
                    continue
                log.warning("a push was missed", policy_version=policy.version, served=self._version)
                try:
                    await asyncio.to_thread(
                        load_weights, server.url, policy.version, Path(policy.weights), retry_s=_ASK_S
                    )
                except (EngineError, ContractError) as exc:  # the trainer may be pushing the next one
                    log.warning("the policy was not loaded", policy_version=policy.version, reason=str(exc))

    def _payload(self) -> dict[str, object]:
        """Of the heartbeat. `url` is where the other roles find this server."""
        self._silent()
        urls = self._config.engine.urls or ((self._server.url,) if self._server else ())
        return {"state": self._state, "policy_version": self._version, "url": urls[0] if len(urls) == 1 else None}

    def _silent(self) -> str | None:
        """One line when the server does not answer; learns which policy it serves."""
        if self._server is None:
            return None
        try:
            answer = httpx.get(f"{self._server.url}/model_info", timeout=_ASK_S, trust_env=False)
            self._version = int(answer.raise_for_status().json()["weight_version"])
        except (httpx.HTTPError, ValueError, KeyError) as exc:
            return f"the engine does not answer at {self._server.url}: {type(exc).__name__}: {exc}"
        self._telemetry.gauge("agent_r3_policy_version").set(self._version)
        return None


async def current_policy(config: Config) -> Policy | None:
    """The policy that the run is at; None before its trainer has published one, or where its weights are gone."""
    async with TrajectoryWriter.connect(connection_url(config.store), config.run.name) as store:
        policy = await _policy(store)
    if policy is None:
        return None
    if Path(policy.weights).is_dir():
        return policy
    log.warning("the weights of the run's policy are gone", weights=policy.weights, policy_version=policy.version)
    return None


async def _policy(store: TrajectoryWriter) -> Policy | None:
    try:
        return await store.policy()
    except ContractError:  # none was published yet
        return None
