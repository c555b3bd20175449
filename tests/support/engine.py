"""A tiny routing-sensitive Qwen3-MoE and real SGLang servers for it, shared by the whole test session."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from agent_r3.compat import fix_torchvision
from agent_r3.config import EngineConfig, SamplingConfig
from agent_r3.hfconfig import ModelInfo, read_model
from agent_r3.rollout.client import EngineFleet
from agent_r3.rollout.launcher import EngineServer
from agent_r3.types import Int32Array

VOCABULARY = 512
STOP = 2  # <|im_end|>
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def save_tiny_moe(folder: Path, *, seed: int = 0) -> Path:
    """A random 4-layer Qwen3-MoE, its weights so large that one changed expert moves log-probs, and a tokenizer."""
    fix_torchvision()
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": STOP,
        "pad_token_id": 0,
        "initializer_range": 0.2,
    }
    model: Any = Qwen3MoeForCausalLM
    model(Qwen3MoeConfig(**sizes)).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    """A byte-level BPE of 512 entries with Qwen's special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    trainer: Any = trainers.BpeTrainer
    fast: Any = PreTrainedTokenizerFast
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        ["def search(tool, text): return the words of a tiny tokenizer 1 2 3 4 5 6 7 8 9 0"] * 10,
        trainer(
            vocab_size=VOCABULARY,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    fast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", bos_token=None).save_pretrained(
        folder
    )


def engine_config(**changes: object) -> EngineConfig:
    """A small CPU server; `changes` are EngineConfig fields."""
    small = {
        "device": "cpu",
        "dtype": "float32",
        "context_length": 4096,
        "max_total_tokens": 32_768,
        "chunked_prefill_size": 1024,
        "max_running_requests": 32,
        "start_timeout_s": 280.0,
        "request_timeout_s": 120.0,
    }
    return EngineConfig.model_validate({**small, **changes})


def fleet_of(
    url: str,
    model: ModelInfo,
    config: EngineConfig,
    *,
    concurrency: int = 32,
    temperature: float = 1.0,
    stop_token_ids: tuple[int, ...] = (),
) -> EngineFleet:
    return EngineFleet(
        config.model_copy(update={"urls": (url,)}),
        model,
        SamplingConfig(temperature=temperature),
        concurrency=concurrency,
        stop_token_ids=stop_token_ids,
    )


@dataclass(frozen=True)
class LiveEngine:
    """A running server and how to reach it; a fleet belongs to one event loop, so each test makes its own."""

    server: EngineServer
    config: EngineConfig
    model: ModelInfo

    def fleet(self, *, temperature: float = 1.0, stop_token_ids: tuple[int, ...] = ()) -> EngineFleet:
        return fleet_of(
            self.server.url, self.model, self.config, temperature=temperature, stop_token_ids=stop_token_ids
        )


def prompt(seed: int, length: int) -> Int32Array:
    """Random ids that are not special tokens."""
    return np.random.default_rng(seed).integers(10, 300, length).astype(np.int32)


def serve(model: Path, log: Path, config: EngineConfig, *, weight_version: int = 0) -> Iterator[LiveEngine]:
    """Start a server, yield it, stop it."""
    info = read_model(model)
    server = EngineServer(config, info, log=log, weight_version=weight_version)
    asyncio.run(server.start())
    try:
        yield LiveEngine(server, config, info)
    finally:
        asyncio.run(server.stop())


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_moe(tmp_path_factory.mktemp("model") / "tiny-moe")


@pytest.fixture(scope="session")
def engine_fp32(tiny_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveEngine]:
    yield from serve(tiny_moe, tmp_path_factory.mktemp("engine") / "fp32.log", engine_config(), weight_version=3)


@pytest.fixture(scope="session")
def engine_bf16(tiny_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveEngine]:
    config = engine_config(dtype="bfloat16")
    yield from serve(tiny_moe, tmp_path_factory.mktemp("engine") / "bf16.log", config)


def edit_config(folder: Path, **changes: object) -> None:
    """Change keys of a model folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def write_config(path: Path, model: Path, run_dir: Path, engine: EngineConfig) -> Path:
    """A config file for `agent-r3 serve`."""
    sections = {
        "run": {"name": "served", "dir": str(run_dir)},
        "model": {"path": str(model)},
        "tasks": {"dataset": "offline"},
        "agent": {"max_tokens": engine.context_length},
        "train": {"routing": "r3" if engine.routed_experts else "none"},
        "engine": engine.model_dump(mode="json"),
    }
    path.write_text(yaml.safe_dump(sections))
    return path
