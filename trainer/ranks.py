"""What the trainer's ranks tell each other: small Python objects through torch.distributed."""

from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def rank() -> int:
    return int(dist.get_rank())


def world_size() -> int:
    return int(dist.get_world_size())


def barrier() -> None:
    dist.barrier()


def share(value: T | None) -> T:
    """Rank 0's value, on every rank; what other ranks pass is ignored."""
    box: list[Any] = [value]
    dist.broadcast_object_list(box, src=0)
    result: T = box[0]
    return result


def gather(value: T) -> list[T]:
    """Every rank's value, in the order of ranks, on every rank."""
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values
