"""GRPO through verl 0.9.1: the only module that imports verl (lazily; it takes seconds).

Departures from verl's own trainer, all of them here:
- A group with equal rewards, also a group of one, has advantage exactly 0 (verl gives a group of one its raw reward).
- Infrastructure failures are not in the group at all, so they are not in its baseline.
- verl scales each rank's loss for the averaging of its data-parallel backend. Here the policy sums losses over packs
  and ranks, so each pack's loss is its share of the global mean (`dp_size` 1, global counts).
The clip is verl's `vanilla`: asymmetric (clip higher), with its dual clip at 3 for negative advantages, without KL.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from agent_r3.compat import fix_torchvision
from agent_r3.config import TrainConfig
from agent_r3.trainer.batch import Pack
from agent_r3.types import Float32Array

LOSSES = {"grpo": "vanilla"}
"""Our names of policy losses and verl's."""

DUAL_CLIP = 3.0
"""verl's default `clip_ratio_c`: bounds the loss of a token with a negative advantage and a large ratio."""


@cache
def load_verl() -> ModuleType:
    """verl's algorithms. The first call takes seconds: make it while there is something else to wait for."""
    fix_torchvision()
    from verl.trainer.ppo import core_algos

    module: ModuleType = core_algos
    return module


def is_mixed(rewards: Sequence[float]) -> bool:
    """Whether a group's rewards differ, that is, whether it carries a gradient."""
    return len(rewards) > 1 and max(rewards) != min(rewards)


def group_advantages(rewards: Sequence[float], groups: Sequence[str], *, normalize: bool) -> Float32Array:
    """GRPO outcome advantages, [N]: reward minus the group's mean, by its standard deviation (n - 1) if `normalize`.

    `groups[i]` names the group of episode i. Groups of equal rewards (also of one episode) get exactly 0.
    """
    if not rewards:
        return np.zeros(0, dtype=np.float32)
    scores = torch.tensor(rewards, dtype=torch.float32)[:, None]
    index = np.array(groups, dtype=object)
    advantages, _ = load_verl().compute_grpo_outcome_advantage(
        token_level_rewards=scores,
        response_mask=torch.ones_like(scores),
        index=index,
        norm_adv_by_std_in_grpo=normalize,
    )
    result: Float32Array = advantages[:, 0].numpy().astype(np.float32)
    for group in set(groups):
        members = index == group
        if not is_mixed([reward for reward, member in zip(rewards, members, strict=True) if member]):
            result[members] = 0.0
    return result


@dataclass(frozen=True, slots=True)
class LossSums:
    """What one optimizer step's loss was made of; adds up over packs and ranks."""

    tokens: int = 0
    loss: float = 0.0  # already a share of the global mean
    clipped: float = 0.0  # tokens
    old_kl: float = 0.0  # sum over tokens of old - new log-prob
    entropy: float = 0.0  # sum over tokens

    def __add__(self, other: "LossSums") -> "LossSums":
        return LossSums(
            self.tokens + other.tokens,
            self.loss + other.loss,
            self.clipped + other.clipped,
            self.old_kl + other.old_kl,
            self.entropy + other.entropy,
        )

    def metrics(self, optimizer_steps: int) -> dict[str, float]:
        """Means; empty when nothing was trained on."""
        if not self.tokens:
            return {}
        count = self.tokens
        return {
            "train/loss": self.loss / optimizer_steps,
            "train/clip_fraction": self.clipped / count,
            "train/ppo_kl": self.old_kl / count,
            "train/entropy": self.entropy / count,
            "train/loss_tokens": float(self.tokens),
        }


class PolicyLoss:
    """The loss of one pack as its share of the mean over the whole mini-batch (all packs of all ranks).

    `tokens` and `sequences` count the mini-batch's tokens in the loss and its trajectories with any; `horizon` is the
    constant length of `seq-mean-token-sum-norm`. Summing the returned losses over packs and ranks gives verl's
    `agg_loss` of the whole mini-batch.
    """

    def __init__(self, config: TrainConfig, *, tokens: int, sequences: int, horizon: int) -> None:
        algos = load_verl()
        self._mode: str = config.loss_aggregation
        self._loss_fn = algos.get_policy_loss_fn(LOSSES[config.loss])
        self._config = algos.ActorConfig(
            strategy="megatron",
            rollout_n=1,
            use_dynamic_bsz=True,
            clip_ratio=config.clip_low,
            clip_ratio_low=config.clip_low,
            clip_ratio_high=config.clip_high,
            clip_ratio_c=DUAL_CLIP,
            loss_agg_mode=config.loss_aggregation,
            loss_scale_factor=horizon,
        )
        self._config.global_batch_info.update(
            dp_size=1,
            batch_num_tokens=max(tokens, 1),
            global_batch_size=max(sequences, 1),
            loss_scale_factor=horizon,
        )

    def __call__(
        self, pack: Pack, logprobs: torch.Tensor, old_logprobs: torch.Tensor, entropy: torch.Tensor
    ) -> tuple[torch.Tensor, LossSums]:
        """`logprobs`, `old_logprobs` and `entropy` are [T], aligned as in batch.py; the loss is a scalar."""
        device = logprobs.device
        mask_flat = pack.loss_mask.to(device)
        lengths = pack.cu_seqlens.diff().tolist()

        def rows(values: torch.Tensor) -> torch.Tensor:  # [T] -> [S, longest], verl's layout
            return pad_sequence(list(torch.split(values.to(device), lengths)), batch_first=True)

        mask = rows(pack.loss_mask)
        loss, stats = self._loss_fn(
            old_log_prob=rows(old_logprobs),
            log_prob=rows(logprobs),
            advantages=rows(pack.advantages),
            response_mask=mask.to(torch.float32),
            loss_agg_mode=self._mode,
            config=self._config,
        )
        count = int(mask_flat.sum())
        return loss, LossSums(
            tokens=count,
            loss=float(loss.detach()),
            clipped=(stats["actor/pg_clipfrac"] + stats["actor/pg_clipfrac_lower"]) * count,
            old_kl=stats["actor/ppo_kl"] * count,
            entropy=float(entropy.detach()[mask_flat].sum()),
        )
