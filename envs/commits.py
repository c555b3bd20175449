"""R2E-Gym's ParsedCommit: a commit as JSON, read back into a unified diff and made from two texts.

Shape (R2E-Gym `commit_models/diff_classes.py`): `{file_diffs: [{old_file_content, new_file_content,
header{file{path}, misc_line}, index_line, is_binary_file, binary_line, minus_file, plus_file, hunks: [{descriptor{
old_range{start, length|null}, new_range, section}, line_group{all_lines: [{content, type}]}}]}]}`.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any

_MARKS = {"context": " ", "added": "+", "deleted": "-"}
_NO_NEWLINE = "No newline at end of file"
_CREATES_OR_DELETES = ("new file mode ", "deleted file mode ")


class UnpatchableError(Exception):
    """The commit cannot be written as a text diff (a binary file, a rename, lines that do not add up)."""


def is_test_file(path: str) -> bool:
    """R2E-Gym's rule for test files (`FileDiff.is_test_file`)."""
    parts = PurePosixPath(path).parts
    return (
        path.endswith("_test.py")
        or parts[-1].startswith("test_")
        or not {"tests", "Tests", "test", "Test"}.isdisjoint(parts)
    )


def patch_of(file_diffs: Iterable[Mapping[str, Any]]) -> str:
    """The unified diff of the files that are not tests; `git apply` takes it.

    Raises UnpatchableError where no text diff can say it; KeyError, TypeError or ValueError for a wrong shape.
    """
    return "".join(_file_patch(diff) for diff in file_diffs if not is_test_file(diff["header"]["file"]["path"]))


def file_diff(path: str, old: str | None, new: str | None) -> dict[str, Any]:
    """The FileDiff of one file between two texts; None means that the file is not there."""
    before, after = _lines(old or ""), _lines(new or "")
    misc = "new file mode 100644" if old is None else "deleted file mode 100644" if new is None else None
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    return {
        "old_file_content": old or "",
        "new_file_content": new or "",
        "header": {"file": {"path": path}, "misc_line": misc},
        "index_line": None,
        "is_binary_file": False,
        "binary_line": None,
        "minus_file": {"path": "/dev/null" if old is None else f"a/{path}"},
        "plus_file": {"path": "/dev/null" if new is None else f"b/{path}"},
        "hunks": [_hunk(before, after, group) for group in matcher.get_grouped_opcodes(3)],
    }


def _file_patch(diff: Mapping[str, Any]) -> str:
    path = diff["header"]["file"]["path"]
    misc = diff["header"].get("misc_line") or ""
    if diff.get("is_binary_file"):
        raise UnpatchableError(f"{path} is a binary file")
    if misc.startswith(("similarity ", "rename ", "copy ")):
        raise UnpatchableError(f"{path} is renamed or copied")
    lines = [f"diff --git a/{path} b/{path}"]
    if misc.startswith(_CREATES_OR_DELETES):
        lines.append(misc)
    if diff["hunks"]:
        lines.append("--- /dev/null" if _absent(diff["minus_file"]) else f"--- a/{path}")
        lines.append("+++ /dev/null" if _absent(diff["plus_file"]) else f"+++ b/{path}")
    elif not misc.startswith(_CREATES_OR_DELETES):
        return ""  # only a mode changed, which one `misc_line` cannot say
    for hunk in diff["hunks"]:
        lines += _hunk_lines(path, hunk)
    return "\n".join(lines) + "\n"


def _absent(file: Mapping[str, Any] | None) -> bool:
    return file is not None and file["path"] == "/dev/null"


def _hunk_lines(path: str, hunk: Mapping[str, Any]) -> list[str]:
    descriptor, lines = hunk["descriptor"], hunk["line_group"]["all_lines"]
    for side, kinds in (("old_range", ("context", "deleted")), ("new_range", ("context", "added"))):
        length = descriptor[side]["length"]
        counted = sum(line["type"] in kinds for line in lines)
        if counted != (1 if length is None else length):
            raise UnpatchableError(f"{path}: a hunk says {length} lines in its {side} and has {counted}")
    section = f" {descriptor['section']}" if descriptor.get("section") else ""
    out = [f"@@ -{_range(descriptor['old_range'])} +{_range(descriptor['new_range'])} @@{section}"]
    for line in lines:
        if line["type"] == "note":
            out.append("\\ " + line["content"].lstrip("\\ "))
        else:
            out.append(_MARKS[line["type"]] + line["content"])
    return out


def _range(value: Mapping[str, Any]) -> str:
    # A null length is git's way to say 1; writing ",None" makes a corrupt patch.
    return f"{value['start']}" if value["length"] is None else f"{value['start']},{value['length']}"


def _lines(text: str) -> list[str]:
    # Only \n ends a line for git; str.splitlines would also cut at \r, \f and Unicode separators.
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def _hunk(before: list[str], after: list[str], group: list[tuple[str, int, int, int, int]]) -> dict[str, Any]:
    lines: list[dict[str, str]] = []

    def add(kind: str, texts: list[str]) -> None:
        for text in texts:
            lines.append({"content": text.removesuffix("\n"), "type": kind})
            if not text.endswith("\n"):
                lines.append({"content": _NO_NEWLINE, "type": "note"})

    for tag, a1, a2, b1, b2 in group:
        if tag == "equal":
            add("context", before[a1:a2])
        else:
            add("deleted", before[a1:a2])
            add("added", after[b1:b2])
    old = _as_range(group[0][1], group[-1][2])
    new = _as_range(group[0][3], group[-1][4])
    return {"descriptor": {"old_range": old, "new_range": new, "section": ""}, "line_group": {"all_lines": lines}}


def _as_range(start: int, stop: int) -> dict[str, int | None]:
    length = stop - start
    return {"start": start + 1 if length else start, "length": None if length == 1 else length}
