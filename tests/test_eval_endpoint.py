"""Models behind chat completions: what failures become, what is refused at the start, and SGLang's own /v1."""

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import docker
import numpy as np
import pytest

from agent_r3.config import SandboxConfig, load_config
from agent_r3.envs.build import build_tasks
from agent_r3.envs.datasets import load_tasks
from agent_r3.envs.images import ImageBuilder
from agent_r3.envs.local import open_pool
from agent_r3.envs.offline import offline_spec_path
from agent_r3.envs.pool import SandboxPool
from agent_r3.errors import DataError, EngineError, UserError
from agent_r3.eval.endpoint import next_wait, open_endpoint
from agent_r3.eval.folder import EvaluationFolder
from agent_r3.rollout.conversation import Agent
from agent_r3.rollout.episode import run_episode
from agent_r3.rollout.tokens import ChatRenderer
from agent_r3.tiny import SCRIPTS, ensure_tiny
from agent_r3.tools.parsers import render
from agent_r3.types import Ending, Turn
from tests.support.chat_server import (
    DONE,
    FINISH,
    LS,
    TASK,
    Answer,
    Json,
    close,
    config_for,
    endpoint_of,
    hang,
    ignore,
    native,
    page,
    run,
    says,
    serving,
    status,
)
from tests.support.engine import LiveEngine, engine_config, serve
from tests.support.scripted import DictSandbox
from tests.support.tasks import PATHSPEC

# --- failures ---

PASSING: list[tuple[Answer, str]] = [
    (status(429, "slow down", {"Retry-After": "0.01"}), "HTTP 429: slow down"),
    (status(500), "HTTP 500: busy"),
    (status(503, {"odd": 1}), 'HTTP 503: {"message": {"odd": 1}}'),
    (close, "no connection, "),
    (page, "the answer is not JSON: <html> <h1>502</h1></html>"),
    ("", "the answer is not JSON: nothing"),
    ("{", "the answer is not JSON: {"),
    ("[]", "no usable completion, the answer: "),
    ('{"error": {"message": "overloaded"}}', 'choices: Field required; it sent: {"error": {"message": "overloaded"}}'),
    ({**DONE, "choices": []}, "no usable completion, choices: "),
    ({**DONE, "choices": [{"finish_reason": "stop"}]}, "no usable completion, choices.0.message: Field required"),
    ({**DONE, "usage": None}, "no usable completion, usage: "),
    (says("x", finish="abort"), "the server ended the turn itself (abort)"),
]


@pytest.mark.parametrize(("failure", "said"), PASSING, ids=[said[:40] for _, said in PASSING])
async def test_what_may_pass_is_tried_again_and_is_an_engine_error_in_one_line_if_it_stays(
    failure: Answer, said: str
) -> None:
    async with serving(says(None, native("a", LS)), failure, failure, DONE) as server:
        episode = await run(server)
        assert (episode.ending, len(episode.turns), len(server.requests)) == (Ending.FINISH, 2, 4)
        assert server.requests[1] == server.requests[2] == server.requests[3]
    async with serving(failure) as server:
        with pytest.raises(EngineError) as caught:
            await run(server)
        assert f"endpoint {server.url}: " in str(caught.value) and said in str(caught.value)
        assert str(caught.value).endswith("(tried 8 times)") and "\n" not in str(caught.value)
        assert len(server.requests) == 8


async def test_no_answer_in_time_is_tried_again_and_is_an_engine_error_if_it_stays() -> None:
    limits: dict[str, Json] = {"engine": {"request_timeout_s": 1.0}}
    async with serving(hang, DONE) as server:
        episode = await run(server, **limits)
        assert (episode.ending, len(server.requests)) == (Ending.FINISH, 2)
    async with serving(hang) as server:
        with pytest.raises(EngineError, match=r"no answer within 0\.\d s \(tried 2 times\)"):
            await run(server, agent={"timeout_s": 2.5}, **limits)


@pytest.mark.parametrize(
    ("answer", "said"),
    [(status(400, "bad messages"), "HTTP 400: bad messages"), (status(403, "flagged"), "HTTP 403: flagged")],
)
async def test_a_request_that_is_refused_is_not_sent_again(answer: Answer, said: str) -> None:
    async with serving(answer) as server:
        with pytest.raises(EngineError, match=said):
            await run(server)
        assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (status(401, "bad key"), "HTTP 401: bad key; its key is read from the variable OPENAI_API_KEY"),
        (status(402, "pay"), "HTTP 402: pay; the account behind the key has no credit left"),
        (status(429, "insufficient_quota: pay"), "HTTP 429: insufficient_quota: pay; the account"),
    ],
)
async def test_what_concerns_every_request_stops_the_evaluation(answer: Answer, said: str) -> None:
    async with serving(says(None, native("a", LS)), answer) as server:
        with pytest.raises(UserError, match=said):
            await run(server)
        assert len(server.requests) == 2


def test_waits_grow_and_follow_the_server_but_never_for_longer_than_a_minute() -> None:
    for attempt, longest in enumerate([0.5, 1, 2, 4, 8, 16, 32, 60, 60]):
        assert 0.7 * longest <= next_wait(attempt, 0.5, asked_s=0) <= min(1.25 * longest, 60)
    assert next_wait(0, 0.5, asked_s=12) == 12
    assert next_wait(0, 0.5, asked_s=36_000) == 60


@pytest.mark.parametrize("then", [hang, status(429, "tomorrow", {"Retry-After": "86400"})])
async def test_an_endpoint_that_fails_until_the_time_is_up_is_no_timeout_of_the_agent(then: Answer) -> None:
    began = time.monotonic()
    async with serving(says(None, native("a", LS)), status(500), then) as server:
        with pytest.raises(EngineError, match=r"no answer within|HTTP 429: tomorrow"):
            await run(server, agent={"timeout_s": 3.0})
        assert len(server.requests) == 3
    assert time.monotonic() - began < 30


async def test_an_endpoint_that_is_only_slow_ends_the_episode_by_its_time() -> None:
    async with serving(says(None, native("a", LS)), hang) as server:
        episode = await run(server, agent={"timeout_s": 1.5})
    assert (episode.ending, len(episode.turns)) == (Ending.TIMEOUT, 1)


# --- the check at the start ---


async def test_the_check_is_one_small_request_with_the_tools_and_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    async with serving(DONE) as server:
        async with endpoint_of(server, eval={"endpoint_key": "MY_KEY"}) as endpoint:
            await endpoint.check()
        async with endpoint_of(server, eval={"endpoint_key": "NOT_SET", "native_calls": False}) as endpoint:
            await endpoint.check()
    assert server.keys == ["Bearer secret", "Bearer none"]
    assert ["tools" in request for request in server.requests] == [True, False]
    assert all(request["max_tokens"] <= 256 for request in server.requests)


REFUSALS: list[tuple[Answer, str]] = [
    (
        status(401, "no"),
        "HTTP 401: no; its key is read from the variable NOT_SET .eval.endpoint_key., which is not set",
    ),
    (status(403, "no"), "HTTP 403: no; its key"),
    (
        status(404, "no such model"),
        "HTTP 404: no such model; model.path must be the name .* .now 'org/model'., and eval.e",
    ),
    (status(400, "tools are off"), "HTTP 400: tools are off; .* eval.native_calls=false describes these in the prompt"),
    (status(400, "temperature must be 1"), "HTTP 400: temperature must be 1; .* options of eval.sampling"),
    (status(400, "maximum context length is 99"), "no room for the tools and an answer: maximum context length is 99"),
    (status(500, "broken"), r"HTTP 500: broken \(tried 3 times\); eval.endpoint must be the base URL of a running"),
    (page, "the answer is not JSON: .*; eval.endpoint must be the base URL"),
    (close, "no connection, .*; eval.endpoint must be the base URL"),
    (says(render(FINISH, "hermes")), "leaves the model's calls in its text; .* --tool-call-parser.*native_calls=false"),
]


@pytest.mark.parametrize(("answer", "said"), REFUSALS, ids=[said[:30] for _, said in REFUSALS])
async def test_an_endpoint_that_cannot_serve_is_refused_in_one_line(answer: Answer, said: str) -> None:
    async with serving(answer) as server:
        settings = {"endpoint_key": "NOT_SET", "sampling": {"temperature": 0.3}}
        async with endpoint_of(server, eval=settings) as endpoint:
            with pytest.raises(UserError, match=said) as caught:
                await endpoint.check()
    assert str(caught.value).count(server.url) == 1 and "\n" not in str(caught.value)


async def test_nobody_listening_is_refused_in_one_line() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
        async with open_endpoint(config_for(url), first_wait_s=0.01) as endpoint:
            with pytest.raises(UserError, match=f"endpoint {url}: no connection, ConnectError"):
                await endpoint.check()


@pytest.mark.parametrize("url", ["localhost:8000/v1", "", "ftp://x/v1", "http:///v1"])
async def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(UserError, match="is not a URL such as http://HOST:PORT/v1"):
        async with open_endpoint(config_for(url)):
            pass


async def test_an_option_that_a_server_does_not_know_is_left_out_only_where_it_changes_nothing() -> None:
    unknown = [
        status(400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."),
        status(400, "Unrecognized request argument supplied: top_k"),
        status(422, "body.seed: extra_forbidden"),
    ]
    async with serving(*unknown, DONE) as server, endpoint_of(server) as endpoint:
        await endpoint.check()
        await run_episode(endpoint.speaker(1), TASK, DictSandbox(), ignore)
    *_, checked, asked = server.requests
    for request in (checked, asked):
        assert {"max_tokens", "top_k", "seed"}.isdisjoint(request)
        assert request["temperature"] == request["top_p"] == 1
    assert (checked["max_completion_tokens"], asked["max_completion_tokens"]) == (256, 4096)

    async with serving(unknown[1]) as server, endpoint_of(server, eval={"sampling": {"top_k": 5}}) as endpoint:
        with pytest.raises(UserError, match=r"top_k; it must take chat completions with the options of eval.sampling"):
            await endpoint.check()
        assert len(server.requests) == 1


# --- SGLang's own /v1 ---

TINY = Path(__file__).parent.parent / "configs" / "tiny-cpu.yaml"
RECORD = ("--log-requests", "--log-requests-level", "3", "--log-requests-format", "json")


@pytest.fixture(scope="module")
def tiny_policy(docker_engine: docker.APIClient) -> Path:
    """The demo's tasks and policy, kept in the user's cache: only the first session pays."""

    async def make() -> Path:
        async with open_pool(SandboxConfig(), run="tasks-build") as pool:
            await build_tasks(offline_spec_path("offline"), tuple(SCRIPTS), ImageBuilder(), pool, lambda *_: None)
        return (await ensure_tiny())[1]

    return asyncio.run(make())


@pytest.fixture(scope="module")
def tiny_engine(tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveEngine, Path]]:
    """SGLang with the tiny policy, and its own record of every request."""
    log = tmp_path_factory.mktemp("engine") / "tiny.log"
    config = engine_config(context_length=2048, extra_args=(*RECORD, "--enable-cache-report"))
    for engine in serve(tiny_policy, log, config):
        yield engine, log


def v1_config(engine: LiveEngine, *overrides: str) -> list[str]:
    """Overrides of the demo's config: its policy, greedy, through /v1."""
    sampling = "eval.sampling={temperature: 0}"
    return [f"eval.endpoint={engine.server.url}/v1", "eval.native_calls=false", sampling, *overrides]


def requests_seen(log: Path) -> list[tuple[list[int], list[int]]]:
    """(ids in, ids out) of the requests that SGLang finished, in order."""
    found = []
    for line in log.read_text(errors="replace").splitlines():
        if '"request.finished"' in line:
            record = json.loads(line[line.index("{") :])
            found.append((record["obj"]["input_ids"], record["out"]["output_ids"]))
    return found


@pytest.mark.docker
@pytest.mark.engine
@pytest.mark.timeout(900)
async def test_an_episode_over_sglangs_own_v1_is_the_one_of_the_token_path(
    tiny_engine: tuple[LiveEngine, Path], pool: SandboxPool
) -> None:
    engine, record = tiny_engine
    config = load_config(TINY, v1_config(engine, "agent.timeout_s=600"))
    task = next(task for task in load_tasks(config.tasks) if task.id == PATHSPEC)
    renderer = ChatRenderer.from_folder(engine.model)
    tokens: list[Turn] = []

    async def keep(turn: Turn) -> None:
        tokens.append(turn)

    async with engine.fleet(temperature=0, stop_token_ids=(renderer.stop_id,)) as fleet:
        expected = await run_episode(Agent(fleet.at("x"), renderer, config.agent), task, await pool.acquire(task), keep)
    asked = len(requests_seen(record))
    async with open_endpoint(config) as endpoint:
        await endpoint.check()
        episode = await run_episode(endpoint.speaker(0), task, await pool.acquire(task), ignore)

    assert len(episode.turns) > 1
    assert (episode.ending, episode.patch) == (expected.ending, expected.patch)
    for turn, other in zip(episode.turns, tokens, strict=True):
        assert (turn.text, turn.calls, turn.observations) == (other.text, other.calls, other.observations)
        assert (turn.start, turn.prompt, turn.sampled) == (other.start, len(other.prompt_ids), len(other.sampled_ids))
        assert turn.cached_tokens >= turn.start - 1
    seen = requests_seen(record)[asked + 1 :]  # the first one is the check
    whole = np.concatenate([part for turn in tokens for part in (turn.prompt_ids, turn.sampled_ids)]).tolist()
    for (ids_in, ids_out), turn in zip(seen, tokens, strict=True):
        assert ids_in == whole[: turn.start + len(turn.prompt_ids)] and ids_out == turn.sampled_ids.tolist()


@pytest.mark.docker
@pytest.mark.engine
@pytest.mark.timeout(900)
def test_an_endpoint_is_evaluated_by_the_same_command(tiny_engine: tuple[LiveEngine, Path], tmp_path: Path) -> None:
    engine, record = tiny_engine
    limits = ["agent.timeout_s=600", f"tasks.include=[{PATHSPEC}]", "sandbox.warm=0", "grading.timeout_s=200"]
    command = [sys.executable, "-m", "agent_r3.cli", "eval", str(TINY), *v1_config(engine, *limits)]
    asked = len(requests_seen(record))
    done = subprocess.run([*command, "--out", str(tmp_path / "out")], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = EvaluationFolder(tmp_path / "out")
    (prediction,), (graded,) = folder.predictions.values(), folder.grades.values()
    assert (prediction.key, prediction.model_name_or_path) == ((PATHSPEC, 0), "tiny")
    assert prediction.episode is not None and prediction.episode.turns == len(requests_seen(record)) - asked - 1
    assert graded.verdict == ("empty_patch" if prediction.empty else "resolved" if graded.reward == 1 else "failed")
    assert folder.failures == []


@pytest.mark.engine
@pytest.mark.timeout(900)
async def test_sglang_without_a_parser_of_calls_is_refused_and_its_words_for_a_full_context_are_understood(
    tiny_engine: tuple[LiveEngine, Path],
) -> None:
    config = load_config(TINY, v1_config(tiny_engine[0], "eval.native_calls=true"))
    long = replace(TASK, problem_statement="word " * 3000)
    full = r"no room for the prompt and 160 tokens of answer: The input \(\d+ tokens\) is longer than"
    async with open_endpoint(config) as endpoint:
        with pytest.raises(UserError, match="leaves the model's calls in its text"):  # all that this policy knows
            await endpoint.check()
        with pytest.raises(DataError, match=full):
            await run_episode(endpoint.speaker(0), long, DictSandbox(), ignore)
