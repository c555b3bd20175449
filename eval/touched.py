"""Which files of tests, or of their configuration, a patch changes: read from its headers, nothing is run. Pure."""

import re
from collections.abc import Collection, Iterator

from agent_r3.envs.patches import protected

_HUNK = re.compile(rb"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_ESCAPE = re.compile(rb"\\([0-7]{3}|.)", re.DOTALL)
_ESCAPED = {b"a": b"\a", b"b": b"\b", b"t": b"\t", b"n": b"\n", b"v": b"\v", b"f": b"\f", b"r": b"\r"}


def tests_touched(patch: bytes, also: Collection[str] = ()) -> tuple[str, ...]:
    """The files that a patch changes, makes, deletes or moves and that no patch may change, and those of `also`.

    Sorted; bytes that are not UTF-8 are shown as replacement characters.
    """
    names = {name.decode(errors="surrogateescape") for name in _names(patch)}
    touched = sorted(name for name in names if protected(name) or name in also)
    return tuple(name.encode(errors="surrogateescape").decode(errors="replace") for name in touched)


def _names(patch: bytes) -> Iterator[bytes]:
    """Every file's old and new name, relative to the repository. Sources of copies are not changed."""
    old = new = 0  # lines that are still to come of a hunk
    for line in patch.split(b"\n"):
        if old > 0 or new > 0:
            mark = line[:1]
            old -= mark not in (b"+", b"\\")
            new -= mark not in (b"-", b"\\")
        elif hunk := _HUNK.match(line):
            old, new = int(hunk[1] or 1), int(hunk[2] or 1)
        else:
            yield from _of_header(line.rstrip(b"\r"))


def _of_header(line: bytes) -> Iterator[bytes]:
    for start in (b"--- ", b"+++ "):
        if line.startswith(start):
            name = _unquoted(line.removeprefix(start).partition(b"\t")[0])
            if name != b"/dev/null":
                yield _below_prefix(name)
    for start in (b"rename from ", b"rename to ", b"copy to "):
        if line.startswith(start):
            yield _unquoted(line.removeprefix(start))
    if line.startswith(b"diff --git "):  # all there is of a changed mode, a binary or an empty file
        yield from _of_git(line.removeprefix(b"diff --git "))


def _of_git(names: bytes) -> Iterator[bytes]:
    """The name in `a/NAME b/NAME`, which may hold spaces; nothing where they differ, as those of a rename do."""
    for at, byte in enumerate(names):
        if byte == ord(" "):
            old, new = (_below_prefix(_unquoted(name)) for name in (names[:at], names[at + 1 :]))
            if old == new:
                yield old
                return


def _below_prefix(name: bytes) -> bytes:
    """As `git apply` does it: the first folder is `a` or `b`, or stands for them."""
    first, slash, rest = name.partition(b"/")
    return rest if slash else first


def _unquoted(name: bytes) -> bytes:
    """git quotes names as C does: `"caf\\303\\251.py"`."""
    if len(name) < 2 or not (name.startswith(b'"') and name.endswith(b'"')):
        return name
    return _ESCAPE.sub(_unescaped, name[1:-1])


def _unescaped(found: re.Match[bytes]) -> bytes:
    escape = found[1]
    return bytes([int(escape, 8) & 0xFF]) if len(escape) == 3 else _ESCAPED.get(escape, escape)
