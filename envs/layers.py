"""Image layers on disk: each is unpacked once, and trees of whole images are made of hard links to its files.

A layer is kept as a list of its tar's entries beside the contents of its regular files. Building a tree replays the
lists, lowest layer first, as an engine applies them: whiteouts take away, links in a path are followed inside the tree
and nowhere else. Files therefore cost their bytes once, however many images share them, and must never be written to.

Left out: device nodes, set-user-id bits and file capabilities, which mean nothing to a process without privileges but
would mean something to other users of this machine.
"""

# An image has tens of thousands of paths, and Path takes several times as long as a string.
# ruff: noqa: PTH101, PTH102, PTH108, PTH112, PTH115, PTH118, PTH119, PTH120, PTH123, PTH208, PTH211

import contextlib
import errno
import hashlib
import json
import os
import shutil
import stat
import tarfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple, cast

from agent_r3.errors import DataError, boundary

_OPAQUE, _WHITEOUT, _RESERVED = ".wh..wh..opq", ".wh.", ".wh..wh."
DRAFT = ".new-"  # begins the names of what is not finished
_MOST_LINKS = 40  # followed in one path, as the kernel does


class Entry(NamedTuple):
    """What a layer's tar says of one path, in the order of the tar."""

    kind: str  # file, dir, symlink, hardlink, fifo
    path: str
    mode: int
    mtime_ns: int
    content: str  # file: its number in `files`; symlink, hardlink: where it leads


@contextlib.contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """A folder that gets its name `final` when the block ends well, and is removed otherwise."""
    draft = final.parent / f"{DRAFT}{uuid.uuid4().hex}"
    draft.mkdir()
    try:
        yield draft
        draft.rename(final)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def unpack_layer(stream: IO[bytes], digest: str, folder: Path, owner: int) -> None:
    """Read a layer's uncompressed tar into `folder`; its files belong to `owner`. Raises DataError."""
    hashing = _Hashing(stream)
    entries: list[Entry] = []
    with new_folder(folder) as draft:
        (draft / "files").mkdir()
        with (
            boundary(DataError, f"unpack layer {digest}", tarfile.TarError, OSError),
            tarfile.open(fileobj=cast("IO[bytes]", hashing), mode="r|") as tar,
        ):
            for member in tar:
                entry = _unpack(tar, member, draft / "files", len(entries), owner)
                if entry is not None:
                    entries.append(entry)
            while hashing.read(1 << 20):
                pass
        if f"sha256:{hashing.hash.hexdigest()}" != digest:
            raise DataError(f"layer {digest} is damaged: its content has sha256 {hashing.hash.hexdigest()}")
        (draft / "entries.json").write_text(json.dumps(entries))


def build_tree(layers: list[Path], root: Path, owner: int) -> None:
    """The file system of an image, in the empty folder `root`. Raises DataError."""
    tree = _Tree(root, owner)
    for layer in layers:
        entries = [Entry(*fields) for fields in json.loads((layer / "entries.json").read_text())]
        with boundary(DataError, f"build {root} from layer {layer.name}", OSError):
            tree.apply(entries, layer / "files")
    tree.finish()


class _Hashing:
    """A stream that hashes what is read from it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.hash = hashlib.sha256()

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self.hash.update(data)
        return data


def _unpack(tar: tarfile.TarFile, member: tarfile.TarInfo, files: Path, number: int, owner: int) -> Entry | None:
    mtime_ns = int(member.mtime * 1e9)
    if member.isreg():
        path = files / str(number)
        source = tar.extractfile(member)
        assert source is not None
        with path.open("xb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
            os.fchown(target.fileno(), owner, owner)
            os.fchmod(target.fileno(), member.mode & 0o777)
        os.utime(path, ns=(mtime_ns, mtime_ns))
        return Entry("file", member.name, 0, mtime_ns, str(number))
    kinds = {tarfile.DIRTYPE: "dir", tarfile.SYMTYPE: "symlink", tarfile.LNKTYPE: "hardlink", tarfile.FIFOTYPE: "fifo"}
    if member.type not in kinds:
        return None
    return Entry(kinds[member.type], member.name, member.mode & 0o1777, mtime_ns, member.linkname)


class _Tree:
    """A tree under construction. Folders keep their names open to us until `finish` gives them their modes."""

    def __init__(self, root: Path, owner: int) -> None:
        self._root = str(root)
        self._owner = owner
        self._folders: dict[str, tuple[int, int | None]] = {self._root: (0o755, None)}  # mode, mtime in ns

    def apply(self, entries: list[Entry], files: Path) -> None:
        """One layer. Its whiteouts take away from the layers below it only, so they come first."""
        for entry in entries:
            parent, _, name = entry.path.rstrip("/").rpartition("/")
            if name == _OPAQUE:
                folder = self.inside(parent)
                for child in os.listdir(folder) if os.path.isdir(folder) else ():
                    self._remove(os.path.join(folder, child))
            elif name.startswith(_WHITEOUT) and not name.startswith(_RESERVED):
                self._remove(os.path.join(self.inside(parent), _plain(name.removeprefix(_WHITEOUT), entry.path)))
        for entry in entries:
            parent, _, name = entry.path.rstrip("/").rpartition("/")
            if not name.startswith(_WHITEOUT):
                self._add(entry, parent, name, files)

    def _add(self, entry: Entry, parent: str, name: str, files: Path) -> None:
        if entry.kind == "dir" and name in ("", "."):
            self._folders[self.inside(parent)] = (entry.mode, entry.mtime_ns)
            return
        folder = self.inside(parent)
        self._make_folder(folder)
        target = os.path.join(folder, _plain(name, entry.path))
        if entry.kind == "dir":
            if not stat.S_ISDIR(_mode(target)):
                self._remove(target)
                os.mkdir(target)
            self._folders[target] = (entry.mode, entry.mtime_ns)
            return
        if entry.kind == "hardlink":
            above, _, last = entry.content.rstrip("/").rpartition("/")
            source = os.path.join(self.inside(above), _plain(last, entry.content))
            if source != target:
                self._remove(target)
                _link(source, target)
            return
        self._remove(target)
        if entry.kind == "file":
            _link(str(files / entry.content), target)
            return
        if entry.kind == "symlink":
            os.symlink(entry.content, target)
        else:
            os.mkfifo(target, entry.mode & 0o777)
        os.chown(target, self._owner, self._owner, follow_symlinks=False)
        os.utime(target, ns=(entry.mtime_ns, entry.mtime_ns), follow_symlinks=False)

    def finish(self) -> None:
        """What an engine would mount is made, then folders get their owner, mode and time, deepest first."""
        for name in ("proc", "dev", "tmp", "etc"):
            self._make_folder(self.inside(name))
        for name in ("etc/hosts", "etc/resolv.conf"):
            path = os.path.join(self.inside(os.path.dirname(name)), os.path.basename(name))
            if not os.path.lexists(path):
                with open(path, "x") as file:
                    os.fchmod(file.fileno(), 0o644)
                    os.fchown(file.fileno(), self._owner, self._owner)
        for folder in sorted(self._folders, key=len, reverse=True):
            mode, mtime_ns = self._folders[folder]
            os.chown(folder, self._owner, self._owner)
            os.chmod(folder, mode)
            if mtime_ns is not None:
                os.utime(folder, ns=(mtime_ns, mtime_ns))

    def inside(self, path: str) -> str:
        """Where a process that has the tree as its root would find `path`; what is not there yet is taken as is."""
        place, rest, links = self._root, path.split("/")[::-1], 0
        while rest:
            part = rest.pop()
            if part == "..":
                place = place if place == self._root else os.path.dirname(place)
            elif part not in ("", "."):
                step = os.path.join(place, part)
                if stat.S_ISLNK(_mode(step)):
                    links += 1
                    if links > _MOST_LINKS:
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
                    target = os.readlink(step)
                    place = self._root if target.startswith("/") else place
                    rest += target.split("/")[::-1]
                else:
                    place = step
        return place

    def _make_folder(self, path: str) -> None:
        if not os.path.isdir(path):
            self._make_folder(os.path.dirname(path))
            os.mkdir(path)
            self._folders[path] = (0o755, None)

    def _remove(self, path: str) -> None:
        mode = _mode(path)
        if stat.S_ISDIR(mode):
            shutil.rmtree(path)
            for gone in [folder for folder in self._folders if folder == path or folder.startswith(path + "/")]:
                del self._folders[gone]
        elif mode:
            os.unlink(path)


def _mode(path: str) -> int:
    """Mode of what is there, a link itself; 0 for nothing."""
    try:
        return os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0


def _plain(name: str, path: str) -> str:
    if name in ("", ".", ".."):
        raise OSError(errno.EINVAL, "a path that names no file", path)
    return name


def _link(source: str, target: str) -> None:
    """A hard link; a copy where the file system has no more of them for this file, or none at all."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as exc:
        if exc.errno not in (errno.EMLINK, errno.EPERM, errno.EOPNOTSUPP):
            raise
        shutil.copy2(source, target, follow_symlinks=False)
        found = os.lstat(source)
        os.chown(target, found.st_uid, found.st_gid, follow_symlinks=False)
