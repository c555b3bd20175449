"""Which groups a step is made of: read from the store in data order, filtered and refilled (dynamic sampling)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from agent_r3.config import Config
from agent_r3.errors import ContractError
from agent_r3.store import Delivery, GroupReader
from agent_r3.trainer.losses import is_mixed

log = structlog.get_logger(__name__)

_WAIT_SLICE_S = 2.0


class Stopped(Exception):
    """The run was asked to stop while it waited for groups."""


@dataclass(frozen=True, slots=True)
class StepGroups:
    """The groups that one step consumes, in data order."""

    deliveries: tuple[Delivery, ...]
    kept: frozenset[int]  # indices, in the data order, of the groups to train on
    refills: int  # rounds of further groups

    @property
    def stop(self) -> int:
        """Index of the first group after these."""
        return self.deliveries[-1].group.index + 1

    @property
    def mixed(self) -> int:
        """Groups with unequal rewards."""
        return len(_mixed(self.deliveries))


class GroupFeed:
    """Takes groups strictly by their index, so that a step's data does not depend on which finished first.

    Groups that arrive early wait here, unacknowledged; groups from before `position` were trained before a crash that
    came between their checkpoint and its acknowledgement, and are acknowledged now. `idle` is called while waiting;
    it may raise Stopped.
    """

    def __init__(self, store: GroupReader, position: int, idle: Callable[[], None]) -> None:
        self.position = position  # index of the next group
        self._store = store
        self._idle = idle
        self._early: dict[int, Delivery] = {}

    def take(self, count: int) -> list[Delivery]:
        """The next `count` groups; asks for them and waits until all are there."""
        self._idle()
        wanted = range(self.position, self.position + count)
        self._store.set_demand(wanted.stop)
        while not all(index in self._early for index in wanted):
            for delivery in self._store.read(count, _WAIT_SLICE_S):
                self._keep(delivery)
            self._idle()
        self.position = wanted.stop
        return [self._early.pop(index) for index in wanted]

    def _keep(self, delivery: Delivery) -> None:
        index = delivery.group.index
        if index < self.position:
            log.info("group was trained before", group=delivery.group.id, index=index)
            self._store.ack([delivery])
        elif index in self._early:
            raise ContractError(
                f"group index {index} came twice: {self._early[index].entry_id} {self._early[index].group.id} and "
                f"{delivery.entry_id} {delivery.group.id}"
            )
        else:
            self._early[index] = delivery


def collect(feed: GroupFeed, config: Config, version: int) -> StepGroups:
    """A step's groups, under `train.dynamic_sampling`.

    `refill` asks for one further group per group of equal rewards, in at most `max_refills` rounds; the step then goes
    on with what it has. Raises ContractError for a group of another policy version.
    """
    mode, wanted = config.train.dynamic_sampling, config.rollout.groups_per_step
    taken = feed.take(wanted)
    refills = 0
    while mode == "refill" and refills < config.train.max_refills and (missing := wanted - len(_mixed(taken))) > 0:
        taken += feed.take(missing)
        refills += 1
    for delivery in taken:
        if delivery.group.policy_version != version:
            raise ContractError(
                f"group {delivery.group.id} (index {delivery.group.index}) comes from policy version "
                f"{delivery.group.policy_version}, the trainer is at {version}"
            )
    kept = {delivery.group.index for delivery in taken} if mode == "off" else _mixed(taken)
    return StepGroups(tuple(taken), frozenset(kept), refills)


def _mixed(deliveries: Sequence[Delivery]) -> set[int]:
    return {delivery.group.index for delivery in deliveries if is_mixed(delivery.group.rewards)}
