"""What is refused before a server is launched, how its death is told, and that nothing of it is left behind."""

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import psutil
import pytest
import yaml

from agent_r3.errors import ConfigError, DataError, EngineError, UserError
from agent_r3.hfconfig import read_model
from agent_r3.rollout.launcher import EngineServer, last_words, server_command
from tests.support.engine import edit_config, engine_config, write_config


@pytest.fixture
def model_copy(tiny_moe: Path, tmp_path: Path) -> Path:
    return Path(copytree(tiny_moe, tmp_path / "model"))


def test_a_dense_model_is_refused_while_routing_rows_are_asked_for(model_copy: Path, tmp_path: Path) -> None:
    edit_config(model_copy, architectures=["Qwen3ForCausalLM"], num_experts=0)
    model = read_model(model_copy)
    with pytest.raises(DataError, match=r"not a Mixture-of-Experts model.*engine\.routed_experts=false"):
        EngineServer(engine_config(), model, log=tmp_path / "log")
    EngineServer(engine_config(routed_experts=False), model, log=tmp_path / "log")


def test_a_missing_model_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"model folder .*nowhere is not there"):
        read_model(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("config.json", r"config\.json is not there.*not a complete model folder"),
        ("tokenizer.json", r"tokenizer\.json is not there"),
        ("model.safetensors", r"holds no \*\.safetensors"),
    ],
)
def test_an_incomplete_model_folder_names_what_is_missing(
    model_copy: Path, tmp_path: Path, file: str, message: str
) -> None:
    (model_copy / file).unlink()
    with pytest.raises(DataError, match=message):
        EngineServer(engine_config(), read_model(model_copy), log=tmp_path / "log")


def test_a_broken_config_says_which_key(model_copy: Path) -> None:
    edit_config(model_copy, num_hidden_layers="four")
    with pytest.raises(DataError, match=r"num_hidden_layers must be a positive integer, found 'four'"):
        read_model(model_copy)
    edit_config(model_copy, architectures=None)
    with pytest.raises(DataError, match=r"must name one architecture, found None"):
        read_model(model_copy)
    (model_copy / "config.json").write_text("{")
    with pytest.raises(DataError, match="not valid JSON"):
        read_model(model_copy)


def test_a_tokenizer_with_ids_beyond_the_model_is_refused(model_copy: Path, tmp_path: Path) -> None:
    highest = max(yaml.safe_load((model_copy / "tokenizer.json").read_text())["model"]["vocab"].values())
    edit_config(model_copy, vocab_size=highest)
    with pytest.raises(DataError, match=rf"highest token id is {highest}, the model's vocabulary has {highest}"):
        EngineServer(engine_config(), read_model(model_copy), log=tmp_path / "log")


@pytest.mark.parametrize(
    ("extra", "layers", "top_k"),
    [
        ({}, (0, 1, 2, 3), 4),
        ({"mlp_only_layers": [0, 2]}, (1, 3), 4),
        ({"decoder_sparse_step": 2}, (1, 3), 4),
        ({"first_k_dense_replace": 1, "n_routed_experts": 16, "num_experts": None}, (1, 2, 3), 4),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, (2,), 4),
    ],
)
def test_moe_layers_are_read_from_the_config(
    model_copy: Path, extra: dict[str, object], layers: tuple[int, ...], top_k: int
) -> None:
    edit_config(model_copy, **extra)
    model = read_model(model_copy)
    shape = model.require_moe()
    assert model.moe_layers == layers
    assert (shape.num_layers, shape.num_experts, shape.top_k) == (len(layers), 16, top_k)


def test_dense_layers_that_sglang_would_serve_with_random_weights_are_refused(model_copy: Path, tmp_path: Path) -> None:
    edit_config(model_copy, mlp_only_layers=[0])
    with pytest.raises(DataError, match=r"would serve the 1 dense ones"):
        EngineServer(engine_config(), read_model(model_copy), log=tmp_path / "log")


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("--enable-hierarchical-cache", "sglang#26975"),
        ("--hicache-ratio=2", "sglang#26975"),
        ("--pp-size=2", "sglang#12162"),
        ("--disaggregation-mode=prefill", "part of the routing rows"),
        ("--chunked-prefill-size=-1", "already set by the engine section"),
        ("--dtype=float16", "already set by the engine section"),
    ],
)
def test_arguments_that_break_a_promise_are_refused(tiny_moe: Path, tmp_path: Path, argument: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        EngineServer(engine_config(extra_args=(argument,)), read_model(tiny_moe), log=tmp_path / "log")


def test_the_gpu_command_line_has_no_cpu_flags(tiny_moe: Path) -> None:
    engine = engine_config(
        device="cuda", dtype="bfloat16", tensor_parallel=4, extra_args=("--mem-fraction-static=0.7",)
    )
    command = server_command(engine, read_model(tiny_moe), port=30000, weight_version=12, seed=5)
    text = " ".join(command)
    assert "--device cuda --dtype bfloat16" in text
    assert "--tp-size 4" in text
    assert "--weight-version 12" in text
    assert command[-1] == "--mem-fraction-static=0.7"
    assert "--enable-return-routed-experts" in command
    assert "torch_native" not in command


async def test_a_port_in_use_is_said_before_anything_is_launched(tiny_moe: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = EngineServer(engine_config(port=port), read_model(tiny_moe), log=tmp_path / "log")
        with pytest.raises(UserError, match=rf"cannot listen on 127\.0\.0\.1:{port}.*engine\.port=0"):
            await server.start()
    assert server.pid is None


@pytest.mark.engine
async def test_a_server_that_cannot_start_is_told_with_its_last_words(tiny_moe: Path, tmp_path: Path) -> None:
    engine = engine_config(extra_args=("--no-such-flag",))
    server = EngineServer(engine, read_model(tiny_moe), log=tmp_path / "log")
    with pytest.raises(EngineError, match=r"did not start \(exit status 2\).*unrecognized arguments: --no-such-flag"):
        await server.start()
    assert server.pid is None


@pytest.mark.engine
async def test_a_server_that_is_not_healthy_in_time_is_stopped(tiny_moe: Path, tmp_path: Path) -> None:
    server = EngineServer(engine_config(start_timeout_s=1.0), read_model(tiny_moe), log=tmp_path / "log")
    with pytest.raises(EngineError, match=r"not healthy after 1 s \(engine\.start_timeout_s\)"):
        await server.start()
    assert server.pid is None


def test_last_words_are_the_exceptions_else_the_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("old\nValueError: of an earlier start\n")
    start = log.stat().st_size
    log.write_text(log.read_text() + "loading\nTraceback (most recent call last):\n  File x\nKeyError: 'a'\nbye\n")
    assert last_words(log, start) == "KeyError: 'a'"
    log.write_text("one\n\ntwo\nthree\nfour\n")
    assert last_words(log) == "two | three | four"
    assert last_words(tmp_path / "none") == "it wrote nothing"


def _start_serve(model: Path, folder: Path) -> tuple["subprocess.Popen[bytes]", psutil.Process]:
    """`agent-r3 serve`, and the server that it launched; neither is ready yet."""
    config = write_config(folder / "config.yaml", model, folder, engine_config())
    serve = subprocess.Popen([sys.executable, "-m", "agent_r3.cli", "serve", str(config)], stdout=subprocess.DEVNULL)
    return serve, _wait_for(lambda: psutil.Process(serve.pid).children(), 60)[0]


def _assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.engine
def test_the_server_dies_with_a_killed_launcher(tiny_moe: Path, tmp_path: Path) -> None:
    """SIGKILL leaves the launcher no chance to clean up: the kernel must."""
    serve, server = _start_serve(tiny_moe, tmp_path)
    _wait_for(server.children, 120)  # SGLang has just started processes of its own
    family = [server, *server.children(recursive=True)]
    serve.kill()
    serve.wait()
    _assert_gone(family)


@pytest.mark.engine
def test_serve_stops_everything_on_sigterm_even_while_starting(tiny_moe: Path, tmp_path: Path) -> None:
    serve, server = _start_serve(tiny_moe, tmp_path)
    serve.terminate()
    assert serve.wait(20) == 0
    _assert_gone([server])


def _wait_for(find: Callable[[], list[psutil.Process]], timeout_s: float) -> list[psutil.Process]:
    deadline = time.monotonic() + timeout_s
    while not (found := find()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


async def test_stop_without_start_and_twice_is_quiet(tiny_moe: Path, tmp_path: Path) -> None:
    server = EngineServer(engine_config(), read_model(tiny_moe), log=tmp_path / "log")
    await asyncio.gather(server.stop(), server.stop())
