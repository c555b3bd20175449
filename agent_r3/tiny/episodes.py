"""Scripted episodes, run by the real tools in real containers and rendered by the real renderer.

So prompts and observations are, id for id, what the policy sees in reinforcement learning.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from agent_r3.envs.sandbox import Sandbox, SandboxProvider
from agent_r3.errors import SandboxError
from agent_r3.rollout.conversation import opening
from agent_r3.rollout.tokens import ChatRenderer
from agent_r3.tiny.scripts import AGENT, SCRIPTS, mixture, write_turns
from agent_r3.tools import Toolbox
from agent_r3.types import BoolArray, Int32Array, Task

_RESET = "git checkout -q . && git clean -fdq"


@dataclass(frozen=True, slots=True)
class ScriptedEpisode:
    """One conversation: (turn, observations) in order; the last turn's observations are empty."""

    task: Task
    right: bool
    turns: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def messages(self) -> tuple[str, str]:
        """System and user message."""
        return opening(AGENT, self.task, Toolbox(AGENT).documentation)

    @property
    def texts(self) -> list[str]:
        """All text of the conversation, for the tokenizer's training."""
        parts = [*self.messages, "system\n", "user\n", "assistant\n"]
        for text, observations in self.turns:
            parts += [text, *(f"\n{observation}\n" for observation in observations)]
        return parts

    def encode(self, renderer: ChatRenderer) -> tuple[Int32Array, BoolArray]:
        """Tokens [T] and loss mask [T], True on the agent's turns."""
        spans = [(renderer.initial(*self.messages), False)]
        for text, observations in self.turns:
            spans.append((renderer.encode_turn(text), True))
            if observations:
                spans.append((renderer.observation(observations), False))
        tokens = np.concatenate([ids for ids, _ in spans])
        return tokens, np.concatenate([np.full(len(ids), sampled) for ids, sampled in spans])


def save_episodes(episodes: Sequence[tuple[Int32Array, BoolArray]], path: Path) -> None:
    """Tokens and loss masks, each concatenated, with the episodes' lengths."""
    np.savez(
        path,
        tokens=np.concatenate([tokens for tokens, _ in episodes]),
        masks=np.concatenate([mask for _, mask in episodes]),
        lengths=np.array([len(tokens) for tokens, _ in episodes]),
    )


async def run_scripts(
    provider: SandboxProvider, tasks: Sequence[Task], count: int, right_share: float, seed: int
) -> list[ScriptedEpisode]:
    """Run `count` scripted agents, a container for each task. Equal agents of a task are run once.

    Raises SandboxError for a container that fails.
    """
    by_id = {task.id: task for task in tasks}
    plans: dict[str, list[tuple[int, bool, random.Random]]] = defaultdict(list)
    for index, (task_id, right, rng) in enumerate(mixture(list(by_id), count, right_share, seed)):
        plans[task_id].append((index, right, rng))
    await provider.prefetch(list(tasks))
    done = await asyncio.gather(*(_run_task(provider, by_id[task_id], plan) for task_id, plan in plans.items()))
    return [episode for _, episode in sorted((pair for pairs in done for pair in pairs), key=lambda pair: pair[0])]


async def _run_task(
    provider: SandboxProvider, task: Task, plan: Sequence[tuple[int, bool, random.Random]]
) -> list[tuple[int, ScriptedEpisode]]:
    script, toolbox = SCRIPTS[task.id], Toolbox(AGENT)
    sandbox = await provider.acquire(task)
    try:
        source = (await sandbox.get(script.path)).decode()
        seen: dict[tuple[str, ...], ScriptedEpisode] = {}
        episodes: list[tuple[int, ScriptedEpisode]] = []
        for index, right, rng in plan:
            turns = write_turns(script, source, right, rng)
            if turns not in seen:
                seen[turns] = ScriptedEpisode(task, right, await _run_one(toolbox, turns, sandbox))
            episodes.append((index, seen[turns]))
        return episodes
    finally:
        await sandbox.close()


async def _run_one(toolbox: Toolbox, turns: Sequence[str], sandbox: Sandbox) -> tuple[tuple[str, tuple[str, ...]], ...]:
    reset = await sandbox.exec(_RESET, timeout_s=AGENT.command_timeout_s)
    if reset.exit_code != 0:
        raise SandboxError(f"container {sandbox.id}: cannot reset the repository: {reset.text.strip()}")
    conversation: list[tuple[str, tuple[str, ...]]] = []
    for text in turns:
        _, observations = await toolbox.step(text, sandbox)
        finished = any(observation.finished for observation in observations)
        conversation.append((text, () if finished else tuple(observation.text for observation in observations)))
    return tuple(conversation)
