"""Router replay: the training gates are the softmax of the training logits over the experts the rollout used.

    g_i = I_i exp(s_i) / sum_j I_j exp(s_j)      R3, arXiv 2510.11370, equation for the training side

Megatron's `RouterReplay` does the gather and the softmax; this module decides what it replays. Three things in the
upstream class (megatron-core 0.16.1) would fail silently and are closed here:

- its list of instances is global and positional, so a second model in the process shifts it: here each layer is
  addressed by its own global `layer_number` and its instance leaves that list;
- rows are not checked: missing ones get zero experts, duplicates collapse to one expert at 1/K: they are checked first;
- under activation recomputation a router runs again during the backward pass, when the targets may already be those of
  a later micro-batch: a call inside a running autograd graph task takes the first-in-first-out list instead.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.transformer_layer import TransformerLayer

from agent_r3.errors import ContractError, RoutingError
from agent_r3.types import MoEShape


class ReplayController:
    """Replays rows in the routers of one model chunk, and tells what they would have chosen by themselves."""

    def __init__(self, model: torch.nn.Module, shape: MoEShape, moe_layers: Sequence[int]) -> None:
        """`moe_layers[l]` is the index among all hidden layers whose rows are `routing[l]`.

        Raises ContractError where the model's configuration would bypass the replay.
        """
        self.shape = shape
        self._routers: dict[int, _LayerReplay] = {}  # l -> its router's replay, for the layers of this chunk
        row_of_layer = {layer: row for row, layer in enumerate(moe_layers)}
        for layer in (module for module in model.modules() if isinstance(module, TransformerLayer)):
            router = getattr(layer.mlp, "router", None)
            if router is None:
                continue
            _check_router(router)
            RouterReplay.global_router_replay_instances.remove(router.router_replay)
            router.router_replay = _LayerReplay()
            self._routers[row_of_layer[layer.layer_number - 1]] = router.router_replay

    @contextmanager
    def step(self, *, replay: bool, natural: bool) -> Iterator[None]:
        """Around all micro-batches of one pass; `target` is called before each. Leaves no target behind."""
        for router in self._routers.values():
            router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD if replay else None)
            router.keep_natural = natural
        try:
            yield
        finally:
            for router in self._routers.values():
                router.clear_router_replay_action()
                router.clear_indices()

    def target(self, routing: torch.Tensor) -> None:
        """Replay `routing` [L, T, K] in the next micro-batch. Raises RoutingError for rows that are not whole."""
        for row, router in self._routers.items():
            router.set_target_indices(routing[row])

    def natural(self) -> dict[int, torch.Tensor]:
        """Row index l -> [T, K]: the top-k of the training logits in the last micro-batch, replayed or not."""
        recorded = {row: router.get_recorded_indices() for row, router in sorted(self._routers.items())}
        missing = [row for row, indices in recorded.items() if indices is None]
        if missing:
            raise ContractError(f"no natural routing was recorded in MoE layers {missing}")
        return {row: indices for row, indices in recorded.items() if indices is not None}


def check_rows(routing: torch.Tensor, tokens: int, shape: MoEShape) -> None:
    """Raises RoutingError, with numbers, unless `routing` is [L, tokens, K] of distinct experts in range."""
    wanted = (shape.num_layers, tokens, shape.top_k)
    if tuple(routing.shape) != wanted:
        raise RoutingError(f"routing rows of shape {tuple(routing.shape)} [L, T, K], wanted {wanted}")
    low, high = int(routing.min()), int(routing.max())
    if low < 0 or high >= shape.num_experts:
        layer, token, _ = torch.nonzero((routing < 0) | (routing >= shape.num_experts))[0].tolist()
        raise RoutingError(
            f"experts from {low} to {high}, wanted 0 to {shape.num_experts - 1}; first at MoE layer {layer}, "
            f"position {token}: {routing[layer, token].tolist()}"
        )
    ordered = routing.sort(dim=-1).values
    repeated = (ordered[..., 1:] == ordered[..., :-1]).any(dim=-1)
    if bool(repeated.any()):
        layer, token = torch.nonzero(repeated)[0].tolist()
        raise RoutingError(
            f"{int(repeated.sum())} of {repeated.numel()} rows name an expert twice; first at MoE layer {layer}, "
            f"position {token}: {routing[layer, token].tolist()}"
        )


class _LayerReplay(RouterReplay):  # type: ignore[misc]
    """One router's replay: safe under recomputation, keeps the natural choice beside the replayed one."""

    def __init__(self) -> None:
        super().__init__()
        RouterReplay.global_router_replay_instances.remove(self)
        self.keep_natural = False

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: Any, group_topk: Any, default_compute_topk: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        recomputing = torch._C._current_graph_task_id() != -1
        if self.keep_natural and not recomputing:
            with torch.no_grad():
                self.record_indices(default_compute_topk(scores, topk, num_groups, group_topk)[1])
        action = self.router_replay_action
        if recomputing and action is RouterReplayAction.REPLAY_FORWARD:
            self.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        try:
            chosen: tuple[torch.Tensor, torch.Tensor] = super().get_replay_topk(
                scores, topk, num_groups, group_topk, default_compute_topk
            )
        finally:
            self.set_router_replay_action(action)
        return chosen


def _check_router(router: Any) -> None:
    config = router.config
    if config.moe_router_fusion:
        raise ContractError("moe_router_fusion is on: Megatron's fused router returns before the replay")
    if router.routing_type != "none":
        raise ContractError(f"load balancing is {router.routing_type!r}: its loss would use the natural top-k")
    if router.router_replay is None:
        raise ContractError("the model was built without moe_enable_routing_replay")
