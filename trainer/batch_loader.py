"""A step's trajectories on this rank: loaded from the store, checked, planned over ranks and mini-steps, packed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agent_r3.config import Config
from agent_r3.store import GroupReader
from agent_r3.trainer import ranks
from agent_r3.trainer.batch import Pack, check_trajectory, check_version, make_packs, plan_packs
from agent_r3.trainer.diagnostics import RowSums, row_sums
from agent_r3.trainer.feed import StepGroups
from agent_r3.trainer.losses import group_advantages
from agent_r3.trainer.rollout_metrics import Sums, trajectory_sums
from agent_r3.types import Ending, Float32Array, MoEShape, Trajectory

CUT = (Ending.MAX_TURNS, Ending.MAX_TOKENS, Ending.TIMEOUT)
"""Endings that `train.mask_truncated` leaves out of the loss; their rewards stay in their groups' baselines."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One episode of the step, before its trajectory is loaded."""

    trajectory_id: str
    group_id: str
    reward: float
    kept: bool  # its group is trained on


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """One optimizer step: this rank's packs and the counts over all ranks."""

    packs: tuple[Pack, ...]
    tokens: int  # in the loss
    sequences: int  # trajectories with any


@dataclass(frozen=True, slots=True)
class Batch:
    """A step's data on this rank. Indices are those of the step's samples, the same on every rank."""

    trajectories: dict[int, Trajectory]  # this rank's, those it trains on
    diagnosed: dict[int, Trajectory]  # this rank's share of a sample of all, trained on or not
    advantages: Float32Array  # [N]
    mini_batches: tuple[MiniBatch, ...]  # empty when there is nothing to train on
    rollout: Sums  # of this rank's share of all samples
    rows: RowSums  # likewise


@dataclass(frozen=True, slots=True)
class _Size:
    """What every rank must know of a trajectory to plan."""

    tokens: int
    sampled: int
    ending: Ending


def samples_of(groups: StepGroups) -> list[Sample]:
    """The step's episodes, in data order."""
    return [
        Sample(trajectory_id, delivery.group.id, reward, delivery.group.index in groups.kept)
        for delivery in groups.deliveries
        for trajectory_id, reward in zip(delivery.group.trajectory_ids, delivery.group.rewards, strict=True)
    ]


class BatchLoader:
    """Loads batches; every rank calls `load` with the same samples."""

    def __init__(self, store: GroupReader, config: Config, shape: MoEShape | None) -> None:
        """`shape` is what routing rows are checked against; None where none are recorded."""
        self._store = store
        self._config = config
        self._shape = shape
        self._replay = config.train.routing == "r3"

    def load(self, samples: Sequence[Sample], step: int, version: int) -> Batch:
        """Raises ContractError for trajectories that do not fit, are missing or of another policy version."""
        rank, world = ranks.rank(), ranks.world_size()
        # First an even share of all, for the figures of the whole rollout and the lengths to balance by.
        loaded = {index: self._get(samples[index], version) for index in range(rank, len(samples), world)}
        sizes = _sizes(loaded)
        rollout = trajectory_sums(loaded.values())
        rows = sum(map(row_sums, loaded.values()), RowSums())
        trained = [index for index, sample in enumerate(samples) if sample.kept and self._counts(sizes[index])]
        advantages = np.zeros(len(samples), np.float32)
        kept = [index for index, sample in enumerate(samples) if sample.kept]
        advantages[kept] = group_advantages(
            [samples[index].reward for index in kept],
            [samples[index].group_id for index in kept],
            normalize=self._config.train.normalize_advantage,
        )
        plans = self._plan(trained, sizes, step)
        mine = {index for plan in plans for pack in plan[rank] for index in pack}
        trajectories = {index: loaded.get(index) or self._get(samples[index], version) for index in sorted(mine)}
        mini_batches = tuple(self._mini_batch(plan, rank, trajectories, advantages, sizes) for plan in plans)
        diagnosed = {index: loaded[index] for index in self._sample(len(samples), step) if index in loaded}
        return Batch(trajectories, diagnosed, advantages, mini_batches, rollout, rows)

    def packs(self, trajectories: dict[int, Trajectory], advantages: Float32Array) -> list[Pack]:
        """Further packs of this rank's trajectories, with rows wherever they are recorded; as many on every rank."""
        order = sorted(trajectories)
        lengths = [len(trajectories[index].tokens) for index in order]
        (plan,) = plan_packs(lengths, 1, self._config.train.micro_batch_tokens)
        count = max(ranks.gather(len(plan)))
        packs = [tuple(order[place] for place in pack) for pack in plan] + [()] * (count - len(plan))
        return make_packs(packs, trajectories, advantages, self._shape)

    def _get(self, sample: Sample, version: int) -> Trajectory:
        trajectory = self._store.load(sample.trajectory_id)
        check_trajectory(trajectory, self._shape)
        check_version(trajectory, version)
        return trajectory

    def _sample(self, count: int, step: int) -> list[int]:
        """The samples to diagnose, the same on every rank."""
        wanted = min(self._config.train.diagnostics_trajectories, count)
        return sorted(random.Random(f"{self._config.run.seed}/diagnostics/{step}").sample(range(count), wanted))

    def _counts(self, size: _Size) -> bool:
        return size.sampled > 0 and not (self._config.train.mask_truncated and size.ending in CUT)

    def _plan(self, trained: Sequence[int], sizes: dict[int, _Size], step: int) -> list[list[list[tuple[int, ...]]]]:
        """[mini-step][rank][pack] -> sample indices. With several mini-steps their members are drawn at random."""
        count = self._config.train.mini_steps
        order = list(trained)
        if count > 1:
            random.Random(f"{self._config.run.seed}/mini-steps/{step}").shuffle(order)
        plans = []
        for part in (order[first::count] for first in range(count)):
            lengths = [sizes[index].tokens for index in part]
            places = plan_packs(lengths, ranks.world_size(), self._config.train.micro_batch_tokens)
            if part:
                plans.append([[tuple(part[place] for place in pack) for pack in packs] for packs in places])
        return plans

    def _mini_batch(
        self,
        plan: list[list[tuple[int, ...]]],
        rank: int,
        trajectories: dict[int, Trajectory],
        advantages: Float32Array,
        sizes: dict[int, _Size],
    ) -> MiniBatch:
        members = [index for packs in plan for pack in packs for index in pack]
        mine = {index: trajectories[index] for pack in plan[rank] for index in pack}
        packs = make_packs(plan[rank], mine, advantages, self._shape if self._replay else None)
        return MiniBatch(tuple(packs), sum(sizes[index].sampled for index in members), len(members))


def _sizes(loaded: dict[int, Trajectory]) -> dict[int, _Size]:
    mine = {index: _Size(len(t.tokens), int(t.loss_mask.sum()), t.ending) for index, t in loaded.items()}
    return {index: size for sizes in ranks.gather(mine) for index, size in sizes.items()}
