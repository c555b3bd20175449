"""The policy as Megatron-core sees it: GPTModel, forward-backward schedule, DDP, distributed optimizer, checkpoints.

All of these are Megatron's own, unchanged. Added here: packed sequences in, log-probs out; rows replayed in the
routers; an output head that never holds [T, vocabulary] at once; a gradient that is the sum over every rank's packs.
"""

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from agent_r3.config import TrainConfig
from agent_r3.errors import ContractError, DataError
from agent_r3.trainer import device as devices
from agent_r3.trainer.batch import Pack
from agent_r3.trainer.device import Parallel, megatron_device
from agent_r3.trainer.gpt import PolicyModel, transformer_config
from agent_r3.trainer.replay import ReplayController, check_rows
from agent_r3.trainer.weights import Architecture, export_weights, load_weights, read_architecture, save_hf, swap_in
from agent_r3.types import MoEShape

# isort: split
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module

LossFunction = Callable[[int, Pack, torch.Tensor, torch.Tensor], tuple[torch.Tensor, dict[str, float]]]
"""(index, pack, logprobs [T], entropy [T]) -> (scalar loss, numbers to report)."""

_CHECKPOINT_FORMAT = {"distrib_optim_sharding_type": "fully_reshardable"}


@dataclass(frozen=True, slots=True)
class PackOutput:
    """What a forward pass says about one pack. On the CPU."""

    logprobs: torch.Tensor  # float32 [T], log p(tokens[t] | earlier ones) where loss_mask is True, elsewhere 0
    entropy: torch.Tensor  # float32 [T], of the distribution tokens[t] was drawn from; 0 like logprobs
    natural: torch.Tensor | None  # int32 [L, T, K], the training router's own top-k, where asked for


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """One optimizer step. `losses` and `metrics` are of this rank's packs, in their order."""

    grad_norm: float  # before clipping, over all ranks
    lr: float
    losses: tuple[float, ...]
    metrics: tuple[dict[str, float], ...]


class Policy:
    """A Qwen3-MoE (or dense Qwen3) being trained, on this rank."""

    @classmethod
    def from_pretrained(
        cls,
        path: Path,
        train: TrainConfig,
        *,
        temperature: float = 1.0,
        replay: bool = True,
        seed: int = 0,
    ) -> "Policy":
        """Load a Hugging Face folder, on every rank. `temperature` is the one the rollout samples with.

        Raises DataError for a folder that cannot be trained, or whose model is dense while `replay` is asked for.
        """
        architecture = read_architecture(path)
        if replay and architecture.moe is None:
            raise DataError(f"{path} is a dense model ({architecture.name}): nothing to replay; set train.routing=none")
        device = devices.resolve_device(train.device)
        devices.initialize(device, seed, Parallel())
        return cls(path, architecture, train, device, temperature)

    def __init__(
        self, path: Path, architecture: Architecture, train: TrainConfig, device: torch.device, temperature: float
    ) -> None:
        self.path = path
        self.architecture = architecture
        self.shape: MoEShape | None = architecture.moe
        self.steps = 0  # optimizer steps made
        self._train = train
        self._device = device
        with megatron_device():
            self.dp_rank: int = parallel_state.get_data_parallel_rank()
            self.dp_size: int = parallel_state.get_data_parallel_world_size()
            config = transformer_config(architecture, train)
            self.model = PolicyModel(config, architecture, temperature).to(device)
            self._replay = (
                ReplayController(self.model, architecture.moe, range(architecture.num_layers))
                if architecture.moe
                else None
            )
            load_weights(path, dict(self.model.named_parameters()), architecture)
            module = Float16Module(config, self.model) if config.bf16 else self.model
            self._ddp = DistributedDataParallel(
                config,
                DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
                module,
            )
            self._optimizer = _build_optimizer(train, self._ddp)

    def logprobs(self, packs: Sequence[Pack], *, replay: bool, natural: bool = False) -> list[PackOutput]:
        """Log-probs, entropies and (asked for) natural routing of `packs`, without gradients.

        With `replay` each pack's routing is replayed: RoutingError where it is missing or not whole.
        """
        outputs: list[PackOutput] = []

        def collect(index: int, pack: Pack, logprobs: torch.Tensor, entropy: torch.Tensor) -> Any:
            outputs.append(PackOutput(logprobs.cpu(), entropy.cpu(), self._natural() if natural else None))
            return logprobs.sum(), {}

        self.model.eval()
        with torch.no_grad():
            self._run(packs, collect, replay=replay, natural=natural, forward_only=True)
        return outputs

    def update(self, packs: Sequence[Pack], loss: LossFunction, *, lr: float | None = None) -> UpdateResult:
        """One optimizer step on the sum of `loss` over the packs of all ranks. Routing is replayed where a pack has it.

        `loss` sees tensors on the policy's device; whatever normalises it must be in it. Every rank calls this with
        equally many packs. `lr` overrides the configured learning rate, its warm-up included.
        Raises RoutingError for bad rows, ContractError for a loss or gradient that is not finite (nothing is stepped).
        """
        losses: list[float] = []
        metrics: list[dict[str, float]] = []

        def evaluate(index: int, pack: Pack, logprobs: torch.Tensor, entropy: torch.Tensor) -> Any:
            value, report = loss(index, pack, logprobs, entropy)
            losses.append(float(value.detach()))
            metrics.append(report)
            return value, report

        rate = self._train.lr * min(1.0, (self.steps + 1) / max(1, self._train.warmup_steps)) if lr is None else lr
        replay = [pack.routing is not None for pack in packs]
        if any(replay) != all(replay):
            raise ContractError(f"{sum(replay)} of {len(replay)} packs carry routing rows; all or none must")
        self.model.train()
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()
        self._run(packs, evaluate, replay=all(replay), natural=False, forward_only=False)
        with megatron_device():
            self._optimizer.prepare_grads()
            grad_norm = float(self._optimizer.get_grad_norm())  # of all ranks: each of them raises, none waits
            if not all(math.isfinite(number) for number in (grad_norm, *losses)):
                raise ContractError(f"optimizer step {self.steps}: gradient norm {grad_norm}, losses {losses}")
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
        self.steps += 1
        return UpdateResult(grad_norm, rate, tuple(losses), tuple(metrics))

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, full tensor) of every weight, in the training dtype; views of the live parameters."""
        return export_weights(dict(self.model.named_parameters()), self.architecture)

    def save_hf(self, out: Path) -> None:
        """Write a folder that SGLang can serve. Rank 0 writes, all ranks wait."""
        if dist.get_rank() == 0:
            save_hf(self.path, self.export(), out)
        dist.barrier()

    def save(self, folder: Path) -> None:
        """Write model, optimizer and step count to `folder`, all ranks together; it appears only when whole."""
        temporary = folder.with_name(f".{folder.name}.writing")
        if dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        dist.barrier()
        with megatron_device():
            dist_checkpointing.save(self._state(loading=False), str(temporary))
        dist.barrier()
        if dist.get_rank() == 0:
            swap_in(temporary, folder)
        dist.barrier()

    def load(self, folder: Path) -> None:
        """Take up what `save` wrote. Raises DataError where `folder` is not there or not whole."""
        if not (folder / "metadata.json").is_file():
            raise DataError(f"{folder} is not a checkpoint of the policy (no metadata.json)")
        with megatron_device():
            state = dist_checkpointing.load(self._state(loading=True), str(folder))
            self.model.load_state_dict(state["model"])
            _load_optimizer(self._optimizer, state["optimizer"])
        self.steps = state["steps"]

    def _state(self, *, loading: bool) -> dict[str, Any]:
        model = self.model.sharded_state_dict()
        optimizer = self._optimizer.sharded_state_dict(model, is_loading=loading, metadata=_CHECKPOINT_FORMAT)
        return {"model": model, "optimizer": optimizer, "steps": self.steps}

    def _run(
        self, packs: Sequence[Pack], loss: LossFunction, *, replay: bool, natural: bool, forward_only: bool
    ) -> None:
        """All packs through Megatron's schedule."""
        if not packs:
            raise ContractError("no packs: every rank needs at least one, a filler if it has no trajectories")
        if replay and self._replay is None:
            raise ContractError(f"{self.path} is a dense model, but routing is to be replayed")
        for pack in packs:
            self._check(pack, replay)
        step = self._replay.step(replay=replay, natural=natural) if self._replay else nullcontext()
        with megatron_device(), step:
            get_forward_backward_func()(
                forward_step_func=partial(self._forward_step, replay=replay, loss=loss),
                data_iterator=iter(enumerate(packs)),
                model=[self._ddp],
                num_microbatches=len(packs),
                seq_length=max(len(pack.tokens) for pack in packs),
                micro_batch_size=1,
                forward_only=forward_only,
            )

    def _forward_step(
        self, packs: Iterator[tuple[int, Pack]], model: torch.nn.Module, *, replay: bool, loss: LossFunction
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
        index, pack = next(packs)
        if replay and self._replay is not None and pack.routing is not None:
            self._replay.target(pack.routing.to(self._device))
        cu_seqlens = pack.cu_seqlens.to(self._device)
        longest = int(pack.cu_seqlens.diff().max())
        output = model(
            pack.tokens[None].to(self._device),
            pack.positions[None].to(self._device),
            None,
            labels=pack.tokens.to(self._device),
            loss_mask=(pack.loss_mask & (pack.positions > 0)).to(self._device),
            packed_seq_params=PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=cu_seqlens,
                cu_seqlens_kv=cu_seqlens,
                max_seqlen_q=longest,
                max_seqlen_kv=longest,
            ),
        )

        def megatron_loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
            value, report = loss(index, pack, output[0], output[1].detach())
            # With calculate_per_token_loss Megatron divides the gradient by the token count, summed over micro-batches
            # and ranks, and leaves it alone where that is 0 (finalize_model_grads): it stays that of the plain sum.
            return value, torch.zeros((), dtype=torch.int, device=value.device), report

        return output, megatron_loss

    def _check(self, pack: Pack, replay: bool) -> None:
        starts = pack.cu_seqlens[:-1].long()
        lengths = pack.cu_seqlens.diff()
        expected = torch.arange(len(pack.tokens)) - starts.repeat_interleave(lengths)
        if int(pack.cu_seqlens[-1]) != len(pack.tokens) or not torch.equal(pack.positions, expected):
            raise ContractError(
                f"a pack of {len(pack.tokens)} tokens with cu_seqlens {pack.cu_seqlens.tolist()}: positions must "
                "count from 0 in each sequence (Megatron's rotary embedding takes them from cu_seqlens)"
            )
        if replay and pack.routing is None:
            raise ContractError("replay is on, but a pack carries no routing rows")
        if replay and self.shape is not None and pack.routing is not None:
            check_rows(pack.routing.to(self._device), len(pack.tokens), self.shape)

    def _natural(self) -> torch.Tensor:
        if self._replay is None:
            raise ContractError(f"{self.path} is a dense model: it has no routing")
        return torch.stack(list(self._replay.natural().values())).to("cpu", torch.int32)


def _build_optimizer(train: TrainConfig, model: DistributedDataParallel) -> Any:
    bf16 = train.dtype == "bfloat16"
    optimizer: Any = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=train.lr,
            weight_decay=train.weight_decay,
            adam_beta1=train.betas[0],
            adam_beta2=train.betas[1],
            clip_grad=train.clip_grad,
            bf16=bf16,
            params_dtype=torch.bfloat16 if bf16 else torch.float32,
            use_distributed_optimizer=True,
        ),
        [model],
    )
    for adam in (part.optimizer for part in _parts(optimizer) if isinstance(part.optimizer, torch.optim.AdamW)):
        for parameter in (parameter for group in adam.param_groups for parameter in group["params"]):
            # What torch's AdamW does at its first step; Megatron's checkpointing wants to find it earlier.
            adam.state[parameter] = {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
    return optimizer


def _load_optimizer(optimizer: Any, state: dict[Any, Any]) -> None:
    """Megatron's `optimizer.load_state_dict(state)` in its two halves, for torch's AdamW.

    Between them AdamW's step counts are put aside: 0.16.1 restores them in the first half, as one tensor shared by all
    parameters (AdamW would advance it once for each), and asks the checkpoint for them again in the second (KeyError).
    """
    parts = _parts(optimizer)
    for index, part in enumerate(parts):
        part_state = state if len(parts) == 1 else state[index]
        moments = part_state.pop("param_state")
        part.load_state_dict(part_state)
        inner = part.optimizer.state
        steps = {parameter: values.pop("step") for parameter, values in inner.items() if "step" in values}
        part.load_parameter_state_from_fully_reshardable(moments)
        for parameter, step in steps.items():
            inner[parameter]["step"] = step.clone()


def _parts(optimizer: Any) -> list[Any]:
    """Megatron's distributed optimizers: one, or one for dense and one for expert-parallel parameters."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))
