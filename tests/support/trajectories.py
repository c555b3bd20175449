"""Synthetic trajectories: random tokens, alternating observed and sampled spans, rows of random distinct experts."""

from collections.abc import Sequence

import numpy as np

from agent_r3.types import Ending, MoEShape, Routing, Trajectory, Turn

SHAPE = MoEShape(num_layers=2, num_experts=8, top_k=2)


def random_rows(rng: np.random.Generator, rows: int, shape: MoEShape = SHAPE) -> np.ndarray:
    """[rows, L, K], distinct experts in each row."""
    order = rng.random((rows, shape.num_layers, shape.num_experts)).argsort(axis=-1)
    return order[..., : shape.top_k].astype(shape.dtype)


def make_trajectory(
    rng: np.random.Generator,
    length: int,
    *,
    name: str = "t",
    group: str = "g",
    reward: float = 0.0,
    version: int = 0,
    vocab: int = 64,
    shape: MoEShape = SHAPE,
    ending: Ending = Ending.FINISH,
) -> Trajectory:
    """`length` >= 2 tokens: the first third is the prompt, then two sampled spans around an observed token."""
    prompt = max(length // 3, 1)
    mask = np.arange(length) >= prompt
    if length - prompt > 3:
        mask[prompt + (length - prompt) // 2] = False
    logprobs = np.where(mask, -rng.random(length), 0).astype(np.float32)
    return Trajectory(
        id=name,
        group_id=group,
        task_id="task",
        tokens=rng.integers(0, vocab, length).astype(np.int32),
        loss_mask=mask,
        logprobs=logprobs,
        versions=np.full(length, version, np.int32),
        routing=Routing(0, random_rows(rng, length - 1, shape)),
        reward=reward,
        ending=ending,
        turns=2,
        prompt_tokens=length,
        cached_tokens=prompt,
    )


def trajectory_of(turns: Sequence[Turn], *, name: str = "t", reward: float = 0.0) -> Trajectory:
    """The trajectory that these turns make."""
    parts = [np.concatenate([turn.prompt_ids, turn.sampled_ids]) for turn in turns]
    tokens = np.concatenate(parts)
    mask, logprobs = np.zeros(len(tokens), np.bool_), np.zeros(len(tokens), np.float32)
    for turn in turns:
        first = turn.start + len(turn.prompt_ids)
        mask[first : first + len(turn.sampled_ids)] = True
        logprobs[first : first + len(turn.sampled_ids)] = turn.logprobs
    return Trajectory(
        id=name,
        group_id="g",
        task_id="task",
        tokens=tokens,
        loss_mask=mask,
        logprobs=logprobs,
        versions=np.full(len(tokens), turns[0].policy_version, np.int32),
        routing=Routing(0, np.concatenate([turn.routing.experts for turn in turns])),
        reward=reward,
        ending=Ending.FINISH,
        turns=len(turns),
    )
