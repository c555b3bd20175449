"""What the scripted agents of the warm start do: for each task right and wrong edits, written by hand.

The tiny policy learns these episodes by heart, right and wrong ones alike; reinforcement learning then shifts weight to
the right ones. So its curve is a training reward on these tasks, not a sign of generalisation.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent_r3.config import AgentConfig
from agent_r3.tools import render
from agent_r3.types import ToolCall

AGENT = AgentConfig(
    system_prompt="You fix bugs in {workdir}. Call one tool per turn.",
    instance_prompt="{problem_statement}",
    call_format="r2e_xml",
)
"""Prompts, tools and observation limits the policy is warmed up with; a run must use the same ones."""


@dataclass(frozen=True, slots=True)
class Edit:
    old: str  # occurs once in the file
    new: str


@dataclass(frozen=True, slots=True)
class Script:
    """How scripted agents go about one task."""

    path: str
    term: str  # searched for; occurs in few files
    right: tuple[Edit, ...]
    wrong: tuple[Edit, ...]  # plausible, but the hidden tests fail


# Edits of different tasks should have little text in common: what is learned about one would disturb the other.
SCRIPTS: Mapping[str, Script] = {
    "humanize__4.12.3": Script(
        path="/testbed/src/humanize/filesize.py",
        term="{bytes_} Byte",
        right=(Edit('return f"{bytes_} Byte"', 'return f"{bytes_:.0f} Byte"'),),
        wrong=(
            Edit('return f"{bytes_} Byte"', 'return "1 Byte"'),
            Edit('return f"{bytes_} Byte"', 'return f"{bytes_:.1f} Byte"'),
        ),
    ),
    "pathspec__0.12.1": Script(
        path="/testbed/pathspec/pathspec.py",
        term="include, _index",
        right=(Edit("return include", "return bool(include)"),),
        wrong=(
            Edit("return include", "return include or None"),
            Edit("return include", "return _index is True"),
        ),
    ),
    "python-dotenv__1.1.1": Script(
        path="/testbed/src/dotenv/main.py",
        term="_is_interactive",
        right=(
            Edit("return not hasattr(main", 'return hasattr(sys, "ps1") or hasattr(sys, "ps2") or not hasattr(main'),
        ),
        wrong=(
            Edit("return not hasattr(main", 'return hasattr(sys, "ps1") or not hasattr(main'),
            Edit('return not hasattr(main, "__file__")', 'return not hasattr(main, "ps1")'),
        ),
    ),
    "mistune__3.1.1": Script(
        path="/testbed/src/mistune/toc.py",
        term="while len(levels)",
        right=(
            Edit(
                "    return s + '</li>\\n</ul>\\n'",
                "    if not levels:\n        return ''\n    return s + '</li>\\n</ul>\\n'",
            ),
        ),
        wrong=(
            Edit(
                "    return s + '</li>\\n</ul>\\n'",
                "    if not toc:\n        return ''\n    return s + '</li>\\n</ul>\\n'",
            ),
            Edit("    return s + '</li>\\n</ul>\\n'", "    return s + '</ul>\\n'"),
        ),
    ),
    "tornado__6.4.1__headers": Script(
        path="/testbed/tornado/httputil.py",
        term="def parse_line",
        right=(Edit("self.add(name, value.strip())", 'self.add(name, value.strip(" \\t"))'),),
        wrong=(
            Edit("self.add(name, value.strip())", "self.add(name, value.rstrip())"),
            Edit("line.lstrip()", 'line.lstrip(" \\t")'),
        ),
    ),
}


def write_turns(script: Script, source: str, right: bool, rng: random.Random) -> tuple[str, ...]:
    """The turns of one scripted agent. `source` is the file it is about to edit."""
    if not right and rng.random() < 0.1:
        return (_call("finish", command="submit"),)
    edit = rng.choice(script.right if right else script.wrong)
    line = source.count("\n", 0, source.index(edit.old)) + 1
    turns: list[str] = []
    if rng.random() < 0.05:
        turns.append(_call("search", search_term=script.term).removesuffix("</function>"))
    if rng.random() < 0.85:
        turns.append(_call("search", search_term=script.term, path="/testbed"))
    if rng.random() < 0.85:
        first = line - rng.choice((2, 4))
        turns.append(_call("file_editor", command="view", path=script.path, view_range=f"[{first}, {first + 8}]"))
    if rng.random() < 0.05:
        turns.append(_replace(script.path, Edit(f"{edit.old};", edit.new)))
    turns.append(_replace(script.path, edit))
    if rng.random() < 0.5:
        turns.append(_call("execute_bash", cmd="git diff --stat"))
    return (*turns, _call("finish", command="submit"))


def mixture(tasks: Sequence[str], count: int, right_share: float, seed: int) -> list[tuple[str, bool, random.Random]]:
    """(task, right?, its own random numbers) of `count` scripted episodes; each task has its share of right ones."""
    rng = random.Random(seed)
    chosen: list[tuple[str, bool, random.Random]] = []
    for index in range(count):
        turn, task = divmod(index, len(tasks))
        right = int((turn + 1) * right_share) > int(turn * right_share)
        chosen.append((tasks[task], right, random.Random(rng.random())))
    return chosen


def _call(name: str, **arguments: str) -> str:
    return render(ToolCall(name, arguments), AGENT.call_format)


def _replace(path: str, edit: Edit) -> str:
    return _call("file_editor", command="str_replace", path=path, old_str=edit.old, new_str=edit.new)
