"""Hugging Face's Qwen3-MoE as the reference: its routes, its log-probs, and its log-probs under given routes."""

from pathlib import Path
from typing import Any

import numpy as np

from agent_r3.compat import fix_torchvision
from agent_r3.types import Float32Array, Int32Array, RowArray


class Reference:
    """One model in one dtype, whole sequences at a time, no cache."""

    def __init__(self, folder: Path, dtype: str) -> None:
        fix_torchvision()
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self._model = model.eval()

    def routes(self, tokens: Int32Array) -> RowArray:
        """Experts each token is routed to, [T, L, K], MoE layers only."""
        logits = self._forward(tokens, output_router_logits=True).router_logits
        top_k = self._model.config.num_experts_per_tok
        chosen: RowArray = np.stack([layer.topk(top_k, -1).indices.numpy() for layer in logits], axis=1)
        return chosen

    def greedy(self, tokens: Int32Array) -> Int32Array:
        """The likeliest next token at each position, [T]."""
        best: Int32Array = self._forward(tokens).logits[0].argmax(-1).numpy().astype(np.int32)
        return best

    def logprobs(self, tokens: Int32Array, routes: RowArray | None = None) -> Float32Array:
        """Log-prob of each next token, [T - 1]; under `routes` [T - 1, L, K], gates are the softmax over the set."""
        import torch

        hooks = [] if routes is None else self._replay(routes)
        try:
            logp = torch.log_softmax(self._forward(tokens).logits[0].float(), -1)
        finally:
            for hook in hooks:
                hook.remove()
        return logp[:-1].gather(1, torch.tensor(tokens[1:], dtype=torch.long)[:, None])[:, 0].numpy()

    def _forward(self, tokens: Int32Array, **options: object) -> Any:
        import torch

        with torch.no_grad():
            return self._model(torch.tensor(tokens, dtype=torch.long)[None], **options)

    def _replay(self, routes: RowArray) -> list[Any]:
        """Forward hooks that put the routers' outputs (logits, gates, experts) on the given experts."""
        import torch
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

        routers = [m for m in self._model.modules() if isinstance(m, Qwen3MoeTopKRouter)]
        last = np.broadcast_to(np.arange(routes.shape[2]), (1, *routes.shape[1:]))  # the last token has no row
        experts = torch.tensor(np.concatenate([routes, last]).astype(np.int64))

        def hook_of(layer: int) -> Any:
            def hook(module: Any, inputs: tuple[Any, ...], output: Any) -> Any:
                hidden = inputs[0].reshape(-1, inputs[0].shape[-1])
                probs = torch.softmax(torch.nn.functional.linear(hidden, module.weight), -1, dtype=torch.float)
                gates = probs.gather(1, experts[:, layer])
                gates = gates / gates.sum(-1, keepdim=True)
                return output[0], gates.to(output[1].dtype), experts[:, layer]

            return hook

        return [router.register_forward_hook(hook_of(layer)) for layer, router in enumerate(routers)]
