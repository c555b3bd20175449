"""A task's test command, taken apart: `[VAR=value ...] [xvfb-run options] PYTHON [options] -m pytest arguments`.

Grading runs the same interpreter with the same options and variables, but our launcher in place of `-m pytest`, so it
must know the parts. Pure.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from agent_r3.envs.pytest_launcher import PYTHONPATH_KEPT

_QUOTED = re.compile(r"'[^']*'|\"[^\"$`]*\"|\\[^\n]")
_SHELL_SYNTAX = re.compile(r"[$`*?~;&|<>(){}#\n]")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_PYTHON = re.compile(r"(.*/)?(python|pypy)[0-9.]*")
_PYTHON_FLAGS = re.compile(r"-[bBdEIOPqRsSuvx]+")
_PYTHON_OPTIONS = ("-W", "-X")  # followed by a value, or with it attached
_XVFB_OPTIONS = frozenset("efnpsw")
_XVFB_LONG_OPTIONS = frozenset(
    {"--error-file", "--auth-file", "--server-num", "--xauth-protocol", "--server-args", "--wait"}
)


class UnknownCommandError(ValueError):
    """The command is not of the form that grading knows; the message says at which word."""


@dataclass(frozen=True, slots=True)
class PytestCommand:
    """The parts of a test command, unquoted."""

    variables: tuple[tuple[str, str], ...]
    wrapper: tuple[str, ...]  # xvfb-run and its options
    interpreter: tuple[str, ...]  # with its options
    arguments: tuple[str, ...]  # pytest's

    def launch(self, launcher: str) -> str:
        """The bash command that runs `launcher` in pytest's place. PYTHONPATH is kept aside for it."""
        lines = [f"export {name}={shlex.quote(value)}" for name, value in self.variables]
        lines += [
            f'[ -z "${{PYTHONPATH+set}}" ] || export {PYTHONPATH_KEPT}="$PYTHONPATH"',
            "unset PYTHONPATH",
            f"exec {shlex.join([*self.wrapper, *self.interpreter, launcher])}",
        ]
        return "\n".join(lines)


def parse_command(command: str) -> PytestCommand:
    """Raises UnknownCommandError."""
    if found := _SHELL_SYNTAX.search(_QUOTED.sub("", command)):
        raise UnknownCommandError(f"it has the shell's {found[0]!r}")
    try:
        words = shlex.split(command)
    except ValueError as exc:
        raise UnknownCommandError(f"its quotes do not match ({exc})") from exc
    variables = []
    while words and (found := _ASSIGNMENT.fullmatch(words[0])):
        variables.append((found[1], found[2]))
        words.pop(0)
    wrapper = list(_xvfb_run(words))
    interpreter = list(_interpreter(words))
    return PytestCommand(tuple(variables), tuple(wrapper), tuple(interpreter), tuple(words))


def _xvfb_run(words: list[str]) -> Iterator[str]:
    if not words or words[0].rpartition("/")[2] != "xvfb-run":
        return
    yield words.pop(0)
    while words and words[0].startswith("-"):
        word = words.pop(0)
        yield word
        takes_value = word in _XVFB_LONG_OPTIONS or (not word.startswith("--") and word[-1] in _XVFB_OPTIONS)
        if takes_value and words:
            yield words.pop(0)


def _interpreter(words: list[str]) -> Iterator[str]:
    """The words up to `-m pytest`, which are taken off."""
    if not words or not _PYTHON.fullmatch(words[0]):
        raise UnknownCommandError(f"a Python is expected where {' '.join(words[:1]) or 'it ends'!r} stands")
    yield words.pop(0)
    while words[:2] != ["-m", "pytest"]:
        word = words.pop(0) if words else ""
        if word in _PYTHON_OPTIONS and words:
            yield from (word, words.pop(0))
        elif (word[:2] in _PYTHON_OPTIONS and len(word) > 2) or _PYTHON_FLAGS.fullmatch(word):
            yield word
        else:
            raise UnknownCommandError(f"`-m pytest` is expected where {word or 'it ends'!r} stands")
    del words[:2]
