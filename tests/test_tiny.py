"""The tiny policy: its scripts do what they claim in real containers, and its warm start gives a folder that serves."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import docker
import numpy as np
import pytest

from agent_r3.config import GradingConfig, SandboxConfig, TasksConfig, load_config
from agent_r3.envs.build import build_tasks
from agent_r3.envs.datasets import load_tasks
from agent_r3.envs.grading import Grader
from agent_r3.envs.images import ImageBuilder
from agent_r3.envs.local import open_pool
from agent_r3.envs.offline import offline_spec_path, read_spec
from agent_r3.envs.pool import SandboxPool
from agent_r3.errors import DataError
from agent_r3.hfconfig import read_model
from agent_r3.rollout.tokens import ChatRenderer
from agent_r3.tiny import AGENT, SCRIPTS, ensure_tiny, make_tiny, model_folder, tiny_folder
from agent_r3.tiny.build import Recipe, WarmStartError, tasks_used
from agent_r3.tiny.episodes import ScriptedEpisode, run_scripts, save_episodes
from agent_r3.tiny.scripts import Edit, mixture, write_turns
from agent_r3.tools import parse
from agent_r3.types import Task, ToolCall

CONFIG = Path(__file__).parent.parent / "configs" / "tiny-cpu.yaml"
FIRST = "pathspec__0.12.1"


@pytest.fixture(scope="module")
def tasks(docker_engine: docker.APIClient) -> Mapping[str, Task]:
    """The tasks, built in the user's cache: only the first session pays."""

    async def build() -> None:
        async with open_pool(SandboxConfig(), run="tasks-build") as pool:
            await build_tasks(offline_spec_path("offline"), tuple(SCRIPTS), ImageBuilder(), pool, lambda *_: None)

    asyncio.run(build())
    return {task.id: task for task in load_tasks(TasksConfig(dataset="offline", include=tuple(SCRIPTS)))}


@pytest.fixture(scope="module")
def episodes(tasks: Mapping[str, Task], docker_engine: docker.APIClient) -> list[ScriptedEpisode]:
    """48 scripted episodes of two tasks."""

    async def run() -> list[ScriptedEpisode]:
        async with open_pool(SandboxConfig(), run="test-tiny") as pool:
            return await run_scripts(pool, [tasks[FIRST], tasks["mistune__3.1.1"]], 48, 0.5, 3)

    return asyncio.run(run())


@pytest.fixture(scope="module")
def folder(episodes: list[ScriptedEpisode], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy after a very short warm start."""
    out = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny(episodes, out, Recipe(vocab_size=1_024, layers=2, hidden=64, experts=8, top_k=2, warm_start_steps=12))
    return out


# --- scripts ---


@pytest.mark.docker
@pytest.mark.parametrize("task_id", SCRIPTS)
async def test_right_edits_pass_the_hidden_tests_and_wrong_ones_fail(
    pool: SandboxPool, tasks: Mapping[str, Task], task_id: str
) -> None:
    script, task = SCRIPTS[task_id], tasks[task_id]
    grader = Grader(pool, GradingConfig(timeout_s=60, concurrency=3))

    async def reward(edit: Edit) -> float:
        sandbox = await pool.acquire(task)
        source = (await sandbox.get(script.path)).decode()
        assert source.count(edit.old) == 1
        await sandbox.put(script.path, source.replace(edit.old, edit.new).encode())
        patch = await sandbox.diff()
        await sandbox.close()
        return (await grader.grade(task, patch)).reward

    rewards = await asyncio.gather(*(reward(edit) for edit in (*script.right, *script.wrong)))
    assert rewards == [1.0] * len(script.right) + [0.0] * len(script.wrong)


def test_every_task_gets_its_share_of_right_episodes() -> None:
    chosen = mixture(["a", "b", "c"], 300, 0.3, seed=5)
    for task in "abc":
        rights = [right for name, right, _ in chosen if name == task]
        assert len(rights) == 100 and sum(rights) == 30
    assert [pair[:2] for pair in chosen] == [pair[:2] for pair in mixture(["a", "b", "c"], 300, 0.3, seed=5)]


def test_written_turns_are_calls_that_end_with_finish() -> None:
    script = SCRIPTS[FIRST]
    source = "\n" * 20 + "\t\treturn include\n" + "\n" * 20
    lengths = set()
    for seed in range(200):
        turns = write_turns(script, source, seed % 2 == 0, random.Random(seed))
        calls = [parse(turn, AGENT.call_format) for turn in turns]
        assert calls[-1] == [ToolCall("finish", {"command": "submit"})]
        edits = [call for call in calls if isinstance(call, list) and call[0].arguments.get("command") == "str_replace"]
        assert edits or seed % 2 == 1  # a right agent edits
        lengths.add(len(turns))
    assert lengths >= {1, 3, 4, 5}


@pytest.mark.docker
async def test_scripted_episodes_are_what_the_tools_answer_in_a_clean_repository(
    episodes: list[ScriptedEpisode], tasks: Mapping[str, Task]
) -> None:
    finished = [episode for episode in episodes if len(episode.turns) > 1]
    assert finished
    for episode in finished:
        for text, observations in episode.turns[:-1]:
            assert len(observations) == 1
            if "git diff --stat" in text:  # one file, whatever was edited before: the repository was reset
                assert "1 file changed" in observations[0]
        assert episode.turns[-1][1] == ()
    edited = {
        observation
        for episode in episodes
        for text, observations in episode.turns
        if "str_replace" in text
        for observation in observations
    }
    assert any(text.startswith("Edited /testbed/pathspec/pathspec.py.") for text in edited)


# --- tokenizer and encoding ---


def test_encoded_episodes_are_the_template_with_the_agents_turns_in_the_loss(
    folder: Path, episodes: list[ScriptedEpisode]
) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(folder)
    renderer = ChatRenderer.from_folder(read_model(folder))
    for episode in episodes:
        system, user = episode.messages
        assert "{" not in system + user.replace("{bytes_}", "")
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        for text, observations in episode.turns:
            messages.append({"role": "assistant", "content": text})
            messages += [{"role": "tool", "content": observation} for observation in observations]
        tokens, mask = episode.encode(renderer)
        template = reference.apply_chat_template(messages, tokenize=True, return_dict=False)
        assert list(tokens) == template[: len(tokens)]
        assert reference.decode(template[len(tokens) :]) == "\n"
        sampled = "".join(f"{text}<|im_end|>" for text, _ in episode.turns)
        assert reference.decode(tokens[mask]) == sampled


def test_the_tokenizer_takes_any_text_and_keeps_control_tokens_at_the_end(folder: Path) -> None:
    renderer = ChatRenderer.from_folder(read_model(folder))
    text = "naïve \U0001f600\x00 </parameter><|im_end|> <tool_call>\t数字"
    ids = renderer.observation([text])
    assert text in renderer.decode(ids)
    assert np.count_nonzero(ids == renderer.stop_id) == 1
    assert len(renderer.encode_turn("<parameter=path>")) == 2  # a tag is one token, then the stop token


# --- warm start ---


@pytest.mark.megatron
def test_the_warm_start_learns_and_is_reproducible_and_its_head_is_sharpened(
    folder: Path, episodes: list[ScriptedEpisode], tmp_path: Path
) -> None:
    from safetensors.numpy import load_file

    from agent_r3.tiny.warm_start import WarmStart, load_episodes, warm_start

    renderer = ChatRenderer.from_folder(read_model(folder))
    save_episodes([episode.encode(renderer) for episode in episodes], tmp_path / "episodes.npz")
    data = load_episodes(tmp_path / "episodes.npz")
    assert [len(one.tokens) for one in data] == [len(one.encode(renderer)[0]) for one in episodes]

    def train(name: str, recipe: WarmStart) -> tuple[Sequence[float], dict[str, np.ndarray]]:
        out = tmp_path / name
        out.mkdir()
        for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            (out / file).write_bytes((folder / file).read_bytes())
        losses = warm_start(data, out, recipe)
        return losses, load_file(out / "model.safetensors")

    losses, plain = train("plain", WarmStart(steps=30, batch=4, head_scale=1.0))
    assert losses[0] > 6 and losses[-1] < 0.8 * losses[0]
    again, sharp = train("sharp", WarmStart(steps=30, batch=4, head_scale=1.4))
    assert again == losses
    for name, weight in plain.items():
        factor = np.float32(1.4 if name == "lm_head.weight" else 1.0)
        np.testing.assert_array_equal(sharp[name], weight * factor)


@pytest.mark.megatron
def test_a_failed_warm_start_leaves_no_folder(episodes: list[ScriptedEpisode], tmp_path: Path) -> None:
    with pytest.raises(WarmStartError, match="ended with exit code 1"):
        make_tiny(episodes, tmp_path / "model", Recipe(vocab_size=1_024, experts=2, top_k=4))
    assert list(tmp_path.iterdir()) == []


# --- finding it ---


async def test_the_policy_is_made_once_and_found_by_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_R3_CACHE", str(tmp_path))
    with pytest.raises(DataError, match="run `agent-r3 model tiny` first"):
        model_folder("tiny")
    with pytest.raises(DataError, match="agent-r3 tasks build"):
        await ensure_tiny()
    tiny_folder().mkdir(parents=True)
    assert await ensure_tiny() == (False, tiny_folder())
    assert model_folder("tiny") == tiny_folder()
    assert model_folder("elsewhere") == Path("elsewhere")
    assert tiny_folder(Recipe(seed=2)) != tiny_folder()


def test_the_policy_is_made_anew_for_changes_to_its_own_tasks_only() -> None:
    tasks = read_spec(offline_spec_path("offline"))
    used = tasks_used(tasks)
    assert {task_id for task_id, *_ in used} == set(SCRIPTS)
    assert tasks_used([task for task in reversed(tasks) if task.task_id in SCRIPTS]) == used
    for task in tasks:
        others = [other for other in tasks if other is not task]
        changed = tasks_used([*others, task.model_copy(update={"problem_statement": "Another issue."})])
        assert (changed != used) == (task.task_id in SCRIPTS), task.task_id


def test_the_demo_config_uses_the_prompts_and_tasks_of_the_warm_start() -> None:
    config = load_config(CONFIG)
    for key in ("system_prompt", "instance_prompt", "tools", "call_format", "observation_chars", "observation_lines"):
        assert getattr(config.agent, key) == getattr(AGENT, key), key
    assert set(config.tasks.include) == set(SCRIPTS)
    assert config.model.path == "tiny"
