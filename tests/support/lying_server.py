"""An HTTP server that answers like SGLang, except for one thing that a test makes wrong."""

import base64
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from aiohttp import web

from agent_r3.types import MoEShape

Answer = dict[str, Any]


def encode(rows: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(np.ascontiguousarray(rows, dtype="<i4").tobytes()).decode()


def honest_answer(request: Answer, moe: MoEShape, sampled: int = 5) -> Answer:
    """What a right server says: distinct experts, contiguous rows, log-probs of the sampled tokens."""
    ids = list(range(20, 20 + sampled))
    rows = len(request["input_ids"]) + sampled - 1 - request["routed_experts_start_len"]
    return {
        "output_ids": ids,
        "meta_info": {
            "finish_reason": {"type": "length", "length": sampled},
            "output_token_logprobs": [[-1.5, token, None] for token in ids],
            "routed_experts": encode(np.broadcast_to(np.arange(moe.top_k), (rows, moe.num_layers, moe.top_k))),
            "cached_tokens": 0,
            "num_retractions": 0,
            "weight_version": "7",
        },
    }


@asynccontextmanager
async def lying_server(respond: Callable[[Answer], Answer | web.Response]) -> AsyncIterator[str]:
    """Serve POST /generate with `respond(request)`; yields the URL."""

    async def generate(request: web.Request) -> web.Response:
        answer = respond(await request.json())
        return answer if isinstance(answer, web.Response) else web.json_response(answer)

    app = web.Application()
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
