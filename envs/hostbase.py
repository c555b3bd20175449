"""A minimal root file system out of what this Debian host already has: a base image without a registry.

Debian packages (with their dependencies) are taken as dpkg lists them; Python is the one that runs this program, so
that tasks see the same version on every release of Debian.
"""

import io
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from agent_r3.errors import UserError, boundary

PACKAGES = ("git", "procps", "patch", "ca-certificates")
_SYSTEM_PYTHON = ("python3", "python3-venv")
_DOCS = re.compile(r"^/usr/share/(doc|man|locale|info|lintian|bug|perl5/pod)/.")
_MERGED = re.compile(r"^/(bin|sbin|lib|lib32|lib64|libx32)(?=/)")
_NOT_COPIED = ("/proc/", "/sys/", "/dev/", "/root/", "/home/", "/tmp/")
_PYTHON_LEFT_OUT = re.compile(
    r"^(site-packages|test|idlelib|turtledemo|lib2to3/tests|config-[^/]*)(/|$)|/tests?/|\.a$|\.opt-\d\.pyc$"
)
_FOLDERS = {"root": 0o700, "proc": 0o555, "sys": 0o555, "dev": 0o755, "run": 0o755, "tmp": 0o1777, "var/tmp": 0o1777}


def describe() -> tuple[str, ...]:
    """What the base image depends on: release, packages, Python. Part of the image's content address."""
    release = dict(line.partition("=")[::2] for line in Path("/etc/os-release").read_text().splitlines())
    return (release.get("ID", "?"), release.get("VERSION_ID", "?"), *PACKAGES, sys.version.split()[0], _python_prefix())


def write_base_tar(out: IO[bytes]) -> None:
    """Write the root file system as an uncompressed tar.

    Raises UserError on a host that is not Debian or lacks one of the packages.
    """
    own_python = _python_prefix() != "/usr"
    paths = set(_package_paths((*PACKAGES, *(() if own_python else _SYSTEM_PYTHON))))
    paths.update(_system_paths(paths))
    if own_python:
        paths.update(_shared_libraries())
    paths.update(parent for path in list(paths) for parent in _parents(path))
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(paths):
            if not path.startswith(_NOT_COPIED):
                tar.add(path, arcname=path[1:], recursive=False)
        for name, mode in _FOLDERS.items():
            if f"/{name}" not in paths:
                tar.addfile(_entry(name, tarfile.DIRTYPE, mode))
        # The host's own accounts are nobody's business in an image.
        for name in ("passwd", "group"):
            _add_bytes(tar, f"etc/{name}", Path(f"/usr/share/base-passwd/{name}.master").read_bytes())
        if own_python:
            _add_python(tar)


def _python_prefix() -> str:
    return sys.base_prefix


def _run(*command: str) -> str:
    with boundary(
        UserError,
        f"a base image can be made on Debian only ({command[0]}); elsewhere give --base-image, such as python:3.11",
        FileNotFoundError,
    ):
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def _package_paths(wanted: Iterable[str]) -> Iterator[str]:
    depends, essential = _installed()
    missing = [package for package in wanted if package not in depends]
    if missing:
        raise UserError(
            f"the base image needs Debian packages: apt-get install {' '.join(missing)}; or give --base-image"
        )
    todo, done = [*essential, *wanted], set[str]()
    while todo:
        package = todo.pop()
        if package not in done and package in depends:
            done.add(package)
            for alternatives in depends[package]:
                todo += [name for name in alternatives if name in depends][:1]
    for line in _run("dpkg", "-L", *sorted(done)).splitlines():
        if line.startswith("/") and line != "/." and not _DOCS.match(line):
            # dpkg still lists /bin/x where /bin is a link to /usr/bin.
            path = _MERGED.sub(r"/usr/\1", line) if Path("/bin").is_symlink() else line
            if os.path.lexists(path):
                yield path


def _installed() -> tuple[dict[str, list[list[str]]], list[str]]:
    """Dependencies (as lists of alternatives) of every installed package and provided name, and the essential ones."""
    form = "${db:Status-Abbrev}\t${Package}\t${Essential}\t${Priority}\t${Provides}\t${Pre-Depends}, ${Depends}\n"
    depends: dict[str, list[list[str]]] = {}
    essential = []
    for line in _run("dpkg-query", "-Wf", form).splitlines():
        status, package, is_essential, priority, provides, needs = line.split("\t")
        if status.strip() != "ii":
            continue
        depends[package] = [[_name(item) for item in group.split("|")] for group in needs.split(",") if group.strip()]
        for provided in provides.split(","):
            depends.setdefault(_name(provided), [[package]])
        if is_essential == "yes" or priority == "required":
            essential.append(package)
    depends.pop("", None)
    return depends, essential


def _name(item: str) -> str:
    return re.split(r"[ (:]", item.strip())[0]


def _system_paths(packaged: set[str]) -> Iterator[str]:
    """Links and caches that no package owns. The CA bundle is the host's, so that pip works behind a company's proxy
    when the environment image is built here; images meant for shipping start from a base of their own."""
    for path in ("/bin", "/sbin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/nsswitch.conf", "/etc/os-release"):
        if os.path.lexists(path):
            yield path
    yield from map(str, Path("/etc/ssl/certs").iterdir())
    for folder in ("/usr/bin", "/usr/sbin"):
        for link in Path(folder).iterdir():
            choice = str(link.readlink()) if link.is_symlink() else ""
            if choice.startswith("/etc/alternatives/") and os.path.realpath(link) in packaged:
                yield from (str(link), choice)


def _parents(path: str) -> Iterator[str]:
    return (str(parent) for parent in PurePosixPath(path).parents if str(parent) != "/")


def _python_files() -> Iterator[tuple[Path, str]]:
    """(file, name in the image) of the running Python, moved to /usr/local and without its tests and packages."""
    prefix, version = Path(_python_prefix()), f"python{sys.version_info.major}.{sys.version_info.minor}"
    yield prefix / "bin" / version, f"usr/local/bin/{version}"
    yield from ((path, f"usr/local/lib/{path.name}") for path in sorted((prefix / "lib").glob("libpython*.so*")))
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*")):
        name = path.relative_to(library).as_posix()
        if not _PYTHON_LEFT_OUT.search(name) and not path.is_dir():
            yield path, f"usr/local/lib/{version}/{name}"


def _shared_libraries() -> set[str]:
    """Libraries that the running Python and its extension modules are linked to, with the links that lead to them."""
    modules = [str(path) for path, name in _python_files() if ".so" in name or "/bin/" in name]
    found = set(re.findall(r"=> (/\S+)", _run("ldd", *modules)))
    prefix = _python_prefix()
    links = {path for path in found if not path.startswith(prefix)}
    return {_MERGED.sub(r"/usr/\1", name) for path in links for name in (path, os.path.realpath(path))}


def _add_python(tar: tarfile.TarFile) -> None:
    for path, name in _python_files():
        tar.add(path, arcname=name, recursive=False)
    for link in ("python3", "python"):
        entry = _entry(f"usr/local/bin/{link}", tarfile.SYMTYPE, 0o777)
        entry.linkname = f"python{sys.version_info.major}.{sys.version_info.minor}"
        tar.addfile(entry)
    # Folders that hold only what was left out, and that Python looks for.
    tar.addfile(
        _entry(
            f"usr/local/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages",
            tarfile.DIRTYPE,
            0o755,
        )
    )


def _add_bytes(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = _entry(name, tarfile.REGTYPE, 0o644)
    entry.size = len(data)
    tar.addfile(entry, io.BytesIO(data))


def _entry(name: str, kind: bytes, mode: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = kind, mode
    return entry
