"""Real SGLang in fp32 and bf16 against Hugging Face: rows are exact, follow the cache, and belong to the weights."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from agent_r3.errors import EngineError, UserError
from agent_r3.rollout.client import SGLangClient
from agent_r3.rollout.engine import Generation
from agent_r3.routing import RoutingLedger, rows_from
from agent_r3.trainer.push import WeightPublisher
from agent_r3.types import Float32Array, Int32Array, RowArray
from tests.support.engine import LiveEngine, engine_config, fleet_of, prompt, save_tiny_moe, write_config
from tests.support.qwen3_reference import Reference

pytestmark = pytest.mark.engine


@dataclass(frozen=True)
class Episode:
    """Turns of one trajectory as the client returned them, spliced by the ledger."""

    tokens: Int32Array
    rows: RowArray
    turns: list[tuple[int, int, Generation]]  # tokens before this turn, tokens sent, answer


async def play(client: SGLangClient, first: Int32Array, *, turns: int, seed: int, new: int = 24) -> Episode:
    """`turns` turns with random observations of 60 tokens between them, asking for delta rows only."""
    tokens, known, ledger, log = first, 0, RoutingLedger(f"episode {seed}"), []
    for turn in range(turns):
        answer = await client.generate(tokens, max_new_tokens=new, rows_from=rows_from(known))
        log.append((known, len(tokens), answer))
        tokens = np.concatenate([tokens, answer.output_ids])
        known = len(tokens)
        ledger.append(answer.routing, version=answer.policy_version, total_tokens=known)
        if turn < turns - 1:
            tokens = np.concatenate([tokens, prompt(1000 * seed + turn, 60)])
    return Episode(tokens, ledger.finish(known).experts, log)


@pytest.fixture(scope="module")
def reference(tiny_moe: Path) -> Reference:
    return Reference(tiny_moe, "float32")


def same_sets(a: RowArray, b: RowArray) -> bool:
    return bool((np.sort(a, axis=-1) == np.sort(b, axis=-1)).all())


async def test_three_turns_of_delta_rows_equal_the_hugging_face_router(
    engine_fp32: LiveEngine, reference: Reference
) -> None:
    async with engine_fp32.fleet() as fleet:
        client = fleet.at("e")
        await client.flush_cache()
        episode = await play(client, prompt(1, 200), turns=3, seed=1, new=64)
        whole = await client.generate(episode.tokens, max_new_tokens=1, rows_from=0)
    assert episode.rows.shape == (len(episode.tokens) - 1, 4, 4)
    assert same_sets(episode.rows, reference.routes(episode.tokens)[:-1])
    np.testing.assert_array_equal(whole.routing.experts[:-1], episode.rows)  # cached prefixes kept their rows
    for known, sent, answer in episode.turns:
        assert answer.cached_tokens == rows_from(known), f"turn after {known} tokens re-prefilled some of them"
        assert answer.routing.start == rows_from(known)
        assert answer.routing.stop == sent + len(answer.output_ids) - 1
        assert (answer.policy_version, answer.retractions) == (3, 0)
    sampled = np.concatenate([answer.logprobs for _, _, answer in episode.turns])
    positions = np.concatenate([np.arange(sent, sent + len(a.output_ids)) for _, sent, a in episode.turns])
    np.testing.assert_allclose(sampled, reference.logprobs(episode.tokens)[positions - 1], atol=2e-4)


async def test_a_group_over_one_chunked_prompt_has_exact_rows_and_shares_its_prefix(
    engine_fp32: LiveEngine, reference: Reference
) -> None:
    shared = prompt(2, 2500)  # the prefill chunk is 1,024
    async with engine_fp32.fleet() as fleet:
        client = fleet.at("group")
        first = asyncio.create_task(play(client, shared, turns=2, seed=20))
        await asyncio.sleep(0)  # the first of the group goes ahead, so that the others hit its prompt
        await client.generate(shared, max_new_tokens=1, rows_from=len(shared))
        others = await asyncio.gather(*(play(client, shared, turns=2, seed=21 + i) for i in range(5)))
        episodes = [await first, *others]
    for episode in episodes:
        assert len(episode.rows) == len(episode.tokens) - 1
        assert same_sets(episode.rows, reference.routes(episode.tokens)[:-1])
    for episode in others:
        assert episode.turns[0][2].cached_tokens == len(shared) - 1
        assert episode.turns[1][2].cached_tokens == rows_from(episode.turns[1][0])
        np.testing.assert_array_equal(episode.rows[: len(shared)], episodes[0].rows[: len(shared)])


async def test_many_requests_of_different_lengths_decode_together_as_hugging_face_does_alone(
    engine_fp32: LiveEngine, reference: Reference
) -> None:
    """The batched decode, greedily: one wrong key, mask or head would change a token or a route."""
    prompts = [prompt(100 + i, 5 + 17 * i) for i in range(24)]
    async with engine_fp32.fleet(temperature=1e-6) as fleet:
        client = fleet.at("e")
        answers = await asyncio.gather(*(client.generate(ids, max_new_tokens=24, rows_from=0) for ids in prompts))
    for ids, answer in zip(prompts, answers, strict=True):
        tokens = np.concatenate([ids, answer.output_ids])
        assert answer.output_ids.tolist() == reference.greedy(tokens)[len(ids) - 1 : -1].tolist()
        assert same_sets(answer.routing.experts, reference.routes(tokens)[:-1])


async def test_replaying_bf16_rows_brings_the_trainer_close_to_the_rollout(
    engine_bf16: LiveEngine, tiny_moe: Path
) -> None:
    reference = Reference(tiny_moe, "bfloat16")
    native: list[Float32Array] = []
    replayed: list[Float32Array] = []
    async with engine_bf16.fleet() as fleet:
        answers = await asyncio.gather(
            *(fleet.at("e").generate(prompt(200 + i, 150), max_new_tokens=64, rows_from=0) for i in range(8))
        )
    for i, answer in enumerate(answers):
        tokens = np.concatenate([prompt(200 + i, 150), answer.output_ids])
        where = slice(149, len(tokens) - 1)
        native.append(np.abs(reference.logprobs(tokens)[where] - answer.logprobs))
        replayed.append(np.abs(reference.logprobs(tokens, answer.routing.experts)[where] - answer.logprobs))
    without, with_replay = np.concatenate(native), np.concatenate(replayed)
    assert with_replay.mean() <= 0.65 * without.mean(), (with_replay.mean(), without.mean())
    assert with_replay.max() <= 0.2 * without.max(), (with_replay.max(), without.max())


async def test_old_weights_kv_and_rows_are_never_served_after_a_push(
    engine_fp32: LiveEngine, tiny_moe: Path, reference: Reference, tmp_path: Path
) -> None:
    other = save_tiny_moe(tmp_path / "other", seed=1)
    ids = prompt(3, 120)
    async with engine_fp32.fleet() as fleet:
        client = fleet.at("e")
        old = await client.generate(ids, max_new_tokens=8, rows_from=0)
        publisher = WeightPublisher([client.url], tmp_path)
        await asyncio.to_thread(publisher.load, 4, other)
        new = await client.generate(ids, max_new_tokens=8, rows_from=0)
        await asyncio.to_thread(publisher.load, 5, tiny_moe)
        back = await client.generate(ids, max_new_tokens=8, rows_from=0)
    assert [old.policy_version, new.policy_version, back.policy_version] == [3, 4, 5]
    assert new.cached_tokens == back.cached_tokens == 0
    for answer, weights in ((new, Reference(other, "float32")), (back, reference)):
        tokens = np.concatenate([ids, answer.output_ids])
        assert same_sets(answer.routing.experts, weights.routes(tokens)[:-1])
    assert not same_sets(old.routing.experts[:119], new.routing.experts[:119])
    await asyncio.to_thread(publisher.load, 3, tiny_moe)  # other tests expect the version it was started with


async def running(client: SGLangClient, seed: int, tokens: int) -> "tuple[Int32Array, asyncio.Task[Generation]]":
    """A request that is being decoded. A random model may sample the stop token early: then another prompt is taken."""
    for attempt in range(10):
        ids = prompt(10 * seed + attempt, 300)
        task = asyncio.create_task(client.generate(ids, max_new_tokens=tokens, rows_from=0))
        await asyncio.sleep(0.5)
        if not task.done():
            return ids, task
    raise AssertionError("every request stopped within half a second")


async def test_an_aborted_request_is_an_engine_error_and_the_server_goes_on(engine_fp32: LiveEngine) -> None:
    async with engine_fp32.fleet() as fleet:
        client = fleet.at("e")
        _, task = await running(client, 4, 2000)
        await client.abort_all()
        with pytest.raises(EngineError, match="aborted the request"):
            await asyncio.wait_for(task, 20)
        assert len((await client.generate(prompt(4, 300), max_new_tokens=2, rows_from=0)).output_ids) == 2


async def test_a_cancelled_request_is_ended_on_the_server_too(engine_fp32: LiveEngine) -> None:
    async with engine_fp32.fleet() as fleet:
        client = fleet.at("e")
        _, task = await running(client, 5, 3000)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(10):
            while True:
                try:
                    await client.flush_cache()  # refused while a request runs
                    break
                except EngineError:
                    await asyncio.sleep(0.1)


async def test_a_retracted_request_has_exact_rows_and_says_so(engine_fp32: LiveEngine, reference: Reference) -> None:
    async with engine_fp32.fleet() as fleet, httpx.AsyncClient(timeout=30) as http:
        client = fleet.at("e")
        ids, task = await running(client, 6, 400)
        await http.post(f"{client.url}/pause_generation", json={"mode": "retract"})
        await client.flush_cache()
        await http.post(f"{client.url}/continue_generation", json={})
        answer = await task
    assert answer.retractions == 1
    tokens = np.concatenate([ids, answer.output_ids])
    assert same_sets(answer.routing.experts, reference.routes(tokens)[:-1])


async def test_a_start_beyond_the_input_is_refused_by_the_server_itself(engine_fp32: LiveEngine) -> None:
    body = {
        "input_ids": prompt(7, 20).tolist(),
        "sampling_params": {"max_new_tokens": 2},
        "return_routed_experts": True,
        "routed_experts_start_len": 21,
    }
    async with httpx.AsyncClient(timeout=30) as http:
        answer = await http.post(f"{engine_fp32.server.url}/generate", json=body)
    assert answer.status_code == 400
    assert "routed_experts_start_len" in answer.text


async def test_an_input_beyond_the_context_is_an_engine_error(engine_fp32: LiveEngine) -> None:
    async with engine_fp32.fleet() as fleet:
        with pytest.raises(EngineError, match="HTTP 400"):
            await fleet.at("e").generate(prompt(8, 5000), max_new_tokens=2, rows_from=0)


async def test_a_stop_token_ends_the_turn_and_is_part_of_it(engine_fp32: LiveEngine) -> None:
    ids = prompt(12, 40)
    async with engine_fp32.fleet(temperature=1e-6) as fleet:
        free = await fleet.at("e").generate(ids, max_new_tokens=20, rows_from=0)
    stop = int(free.output_ids[10])
    at = free.output_ids.tolist().index(stop)
    async with engine_fp32.fleet(temperature=1e-6, stop_token_ids=(stop,)) as fleet:
        stopped = await fleet.at("e").generate(ids, max_new_tokens=20, rows_from=0)
    assert stopped.output_ids.tolist() == free.output_ids[: at + 1].tolist()
    assert (stopped.finished, free.finished) == (True, False)
    assert stopped.routing.stop == len(ids) + at  # the stop token was sampled, but was never an input


@dataclass(frozen=True)
class Served:
    """`agent-r3 serve` in a process of its own."""

    process: "subprocess.Popen[str]"
    url: str


@pytest.fixture(scope="module")
def served(tiny_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """SGLang as it comes, without our plugin (stock decode) and without routed experts. The last test kills it."""
    folder = tmp_path_factory.mktemp("served")
    config = write_config(folder / "config.yaml", tiny_moe, folder, engine_config(routed_experts=False))
    command = [sys.executable, "-m", "agent_r3.cli", "serve", str(config), "--weight-version", "11"]
    environment = {**os.environ, "SGLANG_PLUGINS": "none"}
    errors = (folder / "stderr").open("w")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("serving at http://"), line + (folder / "stderr").read_text()
    yield Served(process, line.split()[-1])
    process.kill()
    process.wait()


async def test_the_batched_decode_samples_what_the_stock_decode_samples(
    engine_fp32: LiveEngine, served: Served
) -> None:
    prompts = [prompt(400 + i, 3 + 23 * i) for i in range(24)]
    stock_config = engine_config(routed_experts=False)
    async with (
        engine_fp32.fleet(temperature=1e-6) as ours,
        fleet_of(served.url, engine_fp32.model, stock_config, temperature=1e-6) as stock,
    ):
        batched = await _generate_all(ours.at("e"), prompts)
        single = await _generate_all(stock.at("e"), prompts)
    for a, b in zip(batched, single, strict=True):
        assert a.output_ids.tolist() == b.output_ids.tolist()


async def _generate_all(client: SGLangClient, prompts: list[Int32Array]) -> list[Generation]:
    return await asyncio.gather(*(client.generate(ids, max_new_tokens=48, rows_from=0) for ids in prompts))


async def test_without_routed_experts_rows_are_empty_and_asking_for_them_is_refused(
    engine_fp32: LiveEngine, served: Served
) -> None:
    async with fleet_of(served.url, engine_fp32.model, engine_config(routed_experts=False)) as fleet:
        answer = await fleet.at("e").generate(prompt(11, 50), max_new_tokens=4, rows_from=0)
    assert answer.routing.experts.size == 0
    assert answer.policy_version == 11
    async with fleet_of(served.url, engine_fp32.model, engine_config()) as fleet:
        with pytest.raises(UserError, match="start SGLang with --enable-return-routed-experts"):
            await fleet.check()


async def test_a_server_killed_in_mid_request_is_an_engine_error_at_once_and_leaves_nothing(
    engine_fp32: LiveEngine, served: Served
) -> None:
    (server,) = psutil.Process(served.process.pid).children()
    family = server.children(recursive=True)
    assert len(family) >= 2
    async with fleet_of(served.url, engine_fp32.model, engine_config(routed_experts=False)) as fleet:
        _, task = await running(fleet.at("e"), 10, 3000)
        server.kill()
        killed = time.monotonic()
        with pytest.raises(EngineError, match="not reachable after 3 attempts"):
            await task
        assert time.monotonic() - killed < 5
    assert await asyncio.to_thread(served.process.wait, 15) == 1  # `serve` saw it, told it and ended
    _, alive = psutil.wait_procs(family, timeout=5)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
