"""The network: Megatron's GPTModel as a Qwen3-MoE (or dense Qwen3), with log-probs instead of logits as its output."""

from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.utils.checkpoint import checkpoint

from agent_r3.config import TrainConfig
from agent_r3.trainer.attention import core_attention
from agent_r3.trainer.weights import Architecture

HEAD_BYTES = 1 << 29
"""Largest float32 block of logits; the output head runs over as many tokens at a time as fit."""


class PolicyModel(GPTModel):  # type: ignore[misc]
    """GPTModel whose output is [2, T]: log-prob and entropy of each token that `loss_mask` selects, elsewhere 0.

    `labels` are the tokens themselves, unshifted: entry t is read from the hidden state at t - 1.
    """

    def __init__(self, config: TransformerConfig, architecture: Architecture, temperature: float) -> None:
        super().__init__(
            config,
            _layer_spec(architecture),
            vocab_size=architecture.vocab_size,
            max_sequence_length=architecture.max_position_embeddings,
            position_embedding_type="rope",
            rotary_base=architecture.rope_theta,
            share_embeddings_and_output_weights=architecture.tied,
        )
        self.temperature = temperature
        self.head_rows = max(1, HEAD_BYTES // (4 * architecture.vocab_size))

    def _postprocess(
        self, *, hidden_states: torch.Tensor, labels: torch.Tensor, loss_mask: torch.Tensor, **unused: Any
    ) -> torch.Tensor:
        if not self.post_process:
            return hidden_states
        hidden = hidden_states[:, 0]
        wanted = loss_mask.nonzero()[:, 0]
        # Tied to the graph even where nothing is selected: Megatron always runs the backward pass.
        output = hidden.new_zeros((2, len(labels)), dtype=torch.float32) + 0.0 * hidden[:1, 0].float()
        if not len(wanted):
            return output
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        blocks = zip(*(torch.split(part, self.head_rows) for part in (hidden[wanted - 1], labels[wanted])), strict=True)
        if len(wanted) <= self.head_rows:
            values = [self._head(block, tokens, weight) for block, tokens in blocks]
        else:
            values = [
                checkpoint(self._head, block, tokens, weight, use_reentrant=False, preserve_rng_state=False)
                for block, tokens in blocks
            ]
        return output.index_add(1, wanted, torch.cat(values, dim=1))

    def _head(self, hidden: torch.Tensor, tokens: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """[2, n] log-probs and entropies of `tokens` [n] given `hidden` [n, H]."""
        logits = self.output_layer(hidden[:, None], weight=weight)[0][:, 0].float()
        if self.temperature != 1.0:
            logits = logits / self.temperature
        logprobs = torch.log_softmax(logits, dim=-1)
        with torch.no_grad():
            entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
        return torch.stack([logprobs.gather(1, tokens[:, None])[:, 0], entropy])


def transformer_config(architecture: Architecture, train: TrainConfig) -> TransformerConfig:
    """Megatron's configuration: no dropout, no auxiliary loss, no fused router, gradients summed and never averaged."""
    dtype = torch.bfloat16 if train.dtype == "bfloat16" else torch.float32
    moe = architecture.moe
    settings: dict[str, Any] = {}
    if moe:
        settings |= {
            "num_moe_experts": moe.num_experts,
            "moe_router_topk": moe.top_k,
            "moe_ffn_hidden_size": architecture.expert_hidden_size,
            # True: softmax over all experts, not renormalised over the chosen ones, as such models are served.
            "moe_router_pre_softmax": not architecture.norm_topk_prob,
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32",
            "moe_token_dispatcher_type": "alltoall",
            "moe_enable_routing_replay": True,
        }
    if train.recompute:
        settings |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        num_attention_heads=architecture.heads,
        num_query_groups=architecture.groups,
        kv_channels=architecture.head_dim,
        ffn_hidden_size=architecture.ffn_hidden_size,
        layernorm_epsilon=architecture.norm_eps,
        normalization="RMSNorm",
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        use_cpu_initialization=True,
        perform_initialization=False,  # every parameter is loaded
        calculate_per_token_loss=True,  # no division by micro-batches or ranks, see megatron_loss
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
        **settings,
    )


def _layer_spec(architecture: Architecture) -> Any:
    spec = get_gpt_layer_local_spec(
        num_experts=architecture.moe.num_experts if architecture.moe else None,
        qk_layernorm=True,
        normalization="RMSNorm",
    )
    spec.submodules.self_attention.submodules.core_attention = core_attention()
    return spec
