"""Seeds of sampling, for engines that take one."""

import hashlib

_SEEDS = 2**31 - 2**16  # turns add their number to an episode's seed, and engines take 31 bits


def sampling_seed(seed: int, task_id: str, sample: int) -> int:
    """The seed of an episode's sampling: the same whenever it is run, and another one for every other episode."""
    digest = hashlib.sha256(f"{seed}/{sample}/{task_id}".encode()).digest()
    return int.from_bytes(digest[:8]) % _SEEDS
