"""Weights into SGLang: what is served afterwards is exactly the pushed policy, and nothing of the old one."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from agent_r3.config import TrainConfig
from agent_r3.errors import ContractError, EngineError
from agent_r3.rollout.engine import Generation
from agent_r3.trainer.batch import make_packs
from agent_r3.trainer.push import WeightPublisher
from agent_r3.types import Ending, Int32Array, Trajectory
from tests.support.engine import LiveEngine, prompt


@pytest.fixture
def publisher(engine_fp32: LiveEngine, tiny_moe: Path, tmp_path: Path) -> Iterator[WeightPublisher]:
    """Leaves the server with the weights and the version that other tests expect."""
    publisher = WeightPublisher([engine_fp32.server.url], tmp_path / "weights", retry_s=5)
    yield publisher
    publisher.load(3, tiny_moe)


@pytest.mark.engine
@pytest.mark.megatron
async def test_after_a_push_the_server_samples_from_the_trainers_policy(
    engine_fp32: LiveEngine, tiny_moe: Path, publisher: WeightPublisher
) -> None:
    from agent_r3.trainer.megatron import Policy

    policy = Policy.from_pretrained(tiny_moe, TrainConfig(dtype="float32"))
    tokens = prompt(5, 40)
    async with engine_fp32.fleet() as fleet:
        client = fleet.at("a")
        before = await client.generate(tokens, max_new_tokens=24, rows_from=0, seed=1)
        cached = await client.generate(tokens, max_new_tokens=24, rows_from=0, seed=1)
        assert cached.cached_tokens > 0
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.add_(0.2 * parameter.abs().mean() * torch.randn_like(parameter))
        folder = publisher.push(4, policy.save_hf)
        after = await client.generate(tokens, max_new_tokens=24, rows_from=0, seed=1)
    assert (before.policy_version, after.policy_version) == (3, 4)
    assert after.cached_tokens == 0  # neither KV nor rows of the old weights are left
    assert (after.routing.experts[:40] != before.routing.experts[:40]).any()
    difference = _trainer_logprobs(policy, tokens, after) - after.logprobs
    assert np.abs(difference).max() < 1e-3
    assert np.abs(_trainer_logprobs(policy, tokens, before) - before.logprobs).max() > 0.05  # the push did change it
    publisher.prune(keep=4)
    assert [path.name for path in folder.parent.iterdir()] == ["v000004"]


@pytest.mark.engine
async def test_weights_that_do_not_load_are_an_engine_error_and_the_old_ones_stay(
    engine_fp32: LiveEngine, publisher: WeightPublisher, tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match="did not take weights 9"):
        publisher.load(9, tmp_path / "nowhere")
    async with engine_fp32.fleet() as fleet:
        answer = await fleet.at("a").generate(prompt(5, 40), max_new_tokens=4, rows_from=0)
    assert answer.policy_version == 3


def _trainer_logprobs(policy: "object", tokens: Int32Array, answer: Generation) -> np.ndarray:
    """The trainer's log-probs of the sampled tokens, replaying the rows that came with them."""
    from agent_r3.trainer.megatron import Policy

    assert isinstance(policy, Policy)
    everything = np.concatenate([tokens, answer.output_ids])
    mask = np.arange(len(everything)) >= len(tokens)
    logprobs = np.zeros(len(everything), np.float32)
    logprobs[mask] = answer.logprobs
    versions = np.zeros(len(everything), np.int32)
    trajectory = Trajectory(
        "t", "g", "task", everything, mask, logprobs, versions, answer.routing, 0.0, Ending.FINISH, 1
    )
    (pack,) = make_packs([(0,)], {0: trajectory}, np.zeros(1, np.float32), policy.shape)
    (output,) = policy.logprobs([pack], replay=True)
    return output.logprobs[pack.loss_mask].numpy()


@contextmanager
def answering(served: str, *, success: bool = True, starting: int = 0) -> Iterator[tuple[str, list[str]]]:
    """A server that reports version `served`, after `starting` answers of 503; yields its URL and the paths asked."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self._answer({"success": success, "message": "shapes differ"}, 200 if success else 400)

        def do_GET(self) -> None:
            self._answer({"weight_version": served}, 200)

        def _answer(self, content: dict[str, object], status: int) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            asked.append(self.path)
            body = json.dumps(content).encode()
            self.send_response(503 if len(asked) <= starting else status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
        server.shutdown()


def _write(folder: Path) -> None:
    folder.mkdir()


def test_every_server_is_told_and_one_that_is_starting_is_waited_for(tmp_path: Path) -> None:
    with answering("2") as (first, asked_first), answering("2", starting=2) as (second, asked_second):
        folder = WeightPublisher([first, second], tmp_path, retry_s=10).push(2, _write)
    assert folder == tmp_path / "v000002" and folder.is_dir()
    assert asked_first == ["/update_weights_from_disk", "/model_info"]
    assert asked_second == ["/update_weights_from_disk"] * 3 + ["/model_info"]


def test_a_server_that_reports_another_version_breaks_the_contract(tmp_path: Path) -> None:
    with answering("1") as (url, _), pytest.raises(ContractError, match="serves weight version '1' after version 2"):
        WeightPublisher([url], tmp_path).push(2, _write)


def test_a_refused_update_is_an_engine_error_with_the_servers_words(tmp_path: Path) -> None:
    with answering("2", success=False) as (url, _), pytest.raises(EngineError, match="weights 2: shapes differ"):
        WeightPublisher([url], tmp_path).push(2, _write)


def test_a_server_that_stays_away_is_an_engine_error(tmp_path: Path) -> None:
    with answering("2") as (url, _):
        pass
    with pytest.raises(EngineError, match="push weights 2 to http"):
        WeightPublisher([url], tmp_path, retry_s=0.3).push(2, _write)
