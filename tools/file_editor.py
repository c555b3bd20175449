"""`file_editor`: view, create, replace, insert, undo. Files are edited as bytes, so encodings and line ends survive."""

import hashlib
import posixpath
import re
import shlex
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from agent_r3.envs.sandbox import FileMissingError, Sandbox
from agent_r3.tools.base import Arguments, BlankIsAbsent, ShellText
from agent_r3.tools.limits import cut_lines
from agent_r3.tools.outline import outline
from agent_r3.types import Observation

_CONTEXT_LINES = 3
_LISTING = """
[ -d {path} ] || exit 3
find -H {path} -mindepth 1 -maxdepth 2 -name '.?*' -prune -o -type d -printf '%P/\\n' -o -printf '%P\\n' | LC_ALL=C sort
"""

_UNDO_FOLDER = "/tmp/.file_editor"
# Earlier states of a file are numbered copies; an empty `N.none` says that there was no file. Prints the file's mode.
_SAVE = """
set -e
mkdir -p {folder}
n=$(ls {folder} | wc -l)
if [ -e {path} ]; then
  cp -pL {path} {folder}/$(printf %06d $n)
  stat -L -c %a {path}
else
  touch {folder}/$(printf %06d $n).none
  echo 644
fi
"""
_UNDO = """
last=$(ls {folder} 2>/dev/null | tail -n 1)
[ -n "$last" ] || exit 3
case $last in
  *.none) rm -f {path} ;;
  *) cp -p {folder}/$last {path} ;;
esac && rm {folder}/$last
"""


def _absolute(path: str) -> str:
    if not path.startswith("/"):
        raise ValueError("must be absolute and start with /")
    return posixpath.normpath(path)


def _numbers(value: object) -> object:
    # XML-like call formats carry everything as text: "[10, 20]".
    if isinstance(value, str) and value.strip().startswith("["):
        return [part.strip() for part in value.strip().removeprefix("[").removesuffix("]").split(",")]
    return value


class FileEditorArguments(Arguments):
    command: Literal["view", "create", "str_replace", "insert", "undo_edit"]
    """What to do."""
    path: Annotated[ShellText, AfterValidator(_absolute)]
    """Absolute path of the file; `view` also lists a folder."""
    file_text: str | None = None
    """`create`: the content of the new file."""
    old_str: str | None = None
    """`str_replace`: the text to replace, exactly as in the file; it must occur once."""
    new_str: str | None = None
    """`str_replace`: the replacement (empty if left out); `insert`: the text to put in."""
    insert_line: Annotated[int | None, BlankIsAbsent] = Field(default=None, ge=0)
    """`insert`: the line after which the text goes; 0 puts it at the top."""
    view_range: Annotated[tuple[int, int] | None, BeforeValidator(_numbers), BlankIsAbsent] = None
    """`view`: first and last line, counted from 1; -1 as the last line means the end."""
    concise: Annotated[bool | None, BlankIsAbsent] = None
    """`view` of a Python file: only imports, classes and the heads of functions."""

    @model_validator(mode="after")
    def _complete(self) -> "FileEditorArguments":
        if self.command == "create" and self.file_text is None:
            raise ValueError("`create` needs `file_text`")
        if self.command == "str_replace":
            if not self.old_str:
                raise ValueError("`str_replace` needs `old_str`")
            if self.old_str == (self.new_str or ""):
                raise ValueError("`old_str` and `new_str` are the same")
        if self.command == "insert" and (self.insert_line is None or self.new_str is None):
            raise ValueError("`insert` needs `insert_line` and `new_str`")
        if self.view_range is not None:
            first, last = self.view_range
            if first < 1 or (last != -1 and last < first):
                raise ValueError(f"`view_range` [{first}, {last}] is not a range of lines")
        return self


class FileEditor:
    """Keeps nothing on this side: what `undo_edit` needs lies in the container and ends with it."""

    name: ClassVar[str] = "file_editor"
    description: ClassVar[str] = "View, create and edit files, and take edits back one by one."
    arguments: ClassVar[type[Arguments]] = FileEditorArguments

    def __init__(self, timeout_s: float, max_lines: int) -> None:
        self._timeout_s = timeout_s
        self._max_lines = max_lines

    async def run(self, arguments: FileEditorArguments, sandbox: Sandbox) -> Observation:
        try:
            match arguments.command:
                case "view":
                    text = await self._view(arguments, sandbox)
                case "create":
                    text = await self._create(arguments, sandbox)
                case "str_replace":
                    text = await self._replace(arguments, sandbox)
                case "insert":
                    text = await self._insert(arguments, sandbox)
                case "undo_edit":
                    text = await self._undo(arguments.path, sandbox)
        except FileMissingError:
            text = f"There is no file {arguments.path}."
        except OSError as exc:
            text = f"{arguments.path}: {exc.strerror or exc}."
        return Observation(text)

    async def _view(self, arguments: FileEditorArguments, sandbox: Sandbox) -> str:
        path = arguments.path
        try:
            data = await sandbox.get(path)
        except FileMissingError:
            return await self._list(path, sandbox)
        if b"\0" in data:
            return f"{path} is a binary file of {len(data)} bytes."
        text = data.decode("utf-8", errors="replace")
        lines = _lines(text)
        if arguments.concise and arguments.view_range is None and path.endswith(".py"):
            heads = outline(text)
            if heads is not None:
                return f"{path}, outline of {len(lines)} lines:\n{_numbered(lines, heads)}"
        first, last = arguments.view_range or (1, -1)
        if first > max(len(lines), 1):
            return f"{path} has {len(lines)} lines; line {first} is past its end."
        last = len(lines) if last == -1 else min(last, len(lines))
        if not lines:
            return f"{path} is empty."
        return f"{path}, lines {first}-{last} of {len(lines)}:\n{_numbered(lines, range(first, last + 1))}"

    async def _list(self, path: str, sandbox: Sandbox) -> str:
        result = await sandbox.exec(_LISTING.format(path=shlex.quote(path)), timeout_s=self._timeout_s)
        if result.timed_out:
            return f"Listing {path} did not end within {self._timeout_s:g} s."
        if result.exit_code != 0:
            return f"There is no file or folder {path}."
        return f"Folder {path}, two levels, without hidden files:\n{cut_lines(result.text, self._max_lines).rstrip()}"

    async def _create(self, arguments: FileEditorArguments, sandbox: Sandbox) -> str:
        path = arguments.path
        assert arguments.file_text is not None  # checked by FileEditorArguments
        test = await sandbox.exec(f"[ -e {shlex.quote(path)} ]", timeout_s=self._timeout_s)
        if test.exit_code == 0:
            return f"{path} is there already; `create` does not overwrite. Use `str_replace`."
        problem = await self._write(path, arguments.file_text.encode(), sandbox)
        return problem or f"Created {path} with {len(_lines(arguments.file_text))} lines."

    async def _replace(self, arguments: FileEditorArguments, sandbox: Sandbox) -> str:
        path = arguments.path
        assert arguments.old_str is not None  # checked by FileEditorArguments
        old, new = arguments.old_str.encode(), (arguments.new_str or "").encode()
        data = await sandbox.get(path)
        count = data.count(old)
        if count == 0:
            hint = " The file's lines end in CR LF." if b"\r\n" in data and b"\n" in old else ""
            return f"`old_str` does not occur in {path}; nothing was changed.{hint}"
        if count > 1:
            return f"`old_str` occurs {count} times in {path}, {_places(data, old)}; nothing was changed."
        at = data.index(old)
        changed = data[:at] + new + data[at + len(old) :]
        problem = await self._write(path, changed, sandbox)
        first = data.count(b"\n", 0, at) + 1
        return problem or f"Edited {path}. It now reads:\n{_snippet(changed, first, new)}"

    async def _insert(self, arguments: FileEditorArguments, sandbox: Sandbox) -> str:
        path, after = arguments.path, arguments.insert_line
        assert after is not None and arguments.new_str is not None  # checked by FileEditorArguments
        data = await sandbox.get(path)
        lines = _kept_lines(data)
        if after > len(lines):
            return f"{path} has {len(lines)} lines; there is no line {after} to insert after."
        new = arguments.new_str.encode()
        if not new.endswith(b"\n"):
            new += b"\n"
        before = b"".join(lines[:after])
        if before and not before.endswith(b"\n"):
            before += b"\n"
        changed = before + new + b"".join(lines[after:])
        problem = await self._write(path, changed, sandbox)
        return problem or f"Edited {path}. It now reads:\n{_snippet(changed, after + 1, new)}"

    async def _undo(self, path: str, sandbox: Sandbox) -> str:
        result = await sandbox.exec(_UNDO.format(**_quoted(path)), timeout_s=self._timeout_s)
        if result.exit_code == 3:
            return f"No edit of {path} is left to undo."
        if result.exit_code != 0:
            return f"The last edit of {path} could not be undone: {result.text.strip()}"
        return f"The last edit of {path} is undone."

    async def _write(self, path: str, content: bytes, sandbox: Sandbox) -> str | None:
        """Save the file as it is for `undo_edit`, then write it. Returns what went wrong, for the agent."""
        result = await sandbox.exec(_SAVE.format(**_quoted(path)), timeout_s=self._timeout_s)
        mode = result.text.strip()
        # The agent is root in its container and may have broken `stat`: whatever comes back is only text.
        if result.exit_code != 0 or not re.fullmatch("[0-7]{3,4}", mode):
            return f"{path} was not changed, since no copy for `undo_edit` could be made: {mode}"
        # A script must stay executable: its mode is part of the diff.
        await sandbox.put(path, content, mode=int(mode, 8))
        return None


def _quoted(path: str) -> dict[str, str]:
    folder = f"{_UNDO_FOLDER}/{hashlib.sha256(path.encode()).hexdigest()[:16]}"
    return {"path": shlex.quote(path), "folder": folder}


def _lines(text: str) -> list[str]:
    """Lines as grep and editors count them: only LF ends one."""
    return text.removesuffix("\n").split("\n") if text else []


def _kept_lines(data: bytes) -> list[bytes]:
    parts = [part + b"\n" for part in data.split(b"\n")]
    parts[-1] = parts[-1][:-1]
    return parts if parts[-1] else parts[:-1]


def _numbered(lines: list[str], numbers: Sequence[int]) -> str:
    return "\n".join(f"{number:6d}\t{lines[number - 1]}" for number in numbers)


def _snippet(data: bytes, first: int, new: bytes) -> str:
    """The lines of `new`, which starts on line `first`, with a few around them."""
    last = first + new.removesuffix(b"\n").count(b"\n")
    lines = _lines(data.decode("utf-8", errors="replace"))
    return _numbered(lines, range(max(1, first - _CONTEXT_LINES), min(len(lines), last + _CONTEXT_LINES) + 1))


def _places(data: bytes, old: bytes) -> str:
    numbers: list[str] = []
    at = data.find(old)
    while at >= 0 and len(numbers) < 10:
        numbers.append(str(data.count(b"\n", 0, at) + 1))
        at = data.find(old, at + len(old))
    return "at lines " + ", ".join(numbers) + (", ..." if at >= 0 else "")
