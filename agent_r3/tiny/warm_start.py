"""Supervised warm start of the tiny policy, with the trainer that reinforcement learning uses. Runs as a process:

    python -m agent_r3.tiny.warm_start EPISODES.npz FOLDER STEPS

FOLDER holds config.json and the tokenizer; its weights are written there at the end.
"""

import json
import math
import os
import random
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import structlog
import torch
from safetensors.torch import save_file

from agent_r3.config import TrainConfig
from agent_r3.trainer.batch import Pack, make_packs, plan_packs
from agent_r3.trainer.megatron import Policy
from agent_r3.trainer.weights import save_hf
from agent_r3.types import Ending, Routing, Trajectory

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class WarmStart:
    """The recipe; tried together with the model's shape and the scripts' share of right edits."""

    steps: int
    batch: int = 12  # episodes a step
    lr: float = 3e-3
    warmup: int = 15
    final_lr: float = 0.05  # share of lr at the end of the cosine
    clip_grad: float = 1.0
    pack_tokens: int = 8_192
    router_std: float = 0.1
    # Scales lm_head at the end: a temperature of 1/1.4 folded into the weights, which makes the sampled policy sharper.
    head_scale: float = 1.4
    seed: int = 0


def warm_start(episodes: list[Trajectory], folder: Path, recipe: WarmStart) -> list[float]:
    """Train from random weights on the sampled tokens of `episodes`; write `folder`. Returns each step's loss."""
    policy = _fresh_policy(folder, recipe)
    rng = random.Random(recipe.seed)
    began, losses = time.monotonic(), list[float]()
    for step in range(recipe.steps):
        chosen = rng.sample(range(len(episodes)), recipe.batch)
        packs = _packs([episodes[index] for index in chosen], recipe.pack_tokens)
        sampled = sum(int(pack.loss_mask.sum()) for pack in packs)

        def loss(
            index: int, pack: Pack, logprobs: torch.Tensor, entropy: torch.Tensor, sampled: int = sampled
        ) -> tuple[torch.Tensor, dict[str, float]]:
            return -logprobs[pack.loss_mask].sum() / sampled, {}

        losses.append(sum(policy.update(packs, loss, lr=_rate(recipe, step)).losses))
        if step % 20 == 0 or step == recipe.steps - 1:
            log.info("warm start", step=step, loss=round(losses[-1], 4), seconds=round(time.monotonic() - began, 1))
    weights = ((name, t * recipe.head_scale if name == "lm_head.weight" else t) for name, t in policy.export())
    save_hf(folder, weights, folder)
    return losses


def _rate(recipe: WarmStart, step: int) -> float:
    cosine = 0.5 * (1 + math.cos(math.pi * step / recipe.steps))
    return recipe.lr * min(1.0, (step + 1) / recipe.warmup) * (recipe.final_lr + (1 - recipe.final_lr) * cosine)


def _packs(episodes: list[Trajectory], pack_tokens: int) -> list[Pack]:
    plan = plan_packs([len(episode.tokens) for episode in episodes], 1, pack_tokens)[0]
    return make_packs(plan, dict(enumerate(episodes)), np.zeros(len(episodes), dtype=np.float32), None)


def write_random_weights(folder: Path, recipe: WarmStart) -> None:
    """Normal weights with deviation 0.02, routers wider so that experts differ from the start, norms 1."""
    config = json.loads((folder / "config.json").read_text())
    generator = torch.Generator().manual_seed(recipe.seed)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    heads, groups, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    weights: dict[str, torch.Tensor] = {}

    def normal(name: str, *shape: int, std: float = 0.02) -> None:
        weights[name] = torch.randn(*shape, generator=generator) * std

    def ones(name: str, size: int) -> None:
        weights[name] = torch.ones(size)

    normal("model.embed_tokens.weight", vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        ones(f"{prefix}.input_layernorm.weight", hidden)
        ones(f"{prefix}.post_attention_layernorm.weight", hidden)
        for part, count in (("q", heads), ("k", groups), ("v", groups)):
            normal(f"{prefix}.self_attn.{part}_proj.weight", count * dim, hidden)
        normal(f"{prefix}.self_attn.o_proj.weight", hidden, heads * dim)
        ones(f"{prefix}.self_attn.q_norm.weight", dim)
        ones(f"{prefix}.self_attn.k_norm.weight", dim)
        normal(f"{prefix}.mlp.gate.weight", config["num_experts"], hidden, std=recipe.router_std)
        for expert in range(config["num_experts"]):
            name, width = f"{prefix}.mlp.experts.{expert}", config["moe_intermediate_size"]
            normal(f"{name}.gate_proj.weight", width, hidden)
            normal(f"{name}.up_proj.weight", width, hidden)
            normal(f"{name}.down_proj.weight", hidden, width)
    ones("model.norm.weight", hidden)
    normal("lm_head.weight", vocab, hidden)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def load_episodes(path: Path) -> list[Trajectory]:
    """What `episodes.save_episodes` wrote, as trajectories without routing rows."""
    with np.load(path) as file:
        bounds = np.cumsum([0, *file["lengths"]])
        tokens, masks = file["tokens"].astype(np.int32), file["masks"].astype(np.bool_)
    return [
        Trajectory(
            id=str(index),
            group_id="",
            task_id="",
            tokens=tokens[start:stop],
            loss_mask=masks[start:stop],
            logprobs=np.zeros(stop - start, dtype=np.float32),
            versions=np.zeros(stop - start, dtype=np.int32),
            routing=Routing(0, np.zeros((0, 0, 0), dtype=np.uint8)),
            reward=0.0,
            ending=Ending.FINISH,
            turns=0,
        )
        for index, (start, stop) in enumerate(pairwise(bounds))
    ]


def _fresh_policy(folder: Path, recipe: WarmStart) -> Policy:
    write_random_weights(folder, recipe)
    train = TrainConfig(dtype="float32", device="cpu", lr=recipe.lr, betas=(0.9, 0.98), clip_grad=recipe.clip_grad)
    return Policy.from_pretrained(folder, train, replay=False, seed=recipe.seed)


if __name__ == "__main__":
    torch.set_num_threads(min(4, os.cpu_count() or 1))
    warm_start(load_episodes(Path(sys.argv[1])), Path(sys.argv[2]), WarmStart(int(sys.argv[3])))
