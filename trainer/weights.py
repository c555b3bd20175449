"""Qwen3 and Qwen3-MoE weights between a Hugging Face folder and Megatron's parameters, one tensor at a time.

Names on disk are per expert (`model.layers.0.mlp.experts.5.gate_proj.weight`), as published and as SGLang reads them;
transformers 5 fuses experts only in memory. Megatron fuses q, k, v by group and gate with up; every rule here is exact,
so that what was loaded is exported bit for bit.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from agent_r3.errors import DataError, boundary
from agent_r3.hfconfig import read_model
from agent_r3.journal import usual_mode
from agent_r3.types import MoEShape

SHARD_BYTES = 4 << 30
"""A folder with more bytes of tensors than this is written as several files with an index."""

_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Architecture:
    """What config.json says about the transformer."""

    name: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    heads: int
    groups: int  # key-value heads
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float
    norm_eps: float
    tied: bool  # lm_head is the embedding
    moe: MoEShape | None  # None: dense
    expert_hidden_size: int
    norm_topk_prob: bool


def read_architecture(path: Path) -> Architecture:
    """Read `path`/config.json. Raises DataError for an architecture, or a feature of it, that is not mapped here."""
    info = read_model(path)
    if info.architecture not in ("Qwen3MoeForCausalLM", "Qwen3ForCausalLM"):
        raise DataError(
            f"{path} holds a {info.architecture}; the trainer maps Qwen3MoeForCausalLM and Qwen3ForCausalLM"
        )
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    _refuse(path, "rope_type", rope.get("rope_type", rope.get("type", "default")), "default")
    _refuse(path, "hidden_act", config.get("hidden_act", "silu"), "silu")
    _refuse(path, "attention_bias", bool(config.get("attention_bias", False)), False)
    _refuse(path, "use_sliding_window", bool(config.get("use_sliding_window", False)), False)
    if info.moe:
        _refuse(path, "number of MoE layers", info.moe.num_layers, info.num_hidden_layers)
    with boundary(DataError, f"{path}/config.json lacks a key", KeyError):
        return Architecture(
            name=info.architecture,
            num_layers=info.num_hidden_layers,
            hidden_size=config["hidden_size"],
            ffn_hidden_size=config["intermediate_size"],
            heads=config["num_attention_heads"],
            groups=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            vocab_size=info.vocab_size,
            max_position_embeddings=info.max_position_embeddings,
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
            norm_eps=config["rms_norm_eps"],
            tied=bool(config.get("tie_word_embeddings", False)),
            moe=info.moe,
            expert_hidden_size=config["moe_intermediate_size"] if info.moe else 0,
            norm_topk_prob=bool(config["norm_topk_prob"]) if info.moe else True,
        )


def load_weights(path: Path, parameters: Mapping[str, torch.Tensor], architecture: Architecture) -> None:
    """Fill Megatron's `parameters` (by name, unsharded) from the safetensors in `path`, converting the dtype.

    Raises DataError, naming tensors, when some are missing, unknown or of another shape.
    """
    rules = _rules(architecture)
    if unmapped := sorted(set(parameters) ^ {rule.parameter for rule in rules}):
        raise DataError(f"no mapping between {architecture.name} and Megatron for {_some(unmapped)}")
    with contextlib.ExitStack() as stack:
        readers = _open(path, stack)
        _check_names(path, set(readers), {name for rule in rules for name in rule.names}, architecture)
        for rule in rules:
            parts = [readers[name].get_tensor(name) for name in rule.names]
            target = parameters[rule.parameter]
            with boundary(DataError, f"{path}: {_some(rule.names)}", RuntimeError):
                merged = rule.merge(parts)
            if merged.shape != target.shape:
                shapes = [tuple(part.shape) for part in parts]
                raise DataError(
                    f"{path}: {_some(rule.names)} of shapes {shapes} make {tuple(merged.shape)}, config.json asks for "
                    f"{tuple(target.shape)}"
                )
            with torch.no_grad():
                target.copy_(merged)


def export_weights(
    parameters: Mapping[str, torch.Tensor], architecture: Architecture
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Hugging Face name, full tensor) from Megatron's unsharded `parameters`, layer by layer, detached.

    Tensors may be views of the parameters: copy them before the next optimizer step.
    """
    for rule in _rules(architecture):
        yield from zip(rule.names, rule.split(parameters[rule.parameter].detach()), strict=True)


def save_hf(
    source: Path, tensors: Iterable[tuple[str, torch.Tensor]], out: Path, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write a folder that can be served: `tensors`, and config, tokenizer and templates copied from `source`.

    It is written beside `out` and renamed when whole; an `out` that exists is replaced.
    Raises DataError where the disk refuses.
    """
    temporary = out.with_name(f".{out.name}.writing-{os.getpid()}")
    with boundary(DataError, f"write the model folder {out}", OSError, SafetensorError):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        dtype = _write_shards(tensors, temporary, shard_bytes)
        for file in source.iterdir():
            if file.is_file() and file.suffix not in (".safetensors", ".bin", ".pt", ".pth") and file.name != _INDEX:
                shutil.copyfile(file, temporary / file.name)
        config = json.loads((source / "config.json").read_text())
        for key in [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]:
            config[key] = str(dtype).removeprefix("torch.")
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        swap_in(temporary, out)


def swap_in(written: Path, folder: Path) -> None:
    """Give a finished folder its name; one that has it already is removed afterwards. Both are on one file system."""
    replaced = folder.with_name(f".{folder.name}.replaced-{os.getpid()}")
    if folder.exists():
        folder.rename(replaced)
    written.rename(folder)
    shutil.rmtree(replaced, ignore_errors=True)


def _write_shards(tensors: Iterable[tuple[str, torch.Tensor]], folder: Path, shard_bytes: int) -> torch.dtype:
    shard: dict[str, torch.Tensor] = {}
    files: list[list[str]] = []
    size = total = 0
    dtype = torch.float32

    def flush() -> None:
        part = folder / f"part-{len(files)}"
        save_file(shard, part, metadata={"format": "pt"})
        usual_mode(part)
        files.append(list(shard))
        shard.clear()

    for name, tensor in tensors:
        if shard and size + tensor.nbytes > shard_bytes:
            flush()
            size = 0
        shard[name] = tensor.contiguous().cpu()
        dtype, size, total = tensor.dtype, size + tensor.nbytes, total + tensor.nbytes
    flush()
    if len(files) == 1:
        (folder / "part-0").rename(folder / "model.safetensors")
        return dtype
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files):
        file = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        (folder / f"part-{number}").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return dtype


@dataclass(frozen=True, slots=True)
class _Rule:
    """One Megatron parameter and the tensors on disk that make it."""

    parameter: str
    names: tuple[str, ...]
    merge: Callable[[list[torch.Tensor]], torch.Tensor]
    split: Callable[[torch.Tensor], Iterable[torch.Tensor]]


def _rules(architecture: Architecture) -> list[_Rule]:
    rules = [_same("embedding.word_embeddings.weight", "model.embed_tokens.weight")]
    for layer in range(architecture.num_layers):
        rules += _layer_rules(architecture, f"decoder.layers.{layer}", f"model.layers.{layer}")
    rules.append(_same("decoder.final_layernorm.weight", "model.norm.weight"))
    if not architecture.tied:
        rules.append(_same("output_layer.weight", "lm_head.weight"))
    return rules


def _layer_rules(architecture: Architecture, ours: str, theirs: str) -> list[_Rule]:
    rules = [
        _same(f"{ours}.input_layernorm.weight", f"{theirs}.input_layernorm.weight"),
        _qkv(architecture, f"{ours}.self_attention.linear_qkv.weight", f"{theirs}.self_attn"),
        _same(f"{ours}.self_attention.q_layernorm.weight", f"{theirs}.self_attn.q_norm.weight"),
        _same(f"{ours}.self_attention.k_layernorm.weight", f"{theirs}.self_attn.k_norm.weight"),
        _same(f"{ours}.self_attention.linear_proj.weight", f"{theirs}.self_attn.o_proj.weight"),
        _same(f"{ours}.pre_mlp_layernorm.weight", f"{theirs}.post_attention_layernorm.weight"),
    ]
    if architecture.moe is None:
        return rules + _mlp_rules(f"{ours}.mlp", f"{theirs}.mlp")
    rules.append(_same(f"{ours}.mlp.router.weight", f"{theirs}.mlp.gate.weight"))
    for expert in range(architecture.moe.num_experts):
        rules += _mlp_rules(f"{ours}.mlp.experts.local_experts.{expert}", f"{theirs}.mlp.experts.{expert}")
    return rules


def _mlp_rules(ours: str, theirs: str) -> list[_Rule]:
    gate_up = _Rule(
        f"{ours}.linear_fc1.weight",
        (f"{theirs}.gate_proj.weight", f"{theirs}.up_proj.weight"),
        torch.cat,
        lambda weight: weight.chunk(2),
    )
    return [gate_up, _same(f"{ours}.linear_fc2.weight", f"{theirs}.down_proj.weight")]


def _same(parameter: str, name: str) -> _Rule:
    return _Rule(parameter, (name,), lambda parts: parts[0], lambda weight: (weight,))


def _qkv(architecture: Architecture, parameter: str, theirs: str) -> _Rule:
    """Megatron keeps, for each group, its query heads, then its key head, then its value head."""
    groups, dim = architecture.groups, architecture.head_dim
    rows = [architecture.heads // groups * dim, dim, dim]  # of one group

    def merge(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([part.reshape(groups, -1, part.shape[-1]) for part in parts], dim=1).flatten(0, 1)

    def split(weight: torch.Tensor) -> list[torch.Tensor]:
        return [part.flatten(0, 1) for part in torch.split(weight.view(groups, sum(rows), -1), rows, dim=1)]

    return _Rule(parameter, tuple(f"{theirs}.{part}_proj.weight" for part in "qkv"), merge, split)


def _open(path: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Tensor name -> the open safetensors file that holds it."""
    files = sorted(path.glob("*.safetensors"))
    if (path / _INDEX).is_file():
        with boundary(DataError, f"read {path / _INDEX}", OSError, ValueError, KeyError):
            files = sorted({path / file for file in json.loads((path / _INDEX).read_text())["weight_map"].values()})
    if not files:
        raise DataError(f"{path} holds no *.safetensors weights")
    readers: dict[str, Any] = {}
    for file in files:
        with boundary(DataError, f"read {file}", OSError, SafetensorError):
            reader = stack.enter_context(safe_open(file, framework="pt"))
            readers |= dict.fromkeys(reader.keys(), reader)
    return readers


def _check_names(path: Path, found: set[str], wanted: set[str], architecture: Architecture) -> None:
    if architecture.tied:
        found = found - {"lm_head.weight"}  # some writers repeat the embedding
    if missing := sorted(wanted - found):
        raise DataError(f"{path}: {len(missing)} of {len(wanted)} tensors are missing: {_some(missing)}")
    if unknown := sorted(found - wanted):
        raise DataError(f"{path}: {len(unknown)} tensors have no place in {architecture.name}: {_some(unknown)}")


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _refuse(path: Path, key: str, found: object, supported: object) -> None:
    if found != supported:
        raise DataError(f"{path}/config.json: {key}={found!r} is not supported by the trainer, only {supported!r}")
