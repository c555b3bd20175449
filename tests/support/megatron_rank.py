"""One rank of a data-parallel update. Arguments: model folder, output folder, pack seeds. Reads torchrun's environment.

Pack i goes to rank i % world. Two optimizer steps; then checkpoint and model folder are written.
"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agent_r3.trainer.megatron import Policy


def two_steps(model: Path, seeds: list[int]) -> tuple["Policy", list[float]]:
    """The policy after two steps, and their gradient norms."""
    from agent_r3.config import TrainConfig
    from agent_r3.trainer.megatron import Policy
    from tests.support.hf import random_pack

    policy = Policy.from_pretrained(model, TrainConfig(dtype="float32", lr=1e-3, clip_grad=0.5))
    packs = [random_pack((9, 17, 5), policy.shape, seed=seed) for seed in seeds]
    own = packs[policy.dp_rank :: policy.dp_size]
    steps = [
        policy.update(own, lambda i, pack, logps, e: (-(logps * (pack.tokens + 1)).sum() / 100, {})) for _ in range(2)
    ]
    return policy, [step.grad_norm for step in steps]


def main(model: Path, out: Path, seeds: list[int]) -> None:
    # Imported here and in two_steps: Megatron's checkpoint writer starts a process that imports this file again.
    import torch

    from agent_r3.trainer.device import shutdown

    torch.set_num_threads(1)
    policy, norms = two_steps(model, seeds)
    policy.save(out / "checkpoint")
    policy.save_hf(out / "hf")
    (out / f"norms-{policy.dp_rank}-of-{policy.dp_size}.json").write_text(json.dumps(norms))
    shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), [int(seed) for seed in sys.argv[3].split(",")])
