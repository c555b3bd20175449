"""SGLang over HTTP: token ids in; token ids, log-probs and checked routing rows out."""

import asyncio
import binascii
import hashlib
import json
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

import httpx
import httpx_aiohttp
import numpy as np
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_exponential_jitter

from agent_r3.config import EngineConfig, SamplingConfig
from agent_r3.errors import ContractError, EngineError, RoutingError, UserError
from agent_r3.hfconfig import ModelInfo
from agent_r3.rollout.engine import Generation
from agent_r3.routing import validate_rows
from agent_r3.types import Float32Array, Int32Array, Routing, RowArray

T = TypeVar("T")
_ATTEMPTS = 3
_CONTROL_TIMEOUT_S = 30.0
INITIAL_WEIGHTS = "default"  # what SGLang reports when it was started without --weight-version


class _Unavailable(Exception):
    """The request certainly produced nothing: refused, reset before an answer, or 503."""


class SGLangClient:
    """One server; implements `Engine`. Made by `EngineFleet`, which owns the connections."""

    def __init__(
        self,
        url: str,
        http: httpx.AsyncClient,
        model: ModelInfo,
        sampling: SamplingConfig,
        *,
        routed_experts: bool,
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        if routed_experts:
            model.require_moe()
        self.url = url
        self._http, self._model, self._routed_experts = http, model, routed_experts
        self._sampling = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop_token_ids": list(stop_token_ids),
            "skip_special_tokens": False,
        }

    async def generate(
        self, input_ids: Int32Array, *, max_new_tokens: int, rows_from: int, seed: int | None = None
    ) -> Generation:
        """Sample after `input_ids`; rows of positions `rows_from` .. len(input) + S - 2.

        `seed` takes effect only on a server started with `--enable-deterministic-inference`. Without routed experts
        (dense model, or R3 off) the rows are empty: shape [0, 0, 0].

        Raises EngineError when the server is gone, refuses, aborts or times out; RoutingError when rows do not fit;
        ContractError when tokens, log-probs or the weight version do not.
        """
        if max_new_tokens < 1:
            raise ContractError(f"max_new_tokens={max_new_tokens}: SGLang drops a routing row at 0 (sglang#20964)")
        if not 0 <= rows_from <= len(input_ids):
            raise RoutingError(f"rows_from={rows_from} is outside 0..{len(input_ids)} (the input's length)")
        sampling: dict[str, object] = {**self._sampling, "max_new_tokens": max_new_tokens}
        if seed is not None:
            sampling["sampling_seed"] = seed
        payload: dict[str, object] = {
            "input_ids": input_ids.tolist(),
            "sampling_params": sampling,
            "return_logprob": True,
        }
        if self._routed_experts:
            payload |= {"return_routed_experts": True, "routed_experts_start_len": rows_from}
        answer = await self._retried(lambda: self._post("/generate", payload))
        return self._read(answer, len(input_ids), rows_from)

    async def health(self) -> None:
        """Raises EngineError when the server does not answer, or cannot generate."""
        await self._retried(lambda: self._call("GET", "/health"))

    async def server_info(self) -> dict[str, Any]:
        """SGLang's start-up configuration and live state."""
        return _json_object(await self._retried(lambda: self._call("GET", "/server_info")), self.url)

    async def flush_cache(self) -> None:
        """Forget all KV and routing rows. Raises EngineError while requests are running (SGLang refuses then)."""
        await self._retried(lambda: self._call("POST", "/flush_cache"))

    async def abort_all(self) -> None:
        """Abort every running request; their `generate` calls raise EngineError."""
        await self._retried(lambda: self._call("POST", "/abort_request", {"abort_all": True}))

    async def check(self) -> None:
        """Refuse a server that cannot serve this run, with one generated token.

        Raises UserError when it returns no routing rows, or rows of another shape; EngineError when it is not there.
        """
        try:
            await self.generate(np.arange(4, dtype=np.int32), max_new_tokens=2, rows_from=0)
        except RoutingError as exc:
            raise UserError(
                f"{exc}; start SGLang with --enable-return-routed-experts and the model of model.path, and talk to "
                "the server itself (gateways drop the field)"
            ) from exc

    def _read(self, answer: dict[str, Any], inputs: int, rows_from: int) -> Generation:
        """Turn an answer into a Generation; everything in it is checked against what was asked."""
        meta = answer.get("meta_info")
        if not isinstance(meta, dict):
            raise EngineError(f"engine {self.url}: answer without meta_info: {str(answer)[:300]}")
        reason = meta.get("finish_reason") or {}
        if reason.get("type") == "abort":
            raise EngineError(f"engine {self.url} aborted the request: {reason.get('message', 'no reason given')}")
        ids = np.asarray(answer.get("output_ids") or [], dtype=np.int32)
        if len(ids) == 0:
            raise EngineError(f"engine {self.url}: empty output (finish reason {reason})")
        return Generation(
            output_ids=ids,
            logprobs=_logprobs(meta.get("output_token_logprobs"), ids, self.url),
            routing=self._routing(meta.get("routed_experts"), rows_from, inputs + len(ids) - 1),
            cached_tokens=_count(meta, "cached_tokens", self.url),
            policy_version=_version(meta.get("weight_version"), self.url),
            finished=reason.get("type") == "stop",
            retractions=_count(meta, "num_retractions", self.url),
        )

    def _routing(self, encoded: object, start: int, stop: int) -> Routing:
        if not self._routed_experts:
            return Routing(start, np.zeros((0, 0, 0), dtype=np.uint8))
        if not isinstance(encoded, str):
            raise RoutingError(f"engine {self.url} returned no routing rows, expected {stop - start}")
        try:
            return Routing(start, decode_rows(encoded, stop - start, self._model))
        except RoutingError as exc:
            raise RoutingError(f"engine {self.url}, rows {start}..{stop}: {exc}") from None

    async def _post(self, path: str, payload: dict[str, object]) -> dict[str, Any]:
        return _json_object(await self._call("POST", path, payload, timeout=None), self.url)

    async def _call(
        self,
        method: str,
        path: str,
        payload: dict[str, object] | None = None,
        *,
        timeout: float | None = _CONTROL_TIMEOUT_S,
    ) -> httpx.Response:
        """One request. `timeout` None means the fleet's request time-out."""
        limit: Any = httpx.USE_CLIENT_DEFAULT if timeout is None else timeout
        try:
            response = await self._http.request(method, self.url + path, json=payload, timeout=limit)
        except httpx.TransportError as exc:
            # httpx-aiohttp books a connection closed by the server as a time-out too; aiohttp's own error tells.
            if isinstance(exc.__cause__, TimeoutError):
                raise EngineError(f"engine {self.url}{path}: timed out ({type(exc.__cause__).__name__})") from exc
            raise _Unavailable(f"{type(exc.__cause__ or exc).__name__}: {exc}") from exc
        if response.status_code == 503:
            raise _Unavailable(f"HTTP 503: {response.text[:300]}")
        if response.status_code != 200:
            raise EngineError(f"engine {self.url}{path}: HTTP {response.status_code}: {response.text[:500]}")
        return response

    async def _retried(self, call: Callable[[], Awaitable[T]]) -> T:
        """Sampling again is harmless when the first attempt gave no answer; anything else is not retried."""
        try:
            async for attempt in AsyncRetrying(
                retry=retry_if_exception_type(_Unavailable),
                stop=stop_after_attempt(_ATTEMPTS),
                wait=wait_exponential_jitter(initial=0.1, max=1.0),
                reraise=True,
            ):
                with attempt:
                    return await call()
        except _Unavailable as exc:
            raise EngineError(f"engine {self.url} is not reachable after {_ATTEMPTS} attempts: {exc}") from exc
        raise AssertionError("unreachable")


class EngineFleet:
    """The servers of a run behind one connection pool: `async with EngineFleet(...) as fleet: fleet.at(key)`."""

    def __init__(
        self,
        engine: EngineConfig,
        model: ModelInfo,
        sampling: SamplingConfig,
        *,
        concurrency: int,
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        """`concurrency`: requests in flight together, each on a connection of its own."""
        if not engine.urls:
            raise UserError("engine.urls is empty: name the servers, or let `agent-r3 train` launch one")
        self._http = httpx_aiohttp.HttpxAiohttpClient(
            # Shorter than the servers' 5 s, so that a kept connection is not used while they close it.
            limits=httpx.Limits(max_connections=concurrency + 4, keepalive_expiry=3.0),
            timeout=httpx.Timeout(engine.request_timeout_s, connect=10.0),
            trust_env=False,
        )
        self.clients = tuple(
            SGLangClient(
                url.rstrip("/"),
                self._http,
                model,
                sampling,
                routed_experts=engine.routed_experts,
                stop_token_ids=stop_token_ids,
            )
            for url in engine.urls
        )

    def at(self, key: str) -> SGLangClient:
        """The server for `key` (an episode or group id): always the same one, so that its prefix cache holds it.

        Rendezvous hashing: adding or losing a server moves only the keys of that server.
        """
        return max(self.clients, key=lambda client: hashlib.sha256(f"{client.url} {key}".encode()).digest())

    async def check(self) -> None:
        """`SGLangClient.check` on every server."""
        await asyncio.gather(*(client.check() for client in self.clients))

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> "EngineFleet":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def decode_rows(encoded: str, rows: int, model: ModelInfo) -> RowArray:
    """SGLang's base64 of C-order int32 [rows, hidden layers, top_k] as checked rows [rows, MoE layers, top_k].

    SGLang has a column of zeros for each hidden layer that is dense; those are left out.
    Raises RoutingError for a wrong number of rows, an expert out of range, or one that stands twice in a choice.
    """
    moe = model.require_moe()
    try:
        flat = np.frombuffer(binascii.a2b_base64(encoded, strict_mode=True), dtype="<i4")
    except (binascii.Error, ValueError) as exc:
        raise RoutingError(f"routing rows are not base64 of int32: {exc}") from exc
    width = model.num_hidden_layers * moe.top_k
    if len(flat) != rows * width:
        raise RoutingError(
            f"expected {rows} routing rows of {model.num_hidden_layers} layers x {moe.top_k} experts "
            f"({rows * width} values), got {len(flat)} values ({len(flat) / width:g} rows)"
        )
    experts = flat.reshape(rows, model.num_hidden_layers, moe.top_k)
    if moe.num_layers != model.num_hidden_layers:
        routed = np.zeros(model.num_hidden_layers, dtype=np.bool_)
        routed[list(model.moe_layers)] = True
        if experts[:, ~routed].any():
            raise RoutingError(f"routing rows name experts in dense layers; MoE layers should be {model.moe_layers}")
        experts = experts[:, routed]
    return validate_rows(experts, moe, "routing rows")


def _logprobs(entries: object, ids: Int32Array, url: str) -> Float32Array:
    """`output_token_logprobs` ([logprob, token id, text] each) against the sampled ids. Raises ContractError."""
    if not isinstance(entries, list) or len(entries) != len(ids):
        found = len(entries) if isinstance(entries, list) else "none"
        raise ContractError(f"engine {url}: {len(ids)} sampled tokens but {found} log-probs")
    named = [entry[1] for entry in entries]
    if named != ids.tolist():
        at = next(i for i, (a, b) in enumerate(zip(named, ids.tolist(), strict=True)) if a != b)
        raise ContractError(f"engine {url}: log-prob {at} is of token {named[at]}, but token {ids[at]} was sampled")
    logprobs = np.array([entry[0] for entry in entries], dtype=np.float32)
    if not np.isfinite(logprobs).all():
        raise ContractError(f"engine {url}: log-prob {int(np.flatnonzero(~np.isfinite(logprobs))[0])} is not finite")
    return logprobs


def _version(reported: object, url: str) -> int:
    """Policy version from SGLang's weight_version string. Raises ContractError when it is not one of ours."""
    if reported == INITIAL_WEIGHTS:
        return 0
    if isinstance(reported, str) and reported.isdecimal():
        return int(reported)
    raise ContractError(f"engine {url} serves weight version {reported!r}, which is not a policy version")


def _count(meta: dict[str, Any], key: str, url: str) -> int:
    value = meta.get(key)
    if not isinstance(value, int) or value < 0:
        raise ContractError(f"engine {url}: meta_info.{key} is {value!r}, expected a count")
    return value


def _json_object(response: httpx.Response, url: str) -> dict[str, Any]:
    try:
        content = json.loads(response.content)
    except ValueError as exc:
        raise EngineError(f"engine {url}: the answer is not JSON: {response.text[:200]}") from exc
    if not isinstance(content, dict):
        raise EngineError(f"engine {url}: the answer is not a JSON object: {response.text[:200]}")
    return content
