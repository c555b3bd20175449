"""Starts, watches and stops one SGLang server as a process group of its own."""

import asyncio
import contextlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

import httpx

from agent_r3.config import EngineConfig, SamplingConfig
from agent_r3.errors import ConfigError, DataError, EngineError, UserError, boundary
from agent_r3.hfconfig import ModelInfo, check_tokenizer
from agent_r3.process import signal_group, spawn
from agent_r3.rollout.client import EngineFleet

_POLL_S = 0.2
_GRACE_S = 5.0
_PORT_RETRIES = 3
_BUSY = "address already in use"
# Their modules in sglang/srt/models ignore mlp_only_layers and decoder_sparse_step.
_ALL_LAYERS_MOE = ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")
# Arguments that would break a promise of this project, with the reason.
_REFUSED = {
    "--enable-hierarchical-cache": "it moves KV slots while routing rows stay behind (sglang#26975)",
    "--hicache-": "it moves KV slots while routing rows stay behind (sglang#26975)",
    "--disaggregation-mode": "prefill and decode would each hold a part of the routing rows",
    "--pp-size": "SGLang does not collect routed experts under pipeline parallelism (sglang#12162)",
    "--pipeline-parallel-size": "SGLang does not collect routed experts under pipeline parallelism (sglang#12162)",
    "--skip-tokenizer-init": "stop tokens would be unknown to the server",
}


def resolve_device(engine: EngineConfig) -> str:
    """`cpu` or `cuda`; `auto` is CUDA where nvidia-smi lists a GPU."""
    if engine.device != "auto":
        return engine.device
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return "cpu"
    listed = subprocess.run([smi, "-L"], capture_output=True, text=True, timeout=30, check=False)
    return "cuda" if listed.returncode == 0 and "GPU 0" in listed.stdout else "cpu"


def server_command(engine: EngineConfig, model: ModelInfo, *, port: int, weight_version: int, seed: int) -> list[str]:
    """The command line. Raises ConfigError for arguments that are refused or already set by a knob."""
    options = {
        "--model-path": str(model.path),
        "--host": engine.host,
        "--port": str(port),
        "--device": resolve_device(engine),
        "--dtype": engine.dtype,
        "--context-length": str(engine.context_length),
        "--max-running-requests": str(engine.max_running_requests),
        "--chunked-prefill-size": str(engine.chunked_prefill_size),
        "--tp-size": str(engine.tensor_parallel),
        "--weight-version": str(weight_version),
        "--random-seed": str(seed),
        "--log-level-http": "warning",
        "--watchdog-timeout": "600",
    }
    switches = ["--skip-server-warmup", "--sleep-on-idle"]
    if engine.max_total_tokens is not None:
        options["--max-total-tokens"] = str(engine.max_total_tokens)
    if engine.routed_experts:
        switches.append("--enable-return-routed-experts")
    if engine.metrics:
        switches.append("--enable-metrics")
    if options["--device"] == "cpu":
        options |= {"--attention-backend": "torch_native", "--sampling-backend": "pytorch"}
    for argument in engine.extra_args:
        flag = argument.partition("=")[0]
        for refused, why in _REFUSED.items():
            if flag == refused or (refused.endswith("-") and flag.startswith(refused)):
                raise ConfigError(f"engine.extra_args: {flag} is refused: {why}")
        if flag in options or flag in switches or flag == "--tensor-parallel-size":
            raise ConfigError(f"engine.extra_args: {flag} is already set by the engine section; use its own key")
    pairs = [part for option in options.items() for part in option]
    return [sys.executable, "-m", "agent_r3.rollout.sglang_server", *pairs, *switches, *engine.extra_args]


def server_environment(device: str) -> dict[str, str]:
    """What the server needs on top of this process's environment."""
    env = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if device == "cpu":
        # One thread: a decode step of a small model is many tiny operations, and the trainer needs the other cores.
        env |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    return env


def _require_served(model: ModelInfo) -> None:
    """Raises DataError for a model that SGLang 0.5.23 loads without complaint but serves wrongly."""
    if model.architecture in _ALL_LAYERS_MOE and model.moe and model.moe.num_layers != model.num_hidden_layers:
        raise DataError(
            f"{model.path}: SGLang takes every layer of {model.architecture} for an MoE layer and would serve the "
            f"{model.num_hidden_layers - model.moe.num_layers} dense ones (mlp_only_layers, decoder_sparse_step) "
            "with random weights"
        )


def free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def check_port(host: str, port: int) -> None:
    """Raises UserError when `port` cannot be listened on."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            raise UserError(
                f"the engine cannot listen on {host}:{port}: {exc.strerror}; "
                "stop what listens there, or set engine.port=0 for a free one"
            ) from exc


def last_words(log: Path, start: int = 0, lines: int = 3) -> str:
    """The lines of a server log, from byte `start` on, that say why it ended: its exceptions, else its last lines."""
    text = log.read_bytes()[start:].decode(errors="replace") if log.is_file() else ""
    shown = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in shown if re.match(r"([\w.]+(Error|Exception|Interrupt)\b.*|.*\berror: .*)", line)]
    chosen = list(dict.fromkeys(errors))[-lines:] or shown[-lines:]
    return " | ".join(line[:300] for line in chosen) or "it wrote nothing"


class EngineServer:
    """One SGLang server: `async with EngineServer(engine, model, log=path) as server: server.url`.

    Must be started from a thread that outlives it (the kernel kills the server when that thread ends).
    """

    def __init__(
        self, engine: EngineConfig, model: ModelInfo, *, log: Path, weight_version: int = 0, seed: int = 0
    ) -> None:
        """Raises UserError before anything is launched for what can be known from the config and the model folder."""
        if engine.routed_experts:
            model.require_moe()
        _require_served(model)
        check_tokenizer(model)
        self._engine, self._model, self._log = engine, model, log
        self._weight_version, self._seed = weight_version, seed
        self._process: subprocess.Popen[bytes] | None = None
        self._port = engine.port
        self._log_start = 0
        self._command(port=1)  # refuses bad arguments now rather than at start

    @property
    def url(self) -> str:
        return f"http://{self._engine.host}:{self._port}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Launch, wait until it is healthy and have it return routing rows; after its death, again at the same URL.

        Raises UserError (port in use, no usable routing rows) or EngineError with the server's last words.
        """
        if self._process is not None and self._process.poll() is not None:
            await self.stop()
        for attempt in range(_PORT_RETRIES):
            self._launch()
            try:
                await self._wait_healthy()
                await self._check()
                return
            except EngineError as exc:
                await self.stop()
                if self._engine.port or _BUSY not in str(exc) or attempt == _PORT_RETRIES - 1:
                    raise
                self._port = 0
            except BaseException:
                await self.stop()
                raise

    async def stop(self) -> None:
        """Interrupt, then KILL the whole process group; returns when it is gone. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        await asyncio.shield(_end_group(process))

    async def watch(self) -> None:
        """Return never while the server lives; raise EngineError with its last words when it has died."""
        while True:
            process = self._process
            if process is None:
                raise EngineError(f"engine {self.url} is not running")
            if (code := process.poll()) is not None:
                raise EngineError(f"engine {self.url} died ({_exit(code)}): {self._last_words()}")
            await asyncio.sleep(_POLL_S)

    async def __aenter__(self) -> "EngineServer":
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _last_words(self) -> str:
        return last_words(self._log, self._log_start)

    def _command(self, port: int) -> list[str]:
        return server_command(
            self._engine, self._model, port=port, weight_version=self._weight_version, seed=self._seed
        )

    def _launch(self) -> None:
        if self._process is not None:
            raise EngineError(f"engine {self.url} is already running")
        if self._engine.port:
            check_port(self._engine.host, self._engine.port)
        self._port = self._port or free_port(self._engine.host)
        self._log_start = self._log.stat().st_size if self._log.is_file() else 0
        with boundary(EngineError, "start the engine", OSError):
            self._process = spawn(
                self._command(self._port), log=self._log, env=server_environment(resolve_device(self._engine))
            )

    async def _check(self) -> None:
        engine = self._engine.model_copy(update={"urls": (self.url,)})
        async with EngineFleet(engine, self._model, SamplingConfig(), concurrency=1) as fleet:
            await fleet.check()

    async def _wait_healthy(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self._engine.start_timeout_s
        async with httpx.AsyncClient(timeout=10.0, trust_env=False) as http:
            while time.monotonic() < deadline:
                if (code := self._process.poll()) is not None:
                    raise EngineError(f"the engine did not start ({_exit(code)}): {self._last_words()}")
                with contextlib.suppress(httpx.TransportError):
                    if (await http.get(f"{self.url}/health")).status_code == 200:
                        return
                await asyncio.sleep(_POLL_S)
        raise EngineError(
            f"the engine was not healthy after {self._engine.start_timeout_s:g} s "
            f"(engine.start_timeout_s): {self._last_words()}"
        )


async def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """Interrupt the leader, which ends its children; KILL what is left of the group after the grace; reap the leader.

    SIGINT, since SIGTERM makes SGLang drain for 5 to 15 s; a rollout server has nothing to save.
    """
    try:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + _GRACE_S
        while process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
    finally:
        signal_group(process, signal.SIGKILL)
        process.wait()


def _exit(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
