"""A unified diff the other way round: what undoes it, for `git apply`."""

import re
from collections.abc import Iterator

_HUNK = re.compile(r"@@ -(\d+(?:,(\d+))?) \+(\d+(?:,(\d+))?) @@(.*)")
_FILE = re.compile(r"(---|\+\+\+) (?:[ab]/(.*?)|/dev/null)(?:\t.*)?")
_SWAPPED_LINE = {"+": "-", "-": "+"}
_SWAPPED_HEADER = {
    "new file mode ": "deleted file mode ",
    "deleted file mode ": "new file mode ",
    "old mode ": "new mode ",
    "new mode ": "old mode ",
}


class UnreversibleError(ValueError):
    """Not a diff of text files in git's form; the message says at which line."""


def reversed_patch(patch: str) -> str:
    """Raises UnreversibleError for binary files, renames, copies and whatever is no diff."""
    lines = patch.split("\n")
    out: list[str] = []
    at = 0
    while at < len(lines):
        line = lines[at]
        if hunk := _HUNK.fullmatch(line):
            out.append(f"@@ -{hunk[3]} +{hunk[1]} @@{hunk[5]}")
            body = list(_body(lines, at + 1, old=int(hunk[2] or 1), new=int(hunk[4] or 1)))
            out += body
            at += 1 + len(body)
        elif line.startswith("--- ") and at + 1 < len(lines):
            out += _file_names(line, lines[at + 1])
            at += 2
        else:
            out.append(_header(line))
            at += 1
    if not any(line.startswith("@@ ") for line in out):
        raise UnreversibleError("it has no hunk")
    return "\n".join(_modes_in_order(out))


def _body(lines: list[str], at: int, *, old: int, new: int) -> Iterator[str]:
    """A hunk's lines, swapped, until both sides are as long as its head says."""
    while old > 0 or new > 0 or lines[at].startswith("\\"):
        if at == len(lines) - 1:
            raise UnreversibleError("its last hunk is cut off")
        mark, rest = lines[at][:1] or " ", lines[at][1:]  # an empty line is a context line that lost its space
        if mark not in (" ", "+", "-", "\\"):
            raise UnreversibleError(f"line {at + 1} does not belong to its hunk")
        old -= mark in (" ", "-")
        new -= mark in (" ", "+")
        yield _SWAPPED_LINE.get(mark, mark) + rest
        at += 1


def _file_names(minus: str, plus: str) -> tuple[str, str]:
    old, new = _FILE.fullmatch(minus), _FILE.fullmatch(plus)
    if not old or not new or new[1] != "+++":
        raise UnreversibleError(f"no file names in {minus[:60]!r} and {plus[:60]!r}")
    return (f"--- a/{new[2]}" if new[2] else "--- /dev/null"), (f"+++ b/{old[2]}" if old[2] else "+++ /dev/null")


def _header(line: str) -> str:
    for start, swapped in _SWAPPED_HEADER.items():
        if line.startswith(start):
            return swapped + line.removeprefix(start)
    if line.startswith("index "):
        return re.sub(r"^index (\w+)\.\.(\w+)", r"index \2..\1", line)
    if line.startswith("diff --git ") or not line.strip():
        return line
    raise UnreversibleError(f"{line[:60]!r}")


def _modes_in_order(lines: list[str]) -> Iterator[str]:
    """`old mode` stands before `new mode`; swapping turned them round."""
    held = None
    for line in lines:
        if line.startswith("new mode ") and held is None:
            held = line
        else:
            yield line
            if held is not None:
                yield held
                held = None
