"""Core attention over packed sequences (THD) for machines without Transformer Engine.

Megatron's own `DotProductAttention` refuses packed sequences and allocates the square of the length. On a GPU with
Transformer Engine Megatron's `TEDotProductAttention` is taken instead of this module.
"""

from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE, TEDotProductAttention
from torch.nn.functional import scaled_dot_product_attention


def core_attention() -> type[torch.nn.Module]:
    """The class for Megatron's `core_attention` here. The Transformer Engine branch has not been run by the tests."""
    if torch.cuda.is_available() and HAVE_TE:
        te: type[torch.nn.Module] = TEDotProductAttention
        return te
    return PackedAttention


class PackedAttention(torch.nn.Module):
    """Causal attention, sequence by sequence; a drop-in for the `core_attention` of Megatron's SelfAttention."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        **unused: Any,  # attention_dropout, cp_comm_type, pg_collection: not of this attention's concern
    ) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        packed_seq_params: Any,
        **unused: Any,  # attn_mask_type and attention_bias: causal without a bias
    ) -> torch.Tensor:
        """`query` is [T, heads, dim], `key` and `value` [T, groups, dim]; returns [T, heads * dim]."""
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        outputs = [
            scaled_dot_product_attention(
                q.transpose(0, 1)[None],
                k.transpose(0, 1)[None],
                v.transpose(0, 1)[None],
                is_causal=True,
                enable_gqa=True,
                scale=self.scale,
            )[0].transpose(0, 1)
            for q, k, v in zip(*(torch.split(part, lengths) for part in (query, key, value)), strict=True)
        ]
        return torch.cat(outputs).flatten(1)
