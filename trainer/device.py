"""Where Megatron-core runs: CUDA with NCCL, or this machine's CPU with gloo.

Megatron-core writes `torch.cuda.current_device()`, `device="cuda"` and `tensor.type() == "torch.cuda.FloatTensor"` in
places that its own CPU initialisation does not cover. On a machine without CUDA `megatron_device()` stands in for
exactly these, only inside its `with` block, so that Megatron's schedules, DDP, distributed optimizer and checkpointing
run unchanged. With CUDA it does nothing. Nothing of Megatron is replaced, save a name that 0.16.1 forgets to define
without Transformer Engine, and two functions that reach into CUDA's generators.
"""

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch._dynamo.config
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.overrides import TorchFunctionMode

from agent_r3.errors import ConfigError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Transformer Engine and Apex are not installed: said five times
    import megatron.core.tensor_parallel.random as megatron_random
    import megatron.core.transformer.moe.moe_utils as megatron_moe_utils
    from megatron.core import parallel_state
warnings.filterwarnings("ignore", "Apex is not installed", UserWarning)  # said again when a model is imported


@dataclass(frozen=True, slots=True)
class Parallel:
    """Sizes of the model-parallel dimensions; what is left of the ranks is data parallel."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1


def resolve_device(wanted: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """This rank's device. Raises ConfigError where CUDA is asked for and does not answer."""
    if torch.cuda.is_available():
        if wanted == "cpu":
            raise ConfigError(
                "train.device=cpu on a machine with CUDA: hide the GPUs with CUDA_VISIBLE_DEVICES= instead"
            )
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    if wanted == "cuda":
        raise ConfigError("train.device=cuda, but torch finds no CUDA device here; use train.device=auto")
    return torch.device("cpu")


def initialize(device: torch.device, seed: int, parallel: Parallel) -> None:
    """Start torch.distributed (torchrun's environment, or one rank without it), Megatron's groups and its seeds.

    Does nothing where they are already up, so that a process can hold a second model.
    """
    _quieten()
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if "WORLD_SIZE" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    if not parallel_state.is_initialized():
        with megatron_device():
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=parallel.tensor,
                pipeline_model_parallel_size=parallel.pipeline,
                expert_model_parallel_size=parallel.expert,
            )
            megatron_random.model_parallel_cuda_manual_seed(seed)


def shutdown() -> None:
    """Take down what `initialize` started. Safe to call twice."""
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def _quieten() -> None:
    """Leave out what Megatron and torch say about each other's age, at every model and every step."""
    for message in ("full scope is deprecated", r"The \.grad attribute of a Tensor that is not a leaf"):
        warnings.filterwarnings("ignore", message, UserWarning)
    for message in ("`torch.distributed.", "`load_state_dict` is deprecated", "Please use DTensor"):
        warnings.filterwarnings("ignore", message, FutureWarning)
    logging.getLogger("megatron.core.rerun_state_machine").setLevel(logging.ERROR)


@contextlib.contextmanager
def megatron_device() -> Iterator[None]:
    """Around every call into Megatron. Reentrant; a no-op with CUDA."""
    if torch.cuda.is_available() or _CudaCallsOnCpu.active:
        yield
        return
    saved = [(owner, name, getattr(owner, name, _ABSENT)) for owner, name, _ in _STAND_INS]
    _CudaCallsOnCpu.active = True
    try:
        for owner, name, value in _STAND_INS:
            setattr(owner, name, value)
        with _CudaCallsOnCpu():
            yield
    finally:
        _CudaCallsOnCpu.active = False
        for owner, name, value in saved:
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


class _CudaCallsOnCpu(TorchFunctionMode):
    """Turns `device="cuda"` into the CPU and lets CPU tensors answer to CUDA's type names."""

    active = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return str(func(*args)).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


class _Nothing:
    """A stream or event of a device that has none: takes any call, does nothing."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self

    def __eq__(self, other: object) -> bool:  # every stream is the current one: Megatron then switches to none
        return isinstance(other, _Nothing)

    __hash__ = object.__hash__


def _is_cuda(device: object) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def _get_rng_state(*args: object, **kwargs: object) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *args: object, **kwargs: object) -> None:
    torch.set_rng_state(state)


def _do_nothing(*args: object, **kwargs: object) -> None:
    pass


_ABSENT = object()
_CPU = torch.device("cpu")
_STAND_INS: tuple[tuple[Any, str, object], ...] = (
    # Megatron wraps small functions in torch.compile; on a CPU that means a C++ compiler run for each.
    (torch._dynamo.config, "disable", True),
    (torch.cuda, "current_device", lambda: _CPU),
    (torch.cuda, "current_stream", _Nothing),
    (torch.cuda, "Stream", _Nothing),
    (torch.cuda, "Event", _Nothing),
    (torch.cuda, "synchronize", _do_nothing),
    (torch.cuda, "manual_seed", torch.manual_seed),
    (torch.cuda, "get_rng_state", _get_rng_state),
    (megatron_random, "_get_cuda_rng_state", _get_rng_state),
    (megatron_random, "_set_cuda_rng_state", _set_rng_state),
    # Read in the router's linear layer; its import is guarded but no fallback is defined (Megatron-core 0.16.1).
    (megatron_moe_utils, "te_general_gemm", getattr(megatron_moe_utils, "te_general_gemm", None)),
)
