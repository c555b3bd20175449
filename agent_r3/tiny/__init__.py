"""The tiny policy: a Mixture-of-Experts model of a few million parameters that learns in minutes on a CPU.

Made by `agent-r3 model tiny`: scripted agents, right and wrong ones, act in real containers; a tokenizer is trained on
their text and the model on their turns. It solves a part of its tasks, so that reinforcement learning has something to
shift. It knows these tasks by heart: what its curve shows is training reward, not generalisation.
"""

from agent_r3.tiny.build import ensure_tiny, make_tiny, model_folder, tiny_folder
from agent_r3.tiny.scripts import AGENT, SCRIPTS

__all__ = ["AGENT", "SCRIPTS", "ensure_tiny", "make_tiny", "model_folder", "tiny_folder"]
