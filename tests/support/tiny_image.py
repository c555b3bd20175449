"""The smallest image in which a sandbox starts: this host's bash and a few coreutils, 10 MB, without Python and git."""

import io
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import docker

_TOOLS = ("bash", "cat", "chmod", "dd", "dirname", "head", "ls", "mkdir", "mkfifo", "rm", "sleep", "stat", "tail")


def make_tiny_image(
    api: docker.APIClient, name: str, *, extra: bytes = b"", without: str = "", shell: str = "bash"
) -> str:
    """Import it under `name` and return its id. `extra` makes it differ and weigh more; `shell` becomes /bin/sh."""
    repository, _, tag = name.rpartition(":")
    tools = sorted({*_TOOLS, shell} - {without})
    answer = api.import_image_from_data(_tar(tools, shell, extra), repository=repository, tag=tag)
    assert '"error"' not in answer, answer
    return str(api.inspect_image(name)["Id"])  # type: ignore[no-untyped-call]


def _tar(tools: list[str], shell: str, extra: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        libraries: set[str] = set()
        for tool in tools:
            path = shutil.which(tool)
            assert path is not None, tool
            listed = subprocess.run(["ldd", path], capture_output=True, text=True, check=True).stdout
            libraries |= set(re.findall(r"(/\S+) \(0x", listed))
            _add(tar, f"bin/{tool}", Path(path).read_bytes())
        for library in libraries:
            _add(tar, library.lstrip("/"), Path(library).read_bytes())
        for folder in ("tmp", "var/tmp", "etc", "testbed", "proc", "dev"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777
            tar.addfile(entry)
        link = tarfile.TarInfo("bin/sh")
        link.type, link.linkname = tarfile.SYMTYPE, shell
        tar.addfile(link)
        _add(tar, "extra", extra)
    return buffer.getvalue()


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), 0o755
    tar.addfile(entry, io.BytesIO(data))
