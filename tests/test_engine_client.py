"""The client against servers that lie: whatever is wrong in an answer is an error with numbers, never data."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from agent_r3.config import EngineConfig, SamplingConfig
from agent_r3.errors import AgentR3Error, ContractError, EngineError, RoutingError, UserError
from agent_r3.hfconfig import ModelInfo
from agent_r3.rollout.client import EngineFleet, decode_rows
from agent_r3.rollout.engine import Generation
from agent_r3.types import MoEShape
from tests.support.engine import engine_config, fleet_of, prompt
from tests.support.lying_server import Answer, encode, honest_answer, lying_server

MOE = MoEShape(num_layers=4, num_experts=16, top_k=4)
MODEL = ModelInfo(Path("m"), "Qwen3MoeForCausalLM", 4, 512, 4096, MOE, (0, 1, 2, 3))
FEW = np.broadcast_to(np.arange(4), (3, 4, 4))


async def ask(
    respond: Callable[[Answer], Answer | web.Response], *, inputs: int = 10, rows_from: int = 9, **changes: object
) -> Generation:
    async with lying_server(respond) as url, fleet_of(url, MODEL, engine_config(**changes)) as fleet:
        return await fleet.at("e").generate(prompt(0, inputs), max_new_tokens=5, rows_from=rows_from)


def lie(change: Callable[[Answer, Answer], None]) -> Callable[[Answer], Answer]:
    def respond(request: Answer) -> Answer:
        answer = honest_answer(request, MOE)
        change(answer, answer["meta_info"])
        return answer

    return respond


def lp(meta: Answer, place: int) -> list[Any]:
    entry: list[Any] = meta["output_token_logprobs"][place]
    return entry


def rows_with(value: int, row: int = 2, layer: int = 1, slot: int = 3) -> str:
    rows = np.array(np.broadcast_to(np.arange(4), (5, 4, 4)))
    rows[row, layer, slot] = value
    return encode(rows)


async def test_an_honest_answer_is_taken_as_it_is() -> None:
    generation = await ask(lambda request: honest_answer(request, MOE))
    assert generation.output_ids.tolist() == [20, 21, 22, 23, 24]
    assert generation.routing.start == 9
    assert generation.routing.experts.shape == (5, 4, 4)
    assert generation.routing.experts.dtype == np.uint8
    assert (generation.policy_version, generation.cached_tokens, generation.finished) == (7, 0, False)


ROUTING_LIES: list[tuple[str, Callable[[Answer, Answer], None], str]] = [
    ("too few rows", lambda a, m: m.update(routed_experts=encode(FEW)), r"expected 5 routing rows.*got 48 .*3 rows"),
    ("too many rows", lambda a, m: m.update(routed_experts=encode(np.tile(FEW, (5, 1, 1)))), r"expected 5 .*15 rows"),
    ("no rows", lambda a, m: m.pop("routed_experts"), r"no routing rows, expected 5"),
    ("null rows", lambda a, m: m.update(routed_experts=None), r"no routing rows, expected 5"),
    ("not base64", lambda a, m: m.update(routed_experts="%%%"), r"not base64"),
    ("cut base64", lambda a, m: m.update(routed_experts="AAAA"), r"not base64 of int32"),
    ("expert too high", lambda a, m: m.update(routed_experts=rows_with(16)), r"out of range 0\.\.15.*row 2, layer 1"),
    ("expert negative", lambda a, m: m.update(routed_experts=rows_with(-1)), r"out of range 0\.\.15.*row 2, layer 1"),
    ("would wrap in uint8", lambda a, m: m.update(routed_experts=rows_with(259)), r"out of range 0\.\.15.*259"),
    ("expert twice", lambda a, m: m.update(routed_experts=rows_with(0)), r"twice.*row 2, layer 1: \[0, 1, 2, 0\]"),
]


@pytest.mark.parametrize(("name", "change", "message"), ROUTING_LIES, ids=[lie_[0] for lie_ in ROUTING_LIES])
async def test_wrong_routing_rows_are_a_routing_error_with_numbers(
    name: str, change: Callable[[Answer, Answer], None], message: str
) -> None:
    with pytest.raises(RoutingError, match=message):
        await ask(lie(change))


async def test_a_server_that_ignores_the_start_is_a_routing_error() -> None:
    def respond(request: Answer) -> Answer:
        return honest_answer({**request, "routed_experts_start_len": 0}, MOE)

    with pytest.raises(RoutingError, match=r"rows 9\.\.14: expected 5 routing rows.*14 rows"):
        await ask(respond)


CONTRACT_LIES: list[tuple[str, Callable[[Answer, Answer], None], str]] = [
    (
        "log-prob of another token",
        lambda a, m: m["output_token_logprobs"][3].__setitem__(1, 99),
        r"log-prob 3 .* 99.*23",
    ),
    ("log-prob missing", lambda a, m: m["output_token_logprobs"].pop(), r"5 sampled tokens but 4 log-probs"),
    ("no log-probs", lambda a, m: m.pop("output_token_logprobs"), r"5 sampled tokens but none log-probs"),
    (
        "log-prob not finite",
        lambda a, m: m["output_token_logprobs"][2].__setitem__(0, None),
        r"log-prob 2 is not finite",
    ),
    ("weight version unknown", lambda a, m: m.update(weight_version="step-4"), r"'step-4'.*not a policy version"),
    ("weight version missing", lambda a, m: m.pop("weight_version"), r"None.*not a policy version"),
    ("cached tokens missing", lambda a, m: m.pop("cached_tokens"), r"cached_tokens is None"),
]


@pytest.mark.parametrize(("name", "change", "message"), CONTRACT_LIES, ids=[lie_[0] for lie_ in CONTRACT_LIES])
async def test_wrong_tokens_logprobs_or_versions_are_contract_errors(
    name: str, change: Callable[[Answer, Answer], None], message: str
) -> None:
    with pytest.raises(ContractError, match=message):
        await ask(lie(change))


ENGINE_FAILURES: list[tuple[str, Callable[[Answer], Answer | web.Response], str]] = [
    ("abort", lie(lambda a, m: m.update(finish_reason={"type": "abort", "message": "gone"})), r"aborted.*gone"),
    ("empty output", lie(lambda a, m: a.update(output_ids=[])), r"empty output"),
    ("no meta_info", lie(lambda a, m: a.pop("meta_info")), r"without meta_info"),
    ("HTTP 400", lambda r: web.Response(status=400, text="input is too long"), r"HTTP 400: input is too long"),
    ("HTTP 500", lambda r: web.Response(status=500, text="boom"), r"HTTP 500: boom"),
    ("not JSON", lambda r: web.Response(text="<html>"), r"not JSON: <html>"),
]


@pytest.mark.parametrize(("name", "respond", "message"), ENGINE_FAILURES, ids=[f[0] for f in ENGINE_FAILURES])
async def test_a_refused_or_broken_answer_is_an_engine_error(
    name: str, respond: Callable[[Answer], Answer | web.Response], message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        await ask(respond)


async def test_a_busy_server_is_asked_again_and_a_failing_one_is_not() -> None:
    asked: list[int] = []

    def busy_twice(request: Answer) -> Answer | web.Response:
        asked.append(1)
        return web.Response(status=503, text="busy") if len(asked) < 3 else honest_answer(request, MOE)

    assert len((await ask(busy_twice)).output_ids) == 5
    assert len(asked) == 3

    def failing(request: Answer) -> web.Response:
        asked.append(1)
        return web.Response(status=500)

    asked.clear()
    with pytest.raises(EngineError, match="HTTP 500"):
        await ask(failing)
    assert len(asked) == 1


async def test_a_server_that_stays_busy_is_an_engine_error_after_three_attempts() -> None:
    asked: list[int] = []

    def busy(request: Answer) -> web.Response:
        asked.append(1)
        return web.Response(status=503, text="overloaded")

    with pytest.raises(EngineError, match=r"not reachable after 3 attempts.*overloaded"):
        await ask(busy)
    assert len(asked) == 3


async def test_nothing_listening_is_an_engine_error() -> None:
    async with fleet_of("http://127.0.0.1:9", MODEL, engine_config()) as fleet:
        with pytest.raises(EngineError, match="not reachable after 3 attempts"):
            await fleet.at("e").generate(prompt(0, 4), max_new_tokens=1, rows_from=0)


async def test_a_silent_server_is_an_engine_error_at_the_deadline() -> None:
    async with await asyncio.start_server(lambda r, w: asyncio.sleep(3), "127.0.0.1", 0) as silent:
        url = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
        async with fleet_of(url, MODEL, engine_config(request_timeout_s=0.3)) as fleet:
            with pytest.raises(EngineError, match="timed out"):
                await fleet.at("e").generate(prompt(0, 4), max_new_tokens=1, rows_from=0)


async def test_the_request_holds_the_ids_the_sampling_and_the_start_and_nothing_that_bends_the_distribution() -> None:
    seen: list[Answer] = []

    def respond(request: Answer) -> Answer:
        seen.append(request)
        return honest_answer(request, MOE)

    await ask(respond, inputs=10, rows_from=4)
    (request,) = seen
    assert request["input_ids"] == prompt(0, 10).tolist()
    assert (request["return_logprob"], request["return_routed_experts"]) == (True, True)
    assert request["routed_experts_start_len"] == 4
    assert request["sampling_params"] == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "stop_token_ids": [],
        "skip_special_tokens": False,
        "max_new_tokens": 5,
    }


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"max_new_tokens": 0, "rows_from": 0}, ContractError, "sglang#20964"),
        ({"max_new_tokens": 1, "rows_from": -1}, RoutingError, r"rows_from=-1 is outside 0\.\.4"),
        ({"max_new_tokens": 1, "rows_from": 5}, RoutingError, r"rows_from=5 is outside 0\.\.4"),
    ],
)
async def test_a_request_that_cannot_be_right_is_refused_before_it_is_sent(
    arguments: dict[str, int], error: type[AgentR3Error], message: str
) -> None:
    async with fleet_of("http://127.0.0.1:9", MODEL, engine_config()) as fleet:
        with pytest.raises(error, match=message):
            await fleet.at("e").generate(prompt(0, 4), **arguments)


async def test_a_server_without_routed_experts_is_refused_with_what_to_do() -> None:
    async with (
        lying_server(lie(lambda a, m: m.pop("routed_experts"))) as url,
        fleet_of(url, MODEL, engine_config()) as fleet,
    ):
        with pytest.raises(UserError, match=r"start SGLang with --enable-return-routed-experts"):
            await fleet.check()


async def test_hundreds_of_requests_in_flight_at_once() -> None:
    in_flight, all_here = 0, asyncio.Event()

    async def generate(request: web.Request) -> web.Response:
        nonlocal in_flight
        in_flight += 1
        if in_flight == 300:
            all_here.set()
        await asyncio.wait_for(all_here.wait(), 60)  # nobody is answered before everybody has asked
        return web.json_response(honest_answer(json.loads(await request.text()), MOE))

    app = web.Application()
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with fleet_of(
            f"http://127.0.0.1:{runner.addresses[0][1]}", MODEL, engine_config(), concurrency=300
        ) as fleet:
            await asyncio.gather(
                *(fleet.at("e").generate(prompt(i, 50), max_new_tokens=5, rows_from=0) for i in range(300))
            )
    finally:
        await runner.cleanup()
    assert in_flight == 300


def test_a_key_always_gets_the_same_server_and_losing_one_moves_only_its_keys() -> None:
    def placement(urls: tuple[str, ...]) -> dict[str, str]:
        engine = EngineConfig(urls=urls)
        fleet = EngineFleet(engine, MODEL, SamplingConfig(), concurrency=1)
        return {f"g{i}": fleet.at(f"g{i}").url for i in range(300)}

    three = placement(("http://a:1", "http://b:1", "http://c:1/"))
    assert three == placement(("http://c:1", "http://a:1", "http://b:1"))
    assert all(list(three.values()).count(url) > 60 for url in set(three.values()))
    two = placement(("http://a:1", "http://b:1"))
    assert all(two[key] == url for key, url in three.items() if url != "http://c:1")


def test_a_fleet_without_servers_is_refused() -> None:
    with pytest.raises(UserError, match=r"engine\.urls is empty"):
        EngineFleet(EngineConfig(), MODEL, SamplingConfig(), concurrency=1)


def test_experts_above_256_are_kept_in_two_bytes() -> None:
    moe = MoEShape(num_layers=1, num_experts=512, top_k=2)
    model = ModelInfo(Path("m"), "x", 1, 512, 4096, moe, (0,))
    rows = decode_rows(encode(np.array([[[511, 256]], [[0, 255]]])), 2, model)
    assert rows.dtype == np.uint16
    assert rows.tolist() == [[[511, 256]], [[0, 255]]]


def test_columns_of_dense_layers_are_left_out_and_must_be_zero() -> None:
    model = ModelInfo(Path("m"), "x", 3, 512, 4096, MoEShape(num_layers=2, num_experts=8, top_k=2), (0, 2))
    raw: Any = np.array([[[1, 2], [0, 0], [3, 4]]])
    assert decode_rows(encode(raw), 1, model).tolist() == [[[1, 2], [3, 4]]]
    raw[0, 1] = [5, 6]
    with pytest.raises(RoutingError, match=r"dense layers.*\(0, 2\)"):
        decode_rows(encode(raw), 1, model)


def test_no_rows_are_an_empty_array_of_the_right_shape() -> None:
    assert decode_rows("", 0, MODEL).shape == (0, 4, 4)
