"""A base for the stack's images where no registry can be reached: this host's Debian packages, without its secrets.

    python -m tests.stack.base [PROGRAM...]

prints the tag of an image with Python and, when programs such as redis-server are named, with those, the libraries that
they are linked to, and what they have in /usr/share. Certificates are the distribution's alone: what this host trusts
beside them stays here.
"""

import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from agent_r3.envs import hostbase
from agent_r3.errors import UserError

_CERTIFICATES = "etc/ssl/certs/"
_PACKAGED = "usr/share/ca-certificates/"
_BUNDLE = "etc/ssl/certs/ca-certificates.crt"
_MERGED = re.compile(r"^/(bin|sbin|lib|lib64)(?=/)")
_SOURCES = Path("/usr/share/javascript/moment-timezone/data")  # 221 MB that no page of Prometheus reads
_REPOSITORY = "agent-r3-host/base"
_ENVIRONMENT = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8"


def base_image(programs: Sequence[str]) -> str:
    """The tag of the base image with these programs, made when it is not there."""
    plain = (
        f"{_REPOSITORY}:{_digest(hostbase.describe(), Path(hostbase.__file__).read_text(), Path(__file__).read_text())}"
    )
    if not _has(plain):
        _import(plain)
    if not programs:
        return plain
    files = sorted({path for program in programs for path in program_files(program)})
    stamps = [(str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in files]
    tag = f"{_REPOSITORY}-{programs[0]}:{_digest(plain, stamps)}"
    if not _has(tag):
        _build(tag, f"FROM {plain}\nADD files.tar /\nRUN ldconfig\n", files)
    return tag


def shippable(base: IO[bytes], out: IO[bytes]) -> None:
    """Copy a root file system, leaving out every trusted certificate that is not the ca-certificates package's own."""
    packaged = []
    with (
        tarfile.open(fileobj=base, mode="r|") as source,
        tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as target,
    ):
        for entry in source:
            if entry.name.startswith(_CERTIFICATES):
                continue
            data = source.extractfile(entry) if entry.isfile() else None
            if data is not None and entry.name.startswith(_PACKAGED) and entry.name.endswith(".crt"):
                packaged.append(data.read())
                data = io.BytesIO(packaged[-1])
            target.addfile(entry, data)
        certificates = b"".join(text.strip() + b"\n" for text in packaged)
        bundle = tarfile.TarInfo(_BUNDLE)
        bundle.size = len(certificates)
        target.addfile(bundle, io.BytesIO(certificates))


def program_files(program: str) -> Iterator[Path]:
    """A program, where its link leads, and the libraries it is linked to, under /usr as on every merged Debian."""
    found = shutil.which(program, path="/usr/bin:/usr/sbin")
    if found is None:
        raise UserError(f"no {program} on this host; run scripts/test-services.sh")
    libraries = re.findall(r"=> (/\S+)", subprocess.run(["ldd", found], capture_output=True, text=True).stdout)
    for name in (found, *libraries):
        for path in (Path(name), Path(name).resolve()):
            yield Path(_MERGED.sub(r"/usr/\1", str(path)))
    data = Path("/usr/share", program)  # Prometheus has its pages there
    if data.is_dir():
        yield from _tree(data)


def _tree(path: Path) -> Iterator[Path]:
    """A path, what lies below it, and where links lead."""
    if path == _SOURCES:
        return
    yield path
    if path.is_symlink():
        yield from _tree(Path(os.path.normpath(path.parent / path.readlink())))
    elif path.is_dir():
        for inner in sorted(path.iterdir()):
            yield from _tree(inner)


def _import(tag: str) -> None:
    with tempfile.TemporaryFile() as base, tempfile.TemporaryFile() as clean:
        hostbase.write_base_tar(base)
        base.seek(0)
        shippable(base, clean)
        clean.seek(0)
        files = tag.replace(":", "-files:")  # BuildKit takes no base by its id alone
        _docker("import", "-", files, stdin=clean)
    # Python may come with a shared library of its own, which the host's linker cache does not name.
    _build(tag, f"FROM {files}\nENV {_ENVIRONMENT}\nRUN ldconfig\nCMD bash\n")


def _build(tag: str, dockerfile: str, files: Sequence[Path] = ()) -> None:
    with tempfile.TemporaryFile() as context:
        _write_context(context, dockerfile, files)
        context.seek(0)
        _docker("build", "--quiet", "--network", "none", "-t", tag, "-", stdin=context)


def _write_context(out: IO[bytes], dockerfile: str, files: Sequence[Path]) -> None:
    with tempfile.TemporaryFile() as inner, tarfile.open(fileobj=out, mode="w|") as context:
        with tarfile.open(fileobj=inner, mode="w") as tar:
            for path in files:
                tar.add(path, arcname=str(path).lstrip("/"), recursive=False)
        for name, data in (("Dockerfile", io.BytesIO(dockerfile.encode())), ("files.tar", inner)):
            entry = tarfile.TarInfo(name)
            entry.size = data.seek(0, io.SEEK_END)
            data.seek(0)
            context.addfile(entry, data)


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def _has(tag: str) -> bool:
    return subprocess.run(["docker", "image", "inspect", tag], capture_output=True).returncode == 0


def _docker(*arguments: str, stdin: IO[bytes]) -> None:
    """Raises UserError with the last line that docker printed."""
    done = subprocess.run(["docker", *arguments], stdin=stdin, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"docker {arguments[0]}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")


if __name__ == "__main__":
    try:
        print(base_image(sys.argv[1:]))
    except UserError as problem:
        print(f"base: {problem}", file=sys.stderr)
        sys.exit(2)
