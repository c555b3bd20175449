"""`python -m agent_r3.rollout.sglang_server ARGS`: SGLang's own server, with what a CPU-only machine lacks put right.

SGLang starts its scheduler and detokenizer with multiprocessing's spawn, which runs this module again in each child:
what is done at import holds in all of them. On a GPU (no `SGLANG_USE_CPU_ENGINE`) nothing of SGLang is touched.
"""

import ctypes
import importlib.machinery
import importlib.util
import os
import signal
import sys
import types
from collections.abc import Callable
from typing import Any

_PR_SET_PDEATHSIG = 1
_PARENT_PID = "AGENT_R3_ENGINE_PARENT_PID"


class _KernelStub(types.ModuleType):
    """SGLang imports names of `sgl_kernel` at module level; without AMX it calls none of them, but uses plain torch."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args: object, **kwargs: object) -> Any:
            raise NotImplementedError(f"sgl_kernel.{name} is not available on this machine (CPU engine)")

        return missing


def install_cpu_shims() -> None:
    """What SGLang needs to import on a machine without CUDA. Idempotent."""
    from agent_r3.compat import fix_torchvision

    fix_torchvision()
    if "sgl_kernel" not in sys.modules and importlib.util.find_spec("sgl_kernel") is None:
        stub = _KernelStub("sgl_kernel")
        stub.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None)
        sys.modules["sgl_kernel"] = stub


def die_with_parent() -> None:
    """Have the kernel kill this child when its parent dies. SGLang does so too, but only after its long imports.

    The first process is left to its launcher. Each process tells its children its pid through the environment.
    """
    parent = os.environ.get(_PARENT_PID)
    if parent is not None and __name__ != "__main__":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(parent):  # it died before the line above
            sys.exit(f"the parent process {parent} is gone")
    os.environ[_PARENT_PID] = str(os.getpid())


def main() -> None:
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    server_args = prepare_server_args(sys.argv[1:])
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


die_with_parent()
if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    install_cpu_shims()

if __name__ == "__main__":
    main()
