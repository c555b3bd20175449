"""Cures for packages of the CPU stack that do not import as installed."""

import importlib.util
from pathlib import Path


def fix_torchvision() -> None:
    """Make `import torchvision` (and so transformers' Qwen3-MoE and SGLang) work beside a CPU build of torch.

    PyPI's torchvision is a CUDA build: beside a CPU torch its native library does not load, and then the operators
    that its Python side decorates do not exist (`operator torchvision::nms does not exist`). Their schemas are enough:
    nothing here calls them. Call it before the first import of transformers; does nothing where torchvision works.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        return
    import torch

    if hasattr(torch.ops.torchvision, "nms"):
        return
    for native in Path(spec.submodule_search_locations[0]).glob("_C*.so"):
        try:
            torch.ops.load_library(str(native))  # type: ignore[no-untyped-call]
            return
        except OSError:  # the CUDA build beside a CPU torch
            continue
    global _schemas
    _schemas = schemas = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for operator in ("nms", "qnms"):
        schemas.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]


_schemas: object = None  # the schemas live as long as this library object
