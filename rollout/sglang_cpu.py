"""SGLang plugin (entry point `sglang.srt.plugins`): routed experts and batched decoding on a machine without CUDA.

Loaded by SGLang in each of its processes. Does nothing unless the CPU engine is used. Written against SGLang 0.5.23.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

# Padding a decode batch may gather at most this many times the tokens it holds, and always this many.
_MAX_PADDING = 4
_FREE_SLOTS = 1 << 16


def register() -> None:
    """Called by SGLang's `load_plugins()`."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.pool_host import common

    # Upstream registers the routing cache's host memory with cudart, which a CPU build of torch does not have.
    common.ALLOC_MEMORY_FUNCS["cpu"] = _allocate
    TorchNativeAttnBackend._run_sdpa_forward_decode = batched_decode(TorchNativeAttnBackend._run_sdpa_forward_decode)


def _allocate(dims: tuple[int, ...], dtype: torch.dtype, **_: object) -> torch.Tensor:
    return torch.empty(dims, dtype=dtype, device="cpu")


def batched_decode(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """One padded gather and one attention call for a decode batch, where `stock` loops over its requests.

    The heads of a KV group become query rows, so keys and values are not repeated. Equal to `stock` up to the order of
    summation. Cross attention, sliding windows and very ragged batches (padding over 4x) go to `stock`.
    """

    def decode(
        self: Any,
        query: torch.Tensor,  # [B, H, D]
        output: torch.Tensor,  # [B, H, Dv], written
        k_cache: torch.Tensor,  # [slots, G, D]
        v_cache: torch.Tensor,  # [slots, G, Dv]
        req_to_token: torch.Tensor,  # [requests, positions] -> slot
        req_pool_indices: torch.Tensor,  # [B]
        seq_lens: torch.Tensor,  # [B]
        encoder_lens: torch.Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> torch.Tensor:
        batch, longest = len(seq_lens), int(seq_lens.max())
        ragged = batch * longest > max(_MAX_PADDING * int(seq_lens.sum()), _FREE_SLOTS)
        if encoder_lens is not None or is_cross_attn or sliding_window_size is not None or ragged:
            result = stock(
                self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens,
                scaling=scaling, enable_gqa=enable_gqa, causal=causal, is_cross_attn=is_cross_attn,
                sliding_window_size=sliding_window_size,
            )  # fmt: skip
            return result
        slots = req_to_token[req_pool_indices, :longest].long()
        q = query[:batch]
        valid = torch.arange(longest) < seq_lens[:, None]
        # Past a request's end its table holds other requests' or freed slots: point those at its own first token.
        slots = torch.where(valid, slots, slots[:, :1]).reshape(-1)
        keys, values = (
            cache.flatten(1)
            .index_select(0, slots)
            .view(batch, longest, *cache.shape[1:])
            .transpose(1, 2)
            .to(query.dtype)
            for cache in (k_cache, v_cache)
        )  # [B, G, longest, D]
        rows = q.reshape(batch, k_cache.shape[1], -1, q.shape[-1])  # [B, G, H / G, D]
        mask = valid[:, None, None]  # [B, 1, 1, longest]
        attended = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scaling)
        output[:batch] = attended.reshape(batch, -1, attended.shape[-1])
        return output

    return decode
