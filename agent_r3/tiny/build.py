"""Making the tiny policy's folder, and finding it: tokenizer, config, warm start; kept under a hash of its recipe."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog

from agent_r3 import rollout, tools
from agent_r3.config import SandboxConfig, TasksConfig
from agent_r3.envs.cache import cache_dir, only_one
from agent_r3.envs.datasets import load_tasks
from agent_r3.envs.local import open_pool
from agent_r3.envs.offline import OfflineTask, offline_spec_path, read_spec
from agent_r3.errors import AgentR3Error, DataError
from agent_r3.hfconfig import ModelInfo
from agent_r3.rollout.tokens import END, ChatRenderer
from agent_r3.tiny.episodes import ScriptedEpisode, run_scripts, save_episodes
from agent_r3.tiny.scripts import SCRIPTS
from agent_r3.tiny.tokenizer import save_tokenizer, train_tokenizer
from agent_r3.types import BoolArray, Int32Array, MoEShape

_CONTEXT = 4_096
log = structlog.get_logger(__name__)

_ARCHITECTURE = "Qwen3MoeForCausalLM"


class WarmStartError(AgentR3Error):
    """The supervised training process failed."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Sizes, the mixture of scripted episodes and the length of the training on them (see `warm_start.WarmStart`)."""

    vocab_size: int = 1_920
    layers: int = 4
    hidden: int = 128
    experts: int = 16
    top_k: int = 2
    expert_hidden: int = 128
    episodes: int = 480
    right_share: float = 0.3
    warm_start_steps: int = 220
    seed: int = 1


def model_folder(path: str) -> Path:
    """The folder a config's `model.path` means. Raises DataError when it is `tiny` and that was not made yet."""
    if path != "tiny":
        return Path(path)
    folder = tiny_folder()
    if not folder.is_dir():
        raise DataError(f"model.path is `tiny`, but {folder} is not there: run `agent-r3 model tiny` first")
    return folder


def tiny_folder(recipe: Recipe | None = None) -> Path:
    """Where the tiny policy is kept. The name changes with the recipe, its tasks and what observations look like."""
    used = tasks_used(read_spec(offline_spec_path("offline")))
    digest = hashlib.sha256(json.dumps([asdict(recipe or Recipe()), used]).encode())
    sources = [
        *Path(__file__).parent.glob("*.py"),
        *Path(tools.__file__).parent.glob("*.py"),
        Path(rollout.__file__).parent / "tokens.py",
    ]
    for source in sorted(sources):
        digest.update(source.read_bytes())
    return cache_dir() / "models" / f"tiny-{digest.hexdigest()[:12]}"


def tasks_used(tasks: Sequence[OfflineTask]) -> list[tuple[str, str, str, str]]:
    """What scripted episodes show of a task file: of their own tasks the release and the issue. Pure."""
    return [
        (task.task_id, task.pypi, task.version_with_bug, task.problem_statement)
        for task in sorted(tasks, key=lambda task: task.task_id)
        if task.task_id in SCRIPTS
    ]


async def ensure_tiny(out: Path | None = None, *, force: bool = False) -> tuple[bool, Path]:
    """Make the tiny policy unless it is there. Returns whether it was made, and its folder.

    Raises DataError where its tasks are not built, UserError without Docker, SandboxError, WarmStartError.
    """
    folder = out or tiny_folder()
    async with only_one("tiny"):
        if folder.is_dir() and not force:
            return False, folder
        recipe = Recipe()
        tasks = load_tasks(TasksConfig(dataset="offline", include=tuple(SCRIPTS)))
        async with open_pool(SandboxConfig(), run="model-tiny", owner="model-tiny") as pool:
            episodes = await run_scripts(pool, tasks, recipe.episodes, recipe.right_share, recipe.seed)
        right = sum(episode.right for episode in episodes) / len(episodes)
        log.info("scripted episodes", count=len(episodes), right=round(right, 3))
        make_tiny(episodes, folder, recipe)
        return True, folder


def make_tiny(episodes: Sequence[ScriptedEpisode], out: Path, recipe: Recipe) -> None:
    """Tokenizer, config and warm start from scripted episodes into the new folder `out`, which appears when whole.

    Raises WarmStartError when the training process fails.
    """
    temporary = out.with_name(f".{out.name}.making-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        tokenizer = train_tokenizer((text for episode in episodes for text in episode.texts), recipe.vocab_size)
        save_tokenizer(tokenizer, temporary, _CONTEXT)
        config = _config(recipe, tokenizer.encode(END).ids)
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        data = temporary / "episodes.npz"
        save_episodes(_encode(episodes, temporary, recipe), data)
        # -W ignore: Megatron warns at every import that Apex and Transformer Engine are not there.
        command = [sys.executable, "-W", "ignore", "-m", "agent_r3.tiny.warm_start"]
        command += [str(data), str(temporary), str(recipe.warm_start_steps)]
        code = subprocess.run(command, check=False).returncode
        if code != 0:
            raise WarmStartError(f"`{' '.join(command)}` ended with exit code {code}")
        (temporary / data.name).unlink()
        shutil.rmtree(out, ignore_errors=True)
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _encode(episodes: Sequence[ScriptedEpisode], folder: Path, recipe: Recipe) -> list[tuple[Int32Array, BoolArray]]:
    shape = MoEShape(recipe.layers, recipe.experts, recipe.top_k)
    layers = tuple(range(recipe.layers))
    model = ModelInfo(folder, _ARCHITECTURE, recipe.layers, recipe.vocab_size, _CONTEXT, shape, layers)
    renderer = ChatRenderer.from_folder(model)
    return [episode.encode(renderer) for episode in episodes]


def _config(recipe: Recipe, eos_token_id: list[int]) -> dict[str, object]:
    """config.json as transformers, SGLang and our trainer read it. (transformers leaves `architectures` out.)"""
    return {
        "architectures": [_ARCHITECTURE],
        "model_type": "qwen3_moe",
        "vocab_size": recipe.vocab_size,
        "hidden_size": recipe.hidden,
        "intermediate_size": 2 * recipe.hidden,
        "moe_intermediate_size": recipe.expert_hidden,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": recipe.hidden // 4,
        "num_experts": recipe.experts,
        "num_experts_per_tok": recipe.top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "max_position_embeddings": _CONTEXT,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "eos_token_id": eos_token_id,
        "torch_dtype": "float32",
    }
