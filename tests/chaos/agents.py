"""Scripted agents: what they do, what their observations must look like, and the reward that they deserve. Pure.

The first command of each says `agent=NAME`, so that an archived episode tells by itself what it should have come to.
"""

import random
import re
from dataclasses import dataclass

from agent_r3.tools.parsers import render
from agent_r3.types import Task, ToolCall

COMMAND_S = 12  # agent.command_timeout_s of the run: what `slow` runs into, and far above all else here
_NAME = re.compile(r"agent=([a-z]+)")

# What the engine, the OCI runtime or our own errors say: none of it may ever reach an agent.
FOREIGN = re.compile(
    r"OCI runtime|Error response from daemon|No such container|Docker daemon|docker\.sock|is not running|has died"
    r"|no answer within|SandboxError|DaemonError|Connection aborted|exec failed",
)


@dataclass(frozen=True, slots=True)
class Step:
    """One turn: what the agent writes, and a pattern that its whole observation matches (None: nothing to match)."""

    text: str
    observation: str | None


@dataclass(frozen=True, slots=True)
class Agent:
    steps: tuple[Step, ...]
    reward: float


def _run(command: str, *output: str, code: int = 0) -> Step:
    """A command whose output is exactly these patterns, a line each."""
    body = "\n".join(output) if output else ""
    head = rf"Exit code {code}\."
    answer = rf"{head}\n{body}" if body else rf"{head} No output\."
    return Step(render(ToolCall("execute_bash", {"cmd": command}), "r2e_xml"), answer)


_SUBMIT = Step(render(ToolCall("finish", {"command": "submit", "result": ""}), "r2e_xml"), None)


def _say(name: str) -> Step:
    return _run(f"echo agent={name}; sleep 0.3", rf"agent={name}")


def _fix(task: Task) -> Step:
    return _run(f"git apply <<'END_OF_PATCH' && git status --short | wc -l\n{task.gold_patch}END_OF_PATCH", r"\d+")


def agents(task: Task) -> dict[str, Agent]:
    """Name -> agent, for one task."""
    fix, pause = _fix(task), _run("sleep 0.7; pwd", re.escape(task.workdir))
    flood = Step(
        render(ToolCall("execute_bash", {"cmd": "head -c 40000000 /dev/zero | tr '\\0' x; echo; echo end"}), "r2e_xml"),
        r"(?s)Exit code 0\. It wrote 40000005 bytes; the middle was dropped\.\n.*x\nend",
    )
    leave_running = _run("(setsid sleep 300 &) ; (trap '' TERM; sleep 300) >/dev/null 2>&1 & disown; echo left", "left")
    forks = _run("for i in $(seq 25); do (setsid sleep 200 &); done; sleep 0.2; ls -d /proc/[0-9]* | wc -l", r"\d+")
    slow = Step(
        render(ToolCall("execute_bash", {"cmd": "trap '' TERM; echo begun; sleep 300"}), "r2e_xml"),
        rf"Exit code 124\. The command did not end within {COMMAND_S} s; .*\nbegun",
    )
    missing = _run("cat /nowhere", r"cat: /nowhere: No such file or directory", code=1)
    damage = _run("git ls-files '*.py' | grep -v test | head -40 | xargs -n 40 truncate -s 0; echo cut", "cut")
    die = _run("kill -9 $$", code=137)
    scripts: dict[str, tuple[tuple[Step, ...], float]] = {
        "nothing": ((pause,), 0.0),
        "fixes": ((pause, fix), 1.0),
        "looks": ((missing, pause, fix, pause), 1.0),
        "floods": ((flood, fix), 1.0),
        "leaves": ((leave_running, fix, pause), 1.0),
        "forks": ((forks, pause), 0.0),
        "waits": ((slow, fix), 1.0),
        "damages": ((damage, pause), 0.0),
        "dies": ((die, pause, die), 0.0),
    }
    return {name: Agent((_say(name), *steps, _SUBMIT), reward) for name, (steps, reward) in scripts.items()}


def choose(task: Task, chance: random.Random) -> Agent:
    """One of the agents of `task`; `waits`, which takes COMMAND_S, more rarely."""
    known = agents(task)
    weights = [0.4 if name == "waits" else 1.0 for name in known]
    return chance.choices(list(known.values()), weights)[0]


def agent_of(task: Task, first_turn: str) -> Agent:
    """The agent that wrote `first_turn`. Raises ValueError for a text that is none's."""
    found = _NAME.search(first_turn)
    if found is None:
        raise ValueError(f"no agent of this run begins with {first_turn[:200]!r}")
    return agents(task)[found[1]]
