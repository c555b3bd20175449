"""Tiny Qwen3 folders whose routing matters, and Hugging Face as the reference: its router can replay given rows.

torch and transformers are imported inside the functions: this module is loaded for every test run.
"""

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

    from agent_r3.trainer.batch import Pack
    from agent_r3.types import MoEShape

LAYERS, EXPERTS, TOP_K, VOCAB = 4, 16, 4, 256


def make_hf_folder(
    path: Path,
    *,
    moe: bool = True,
    tied: bool = False,
    norm_topk_prob: bool = True,
    dtype: str = "float32",
    seed: int = 0,
    std: float = 0.06,
    experts: int = EXPERTS,
    top_k: int = TOP_K,
) -> Path:
    """Write a random Qwen3-MoE (or dense Qwen3) of 4 layers with config.json and safetensors, no tokenizer.

    Router weights are large against `std`, norms are not ones: a wrong row, gate or norm shows in the logits.
    """
    import torch

    from agent_r3.compat import fix_torchvision

    fix_torchvision()
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
    }
    torch.manual_seed(seed)
    if moe:
        config = Qwen3MoeConfig(
            **sizes,
            moe_intermediate_size=48,
            num_experts=experts,
            num_experts_per_tok=top_k,
            norm_topk_prob=norm_topk_prob,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        )
        model: Any = Qwen3MoeForCausalLM(config)  # type: ignore[no-untyped-call]
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**sizes))  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else noise * (0.3 if "gate.weight" in name else std))
    model.to(getattr(torch, dtype)).save_pretrained(path)
    return path


def tokenizer_files(path: Path) -> Path:
    """Add a minimal tokenizer.json and tokenizer_config.json to the folder."""
    vocab = {chr(33 + i): i for i in range(64)}
    (path / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": vocab, "merges": []}}))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    return path


class HfReference:
    """The same folder in transformers, float32, eager attention."""

    def __init__(self, path: Path) -> None:
        import torch

        from agent_r3.compat import fix_torchvision

        fix_torchvision()
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        self.model.eval()
        self._rows: torch.Tensor | None = None  # [L, t, K] of the sequence that runs
        self._natural: dict[int, torch.Tensor] = {}
        self.gates = [layer.mlp.gate for layer in self.model.model.layers if hasattr(layer.mlp, "gate")]
        for index, gate in enumerate(self.gates):
            gate.forward = MethodType(self._routing(index), gate)

    def logits(self, pack: "Pack", routing: "torch.Tensor | None" = None) -> "torch.Tensor":
        """[T, V] with autograd, each sequence run alone; `routing` [L, T, K] is replayed."""
        return self._run(pack, routing)[0]

    def natural(self, pack: "Pack", routing: "torch.Tensor | None" = None) -> "torch.Tensor":
        """[L, T, K]: the top-k of the router logits, `routing` being replayed."""
        return self._run(pack, routing)[1]

    def logprobs(self, pack: "Pack", routing: "torch.Tensor | None" = None, temperature: float = 1.0) -> "torch.Tensor":
        """[T], aligned as `Policy.logprobs`: 0 at sequence starts and outside the loss mask; with autograd."""
        import torch

        full = torch.log_softmax(self.logits(pack, routing) / temperature, dim=-1)
        own = full.roll(1, dims=0).gather(1, pack.tokens[:, None])[:, 0]
        return torch.where(pack.loss_mask & (pack.positions > 0), own, torch.zeros(()))

    def _run(self, pack: "Pack", routing: "torch.Tensor | None") -> "tuple[torch.Tensor, torch.Tensor]":
        import torch

        bounds = pack.cu_seqlens.tolist()
        logits, natural = [], []
        for start, stop in pairwise(bounds):
            self._rows = None if routing is None else routing[:, start:stop].long()
            logits.append(self.model(pack.tokens[None, start:stop], use_cache=False).logits[0])
            natural.append([self._natural[index] for index in range(len(self.gates))])
        self._rows = None
        layers = [torch.cat(parts) for parts in zip(*natural, strict=True)]
        return torch.cat(logits), torch.stack(layers) if layers else torch.empty(0)

    def _routing(self, index: int) -> Callable[..., Any]:
        """R3's gates in transformers' router: softmax of the logits over the replayed experts."""
        import torch

        def forward(gate: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            logits = torch.nn.functional.linear(hidden.reshape(-1, gate.hidden_dim), gate.weight)
            probabilities = torch.softmax(logits, dim=-1)
            self._natural[index] = probabilities.topk(gate.top_k, dim=-1).indices.detach()
            chosen = self._natural[index] if self._rows is None else self._rows[index]
            gates = probabilities.gather(1, chosen)
            if gate.norm_topk_prob:
                gates = gates / gates.sum(dim=-1, keepdim=True)
            return logits, gates, chosen

        return forward


def random_pack(lengths: Sequence[int], shape: "MoEShape | None", *, seed: int = 0) -> "Pack":
    """Random tokens; about half of them in the loss; random distinct experts (not the natural ones) as rows."""
    import torch

    from agent_r3.trainer.batch import Pack

    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    positions = torch.cat([torch.arange(length) for length in lengths])
    mask = (torch.rand(total, generator=generator) < 0.5) & (positions > 0)
    routing = None
    if shape is not None:
        scores = torch.rand((shape.num_layers, total, shape.num_experts), generator=generator)
        routing = scores.topk(shape.top_k, dim=-1).indices.to(torch.int32)
    return Pack(
        tokens=torch.randint(0, VOCAB, (total,), generator=generator),
        positions=positions,
        cu_seqlens=torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32),
        loss_mask=mask,
        routing=routing,
        has_row=torch.full((total,), shape is not None),
        advantages=torch.zeros(total),
        rollout_logprobs=torch.zeros(total),
        versions=torch.zeros(total, dtype=torch.int32),
        sequences=tuple(range(len(lengths))),
    )


@pytest.fixture(scope="session")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 Qwen3-MoE: 4 layers, 16 experts, top 4, vocabulary 256, with tokenizer files."""
    return tokenizer_files(make_hf_folder(tmp_path_factory.mktemp("hf") / "moe"))


@pytest.fixture(scope="session")
def dense_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 dense Qwen3 of the same size."""
    return tokenizer_files(make_hf_folder(tmp_path_factory.mktemp("hf") / "dense", moe=False))
