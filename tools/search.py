"""`search`: where a text occurs, in one file (lines) or below a folder (files with counts)."""

import shlex
from typing import ClassVar

from pydantic import Field, field_validator

from agent_r3.envs.sandbox import Sandbox
from agent_r3.tools.base import Arguments, ShellText
from agent_r3.tools.limits import cut_lines
from agent_r3.types import Observation

# -s and -I: unreadable and binary files are passed over. `.?*` leaves out hidden folders but not `.` itself.
_SCRIPT = """
if [ -d {path} ]; then
  echo folder
  grep -rsIFc --exclude-dir='.?*' -e {term} -- {path} | grep -v ':0$' | LC_ALL=C sort
  exit 0
elif [ -f {path} ]; then
  echo file
  grep -nF -a -e {term} -- {path}
  exit 0
fi
exit 3
"""


class SearchArguments(Arguments):
    search_term: ShellText = Field(min_length=1)
    """The text to look for: one line, taken literally."""
    path: ShellText = Field(default=".", min_length=1)
    """A file or a folder; the repository's root if left out."""

    @field_validator("search_term")
    @classmethod
    def _single_line(cls, value: str) -> str:
        if "\n" in value:
            raise ValueError("must be one line")
        return value


class Search:
    name: ClassVar[str] = "search"
    description: ClassVar[str] = (
        "Find a text. For a file the answer lists the matching lines with their numbers, "
        "for a folder the files that hold it with the number of matching lines."
    )
    arguments: ClassVar[type[Arguments]] = SearchArguments

    def __init__(self, timeout_s: float, max_lines: int) -> None:
        self._timeout_s = timeout_s
        self._max_lines = max_lines

    async def run(self, arguments: SearchArguments, sandbox: Sandbox) -> Observation:
        term, path = arguments.search_term, arguments.path
        script = _SCRIPT.format(term=shlex.quote(term), path=shlex.quote(path))
        result = await sandbox.exec(script, timeout_s=self._timeout_s)
        if result.timed_out:
            return Observation(f"The search did not end within {self._timeout_s:g} s. Search a smaller folder.")
        kind, _, listing = result.text.partition("\n")
        if result.exit_code != 0 or kind not in ("folder", "file"):
            return Observation(f"There is no file or folder at {path}.")
        found = listing.rstrip("\n").split("\n") if listing.strip() else []
        if not found:
            return Observation(f"{term!r} does not occur in {path}.")
        if kind == "folder":
            found = [f"{name} ({count})" for name, _, count in (line.rpartition(":") for line in found)]
            head = f"{term!r} occurs in {_count(len(found), 'file')} below {path} (matching lines):"
        else:
            head = f"{term!r} occurs on {_count(len(found), 'line')} of {path}:"
        return Observation(head + "\n" + cut_lines("\n".join(found), self._max_lines))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
