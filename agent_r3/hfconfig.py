"""What a model folder says about itself: config.json and tokenizer.json, read as plain JSON without torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_r3.errors import DataError
from agent_r3.types import MoEShape

_EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts")


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model folder's shape. `moe` is None for a dense model."""

    path: Path
    architecture: str
    num_hidden_layers: int
    vocab_size: int
    max_position_embeddings: int
    moe: MoEShape | None
    moe_layers: tuple[int, ...]  # indices, among all hidden layers, of the MoE layers: len == moe.num_layers

    def require_moe(self) -> MoEShape:
        """The MoE shape. Raises DataError for a dense model."""
        if self.moe is None:
            raise DataError(
                f"{self.path} is not a Mixture-of-Experts model ({self.architecture}): it has no routing to replay; "
                "set engine.routed_experts=false and train.routing=none, or take an MoE model"
            )
        return self.moe


def read_model(path: Path) -> ModelInfo:
    """Read and check `path`/config.json. Raises DataError with one line that says what is wrong."""
    if not path.is_dir():
        raise DataError(f"model folder {path} is not there (model.path)")
    config = _read_json(path / "config.json")
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise DataError(f"{path}/config.json must name one architecture, found {architectures!r}")
    if not any(path.glob("*.safetensors")):
        raise DataError(f"{path} holds no *.safetensors weights")
    text = config.get("text_config", config)
    layers = _integer(path, text, "num_hidden_layers")
    moe_layers = _moe_layers(path, text, layers)
    return ModelInfo(
        path=path,
        architecture=str(architectures[0]),
        num_hidden_layers=layers,
        vocab_size=_integer(path, text, "vocab_size"),
        max_position_embeddings=_integer(path, text, "max_position_embeddings"),
        moe=_moe_shape(path, text, len(moe_layers)) if moe_layers else None,
        moe_layers=moe_layers,
    )


def check_tokenizer(model: ModelInfo) -> None:
    """Raises DataError when the folder has no readable tokenizer.json, or one with ids the model does not have."""
    tokenizer = _read_json(model.path / "tokenizer.json")
    vocab = tokenizer.get("model", {}).get("vocab", {})
    ids = [int(i) for i in vocab.values()] if isinstance(vocab, dict) else []
    ids += [int(token["id"]) for token in tokenizer.get("added_tokens", [])]
    if not ids:
        raise DataError(f"{model.path}/tokenizer.json holds no vocabulary")
    if max(ids) >= model.vocab_size:
        raise DataError(
            f"the tokenizer in {model.path} does not match the model: its highest token id is {max(ids)}, "
            f"the model's vocabulary has {model.vocab_size} entries"
        )


def _experts(text: Mapping[str, Any]) -> int:
    return next((int(text[key]) for key in _EXPERT_KEYS if text.get(key) is not None), 0)


def _moe_shape(path: Path, text: Mapping[str, Any], layers: int) -> MoEShape:
    experts, top_k = _experts(text), _integer(path, text, "num_experts_per_tok")
    if top_k > experts:
        raise DataError(f"{path}/config.json: num_experts_per_tok {top_k} exceeds {experts} experts")
    return MoEShape(num_layers=layers, num_experts=experts, top_k=top_k)


def _moe_layers(path: Path, text: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Indices of the layers that route: Qwen's `decoder_sparse_step`/`mlp_only_layers`, or DeepSeek's and GLM's
    `first_k_dense_replace`/`moe_layer_freq` (the rules of the models' own code in transformers)."""
    if _experts(text) == 0:
        return ()
    if "first_k_dense_replace" in text:
        first, every = int(text["first_k_dense_replace"]), int(text.get("moe_layer_freq") or 1)
        return tuple(i for i in range(layers) if i >= first and i % every == 0)
    step, dense = int(text.get("decoder_sparse_step") or 1), set(text.get("mlp_only_layers") or ())
    return tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0)


def _integer(path: Path, text: Mapping[str, Any], key: str) -> int:
    value = text.get(key)
    if not isinstance(value, int) or value <= 0:
        raise DataError(f"{path}/config.json: {key} must be a positive integer, found {value!r}")
    return value


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise DataError(f"{path} is not there; {path.parent} is not a complete model folder")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise DataError(f"{path} is not valid JSON: {exc}") from exc
    if not isinstance(content, dict):
        raise DataError(f"{path} must hold a JSON object")
    return content
