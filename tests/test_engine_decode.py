"""The batched decode attention against SGLang's own, on tensors."""

from typing import Any

import pytest
import torch

from agent_r3.compat import fix_torchvision
from agent_r3.rollout.sglang_cpu import batched_decode
from agent_r3.rollout.sglang_server import install_cpu_shims

fix_torchvision()
install_cpu_shims()

from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend  # noqa: E402

STOCK = TorchNativeAttnBackend._run_sdpa_forward_decode


def decode_inputs(lengths: list[int], *, heads: int = 8, groups: int = 2, head_dim: int = 32) -> dict[str, Any]:
    """A KV cache whose requests lie scattered; everything that a request does not own is NaN."""
    generator = torch.Generator().manual_seed(len(lengths))
    slots = sum(lengths) + 50
    order = torch.randperm(slots, generator=generator)
    k_cache = torch.full((slots, groups, head_dim), torch.nan)
    v_cache = torch.full((slots, groups, head_dim), torch.nan)
    table = order[torch.randint(sum(lengths), slots, (2 * len(lengths), max(lengths) + 7), generator=generator)]
    pool = torch.randperm(2 * len(lengths), generator=generator)[: len(lengths)]
    start = 0
    for request, length in zip(pool, lengths, strict=True):
        own = order[start : start + length]
        table[request, :length] = own
        k_cache[own] = torch.randn(length, groups, head_dim, generator=generator)
        v_cache[own] = torch.randn(length, groups, head_dim, generator=generator)
        start += length
    query = torch.randn(len(lengths), heads, head_dim, generator=generator)
    return {
        "query": query,
        "output": torch.empty_like(query),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "req_to_token": table.to(torch.int32),
        "req_pool_indices": pool,
        "seq_lens": torch.tensor(lengths),
        "scaling": head_dim**-0.5,
        "enable_gqa": heads != groups,
    }


def both(inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    def never(*args: object, **kwargs: object) -> torch.Tensor:
        raise AssertionError("the batch went to the stock decode")

    ours = batched_decode(never)(None, **{**inputs, "output": torch.empty_like(inputs["query"])})
    return ours, STOCK(None, **inputs)


@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [300], [5, 64, 1, 333, 17, 200], list(range(1, 65))])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (8, 2), (6, 1)])
def test_batched_decode_equals_stock_decode_in_fp32(lengths: list[int], heads: int, groups: int) -> None:
    ours, stock = both(decode_inputs(lengths, heads=heads, groups=groups))
    torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-6)


def test_batched_decode_equals_stock_decode_with_a_bf16_query_over_an_fp32_cache() -> None:
    inputs = decode_inputs([9, 120, 33])
    inputs |= {"query": inputs["query"].bfloat16(), "output": inputs["output"].bfloat16()}
    ours, stock = both(inputs)
    torch.testing.assert_close(ours, stock, rtol=2e-2, atol=2e-2)


def test_very_ragged_batches_and_sliding_windows_go_to_the_stock_decode() -> None:
    decode = batched_decode(STOCK)
    ragged = decode_inputs([4000, *[2] * 63])
    torch.testing.assert_close(
        decode(None, **{**ragged, "output": torch.empty_like(ragged["query"])}), STOCK(None, **ragged), rtol=0, atol=0
    )
    window = decode_inputs([9, 120]) | {"sliding_window_size": 16}
    torch.testing.assert_close(
        decode(TorchNativeAttnBackend, **{**window, "output": torch.empty_like(window["query"])}),
        STOCK(TorchNativeAttnBackend, **window),
        rtol=0,
        atol=0,
    )
