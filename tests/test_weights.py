"""Hugging Face folders in and out of Megatron's parameters."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from agent_r3.config import TrainConfig
from agent_r3.errors import DataError
from agent_r3.trainer.megatron import Policy
from agent_r3.trainer.weights import save_hf
from tests.support.hf import HfReference, make_hf_folder, random_pack, tokenizer_files

pytestmark = pytest.mark.megatron


@pytest.mark.parametrize("variant", [{}, {"tied": True}, {"moe": False}], ids=["moe", "tied-head", "dense"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_is_what_was_loaded_bit_for_bit(tmp_path: Path, variant: dict[str, Any], dtype: Any) -> None:
    folder = make_hf_folder(tmp_path / "model", dtype=dtype, **variant)
    policy = Policy.from_pretrained(folder, TrainConfig(dtype=dtype), replay=variant.get("moe", True))
    exported, disk = dict(policy.export()), load_file(folder / "model.safetensors")
    assert exported.keys() == disk.keys()
    for name, tensor in disk.items():
        assert tensor.dtype == exported[name].dtype and torch.equal(tensor, exported[name]), name


def test_saved_folder_is_whole_and_read_by_hugging_face(moe_folder: Path, tmp_path: Path) -> None:
    policy = Policy.from_pretrained(moe_folder, TrainConfig(dtype="float32", lr=1e-3))
    pack = random_pack((9, 12), policy.shape)
    policy.update([pack], lambda i, p, logps, e: (-logps.sum(), {}))
    out = tmp_path / "out"
    out.mkdir()
    (out / "stale.txt").write_text("of an older save")
    policy.save_hf(out)
    assert {file.name for file in out.iterdir()} == {file.name for file in moe_folder.iterdir()}
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    assert (out / "tokenizer.json").read_bytes() == (moe_folder / "tokenizer.json").read_bytes()
    assert len({file.stat().st_mode for file in out.iterdir()}) == 1  # an engine of another user reads them too
    with torch.no_grad():
        expected = HfReference(out).logprobs(pack, pack.routing)
    assert (policy.logprobs([pack], replay=True)[0].logprobs - expected).abs().max() <= 1e-4


def test_large_folder_is_written_in_shards_and_read_back(moe_folder: Path, tmp_path: Path) -> None:
    policy = Policy.from_pretrained(moe_folder, TrainConfig(dtype="bfloat16"))
    save_hf(moe_folder, policy.export(), tmp_path / "sharded", shard_bytes=500_000)
    files = sorted((tmp_path / "sharded").glob("*.safetensors"))
    index = json.loads((tmp_path / "sharded" / "model.safetensors.index.json").read_text())
    assert len(files) > 1 and files[-1].name == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for _, tensor in policy.export())
    assert json.loads((tmp_path / "sharded" / "config.json").read_text())["dtype"] == "bfloat16"
    again = Policy.from_pretrained(tmp_path / "sharded", TrainConfig(dtype="bfloat16"))
    for (name, tensor), (other_name, other) in zip(policy.export(), again.export(), strict=True):
        assert name == other_name and torch.equal(tensor, other), name


def damage(folder: Path, change: Any) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def refuse(folder: Path, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Policy.from_pretrained(folder, TrainConfig(dtype="float32"))


def test_weights_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    folder = make_hf_folder(tmp_path / "missing")
    refuse(damage(folder, lambda tensors: tensors.pop(name)), rf"1 of \d+ tensors are missing: {name}")
    folder = make_hf_folder(tmp_path / "unknown")
    refuse(damage(folder, lambda tensors: tensors.update(extra=torch.zeros(1))), "1 tensors have no place .*: extra")
    folder = make_hf_folder(tmp_path / "shape")
    refuse(damage(folder, lambda tensors: tensors.update({name: torch.zeros(7, 64)})), rf"{name} of shapes")
    folder = make_hf_folder(tmp_path / "norm")
    refuse(damage(folder, lambda t: t.update({"model.norm.weight": torch.zeros(7)})), r"make \(7,\).*asks for \(64,\)")
    folder = make_hf_folder(tmp_path / "cut")
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
    refuse(folder, "read .*model.safetensors")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("architectures", ["LlamaForCausalLM"], "LlamaForCausalLM"),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}, "rope_type='yarn'"),
        ("mlp_only_layers", [1], "MoE layers=3"),
        ("attention_bias", True, "attention_bias=True"),
    ],
)
def test_config_that_is_not_mapped_is_refused(tmp_path: Path, key: str, value: object, message: str) -> None:
    folder = make_hf_folder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    refuse(folder, message)


def test_save_to_a_full_or_closed_place_is_a_data_error(moe_folder: Path, tmp_path: Path) -> None:
    policy = Policy.from_pretrained(tokenizer_files(moe_folder), TrainConfig(dtype="float32"))
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="write the model folder"):
        policy.save_hf(tmp_path / "file" / "out")
