"""The engine protocol: token ids in; token ids, log-probs and routing rows out."""

from dataclasses import dataclass
from typing import Protocol

from agent_r3.types import Float32Array, Int32Array, Routing


@dataclass(frozen=True, slots=True)
class Generation:
    """One generate call, already checked: counts, expert range, distinctness, weight version."""

    output_ids: Int32Array  # [S]
    logprobs: Float32Array  # [S]
    routing: Routing  # start = rows_from, stop = len(input) + S - 1
    cached_tokens: int
    policy_version: int
    finished: bool  # ended with a stop token; False when cut by max_new_tokens
    retractions: int


class Engine(Protocol):
    async def generate(
        self, input_ids: Int32Array, *, max_new_tokens: int, rows_from: int, seed: int | None = None
    ) -> Generation:
        """Sample after `input_ids`; return routing rows of positions `rows_from` .. len(input) + S - 2.

        Raises EngineError when the server is gone, refuses or times out; RoutingError when rows do not fit.
        """
        ...
