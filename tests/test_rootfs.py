"""Unpacking images: archives are read exactly, layers are applied as an engine applies them, nothing gets outside."""

import gzip
import hashlib
import io
import json
import os
import stat
import tarfile
from pathlib import Path
from typing import Any

import docker
import pytest

from agent_r3.envs.bwrap import sandbox_user
from agent_r3.envs.rootfs import RootfsStore
from agent_r3.errors import DataError
from tests.support.docker import make_task

Spec = tuple[str, Any]  # path, and: bytes of a file, "-> target", "= hard link", "/" for a folder, or a TarInfo


def layer(*entries: Spec) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path, what in entries:
            info = tarfile.TarInfo(path)
            info.mtime, info.mode = 1_000_000_000, 0o644
            match what:
                case bytes():
                    info.size = len(what)
                case "/":
                    info.type, info.mode = tarfile.DIRTYPE, 0o755
                case str() if what.startswith("-> "):
                    info.type, info.linkname = tarfile.SYMTYPE, what[3:]
                case str() if what.startswith("= "):
                    info.type, info.linkname = tarfile.LNKTYPE, what[2:]
                case tarfile.TarInfo():
                    info = what
            tar.addfile(info, io.BytesIO(what) if isinstance(what, bytes) else None)
    return buffer.getvalue()


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def write_tar(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def saved(path: Path, *layers: bytes, name: str = "made:1", env: tuple[str, ...] = ()) -> Path:
    """An archive as `docker save` writes it."""
    config = {"config": {"Env": list(env)}, "rootfs": {"diff_ids": [digest(data) for data in layers]}}
    members = [f"{number}/layer.tar" for number in range(len(layers))]
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": members}]
    files = {"config.json": json.dumps(config).encode(), "manifest.json": json.dumps(manifest).encode()}
    return write_tar(path, {**dict(zip(members, layers, strict=True)), **files})


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


@pytest.fixture
def store(tmp_path: Path) -> RootfsStore:
    return RootfsStore(tmp_path / "store")


def unpack(store: RootfsStore, tmp_path: Path, *layers: bytes) -> Path:
    store.unpack_archive(saved(tmp_path / "image.tar", *layers))
    found = store.find("made:1")
    assert found is not None
    return found.folder / "rootfs"


def test_an_archive_gives_its_files_modes_times_links_and_environment(store: RootfsStore, tmp_path: Path) -> None:
    content = layer(("bin", "/"), ("bin/sh", b"#!"), ("bin/bash", "= bin/sh"), ("lib", "-> usr/lib"), ("é\udcff", b""))
    umask = os.umask(0o077)
    store.unpack_archive(saved(tmp_path / "a.tar", content, env=("A=1", "B=x=y")))
    os.umask(umask)
    found = store.find("made:1")
    assert found is not None and found.environment == {"A": "1", "B": "x=y"} and found.layers == (digest(content),)
    root = found.folder / "rootfs"
    assert (root / "bin/bash").read_bytes() == b"#!" and (root / "bin/bash").samefile(root / "bin/sh")
    assert (root / "lib").readlink() == Path("usr/lib")
    facts = (root / "bin/sh").stat()
    assert (facts.st_mtime, stat.S_IMODE(facts.st_mode), facts.st_uid) == (1_000_000_000, 0o644, sandbox_user())
    assert (root / "é\udcff").exists()
    assert {"proc", "dev", "tmp", "etc"} <= set(names_in(root)) and (root / "etc/hosts").read_bytes() == b""
    assert stat.S_IMODE((root / "etc/hosts").stat().st_mode) == 0o644 and stat.S_IMODE(root.stat().st_mode) == 0o755


def test_upper_layers_replace_remove_and_hide(store: RootfsStore, tmp_path: Path) -> None:
    lower = layer(
        ("a", b"old"), ("gone", b""), ("hidden", "/"), ("hidden/x", b""), ("hidden/sub", "/"), ("hidden/sub/y", b""),
        ("file", b""), ("folder", "/"), ("folder/z", b""), ("kept", "/"), ("kept/k", b"k"),
    )  # fmt: skip
    upper = layer(
        ("a", b"new"), (".wh.gone", b""), ("hidden", "/"), ("hidden/own", b""), ("hidden/.wh..wh..opq", b""),
        ("file", "/"), ("file/in", b""), ("folder", b"now a file"), ("kept", "/"), (".wh..wh.plnk", "/"),
    )  # fmt: skip
    root = unpack(store, tmp_path, lower, upper)
    assert (root / "a").read_bytes() == b"new"
    assert not (root / "gone").exists()
    assert names_in(root / "hidden") == ["own"]
    assert (root / "file/in").exists() and (root / "folder").read_bytes() == b"now a file"
    assert (root / "kept/k").read_bytes() == b"k"
    assert not [name for name in names_in(root) if name.startswith(".wh.")]


def test_a_link_in_a_path_is_followed_inside_the_tree(store: RootfsStore, tmp_path: Path) -> None:
    lower = layer(("usr", "/"), ("usr/lib", "/"), ("lib", "-> usr/lib"), ("abs", "-> /usr"), ("up", "-> ../../.."))
    upper = layer(("lib/libc.so", b"c"), ("abs/lib/libm.so", b"m"), ("up/at-the-root", b"r"), ("new/deep/file", b"d"))
    root = unpack(store, tmp_path, lower, upper)
    assert names_in(root / "usr/lib") == ["libc.so", "libm.so"]
    assert (root / "lib").is_symlink()
    assert (root / "at-the-root").read_bytes() == b"r" and (root / "new/deep/file").read_bytes() == b"d"


def test_nothing_is_written_outside_the_tree(store: RootfsStore, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"p")
    hostile = layer(
        ("out", f"-> {outside}"), ("out/through-a-link", b""), (f"{outside}/by-an-absolute-path", b""),
        ("../../../../outside/by-dots", b""), (f"{outside}/.wh.precious", b""), ("out2", f"-> {outside}/precious"),
        ("out2", b"replaced"),
    )  # fmt: skip
    root = unpack(store, tmp_path, hostile)
    assert names_in(outside) == ["precious"] and (outside / "precious").read_bytes() == b"p"
    inside = root / str(outside).lstrip("/")
    assert names_in(inside) == ["by-an-absolute-path", "through-a-link"]
    assert (root / "outside/by-dots").exists() and (root / "out2").read_bytes() == b"replaced"


@pytest.mark.parametrize("target", ["/etc/passwd", "../../../../../../../../etc/passwd"])
def test_a_hard_link_to_the_host_is_refused(store: RootfsStore, tmp_path: Path, target: str) -> None:
    with pytest.raises(DataError, match="No such file"):
        store.unpack_archive(saved(tmp_path / "a.tar", layer(("stolen", f"= {target}"))))
    assert store.find("made:1") is None and names_in(store.folder) == ["layers"]


def test_privileges_and_devices_do_not_come_along(store: RootfsStore, tmp_path: Path) -> None:
    setuid, device, fifo = tarfile.TarInfo("su"), tarfile.TarInfo("sda"), tarfile.TarInfo("fifo")
    setuid.mode = 0o6755
    device.type, device.devmajor = tarfile.BLKTYPE, 8
    fifo.type = tarfile.FIFOTYPE
    root = unpack(store, tmp_path, layer(("su", setuid), ("sda", device), ("fifo", fifo)))
    assert stat.S_IMODE((root / "su").stat().st_mode) == 0o755
    assert not (root / "sda").exists() and stat.S_ISFIFO((root / "fifo").stat().st_mode)


def test_images_share_the_files_of_their_common_layers(store: RootfsStore, tmp_path: Path) -> None:
    base = layer(("big", b"x" * 100_000))
    store.unpack_archive(saved(tmp_path / "a.tar", base, layer(("one", b"")), name="one:1"))
    store.unpack_archive(saved(tmp_path / "b.tar", base, layer(("two", b"")), name="two:1"))
    one, two = store.find("one:1"), store.find("two:1")
    assert one is not None and two is not None
    assert (one.folder / "rootfs/big").samefile(two.folder / "rootfs/big")
    assert len(names_in(store.folder / "layers")) == 3


def test_a_name_that_moved_to_another_image_is_unpacked_anew_and_an_equal_one_is_not(tmp_path: Path) -> None:
    told: list[tuple[str, bool]] = []
    store = RootfsStore(tmp_path / "store", lambda *what: told.append(what))
    for content in (b"1", b"1", b"2"):
        store.unpack_archive(saved(tmp_path / "a.tar", layer(("v", content)), name="docker.io/library/made"))
    assert told == [("made:latest", False), ("made:latest", True), ("made:latest", False)]
    found = store.find("made")
    assert found is not None and (found.folder / "rootfs/v").read_bytes() == b"2"


def test_what_a_killed_command_left_is_removed_by_the_next(store: RootfsStore, tmp_path: Path) -> None:
    (store.folder / "layers/.new-1/files").mkdir(parents=True)
    (store.folder / ".new-2").write_bytes(b"half an archive")
    unpack(store, tmp_path, layer(("file", b"")))
    assert names_in(store.folder) == ["layers", "made:1"] and len(names_in(store.folder / "layers")) == 1


def test_an_oci_archive_is_read_and_its_layers_may_be_gzipped(store: RootfsStore, tmp_path: Path) -> None:
    content = layer(("file", b"oci"))
    blobs: dict[str, bytes] = {}

    def blob(data: bytes) -> str:
        blobs[f"blobs/sha256/{hashlib.sha256(data).hexdigest()}"] = data
        return digest(data)

    config = blob(json.dumps({"config": {"Env": ["A=1"]}, "rootfs": {"diff_ids": [digest(content)]}}).encode())
    layers = [{"digest": blob(gzip.compress(content))}]
    image = blob(json.dumps({"config": {"digest": config}, "layers": layers}).encode())
    machines = {"x86_64": "amd64", "aarch64": "arm64"}
    here = {"architecture": machines[os.uname().machine]}
    index = {"manifests": [{"digest": image, "platform": here}, {"digest": "x", "platform": {"architecture": "mips"}}]}
    nested = blob(json.dumps(index).encode())
    name = {"org.opencontainers.image.ref.name": "quay.io/some/image:2"}
    files = {**blobs, "index.json": json.dumps({"manifests": [{"digest": nested, "annotations": name}]}).encode()}
    store.unpack_archive(write_tar(tmp_path / "oci.tar", files))
    found = store.find("quay.io/some/image:2")
    assert found is not None and (found.folder / "rootfs/file").read_bytes() == b"oci"
    files["index.json"] = json.dumps({"manifests": [{"digest": nested}]}).encode()
    nameless = write_tar(tmp_path / "nameless.tar", files)
    with pytest.raises(DataError, match="--name"):
        store.unpack_archive(nameless)
    store.unpack_archive(nameless, "called:3")
    assert store.find("called:3") is not None


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        ({"0/layer.tar": layer(("file", b"other"))}, "is damaged"),
        ({"0/layer.tar": b"\x28\xb5\x2f\xfd and more"}, "zstd"),
        ({"0/layer.tar": b"no tar" * 200}, "unpack layer"),
        ({"config.json": b"{"}, "config.json"),
        ({"config.json": b"{}"}, "KeyError"),
        ({"config.json": b'{"rootfs": {"diff_ids": ["sha256:../../x"]}}'}, "no sha256 digest"),
        ({"manifest.json": b'[{"Config": "config.json", "Layers": ["lost"]}]', "0/layer.tar": b""}, "lost"),
        ({"manifest.json": b'[{"Config": "config.json", "Layers": []}]'}, "0 layers, but 1"),
    ],
    ids=["other-content", "zstd", "no-tar", "no-json", "no-layers", "odd-digest", "member-lost", "layer-count"],
)
def test_a_damaged_archive_is_refused_and_leaves_no_image(
    store: RootfsStore, tmp_path: Path, damage: dict[str, bytes], complaint: str
) -> None:
    path = saved(tmp_path / "a.tar", layer(("file", b"good")))
    with tarfile.open(path) as tar:
        files = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    write_tar(path, files | damage)
    with pytest.raises(DataError, match=complaint):
        store.unpack_archive(path, "made:1")
    assert store.find("made:1") is None and set(names_in(store.folder)) <= {"layers"}


def test_what_is_no_archive_is_refused(store: RootfsStore, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no archive")
    for path, complaint in (
        (tmp_path / "text", "read image archive"),
        (tmp_path / "missing", "No such file"),
        (write_tar(tmp_path / "other.tar", {"file": b""}), "neither manifest.json nor index.json"),
    ):
        with pytest.raises(DataError, match=complaint):
            store.unpack_archive(path)


def test_a_missing_or_foreign_image_is_refused_with_the_command(store: RootfsStore, tmp_path: Path) -> None:
    task = make_task("made:1")
    with pytest.raises(DataError, match=f"`agent-r3 tasks rootfs made:1 {store.folder}`"):
        store.require(task)
    store.unpack_archive(saved(tmp_path / "a.tar", layer()))
    assert store.require(task).image == "made:1"
    config = store.folder / "made:1/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"owner": 4711}))
    with pytest.raises(DataError, match="unpacked for user 4711"):
        store.require(task)
    config.write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        store.require(task)


@pytest.mark.docker
def test_an_image_that_is_there_in_the_same_version_is_not_saved_again(
    docker_engine: docker.APIClient, unpacked_image: str
) -> None:
    facts: Any = docker_engine.inspect_image(unpacked_image)  # type: ignore[no-untyped-call]
    told: list[tuple[str, bool]] = []
    store = RootfsStore(None, lambda *what: told.append(what))
    store.unpack_images(docker_engine, [unpacked_image, unpacked_image])
    assert told == [(unpacked_image, True)]
    found = store.find(unpacked_image)
    assert found is not None and list(found.layers) == facts["RootFS"]["Layers"]
    with pytest.raises(DataError, match="no-such-image@sha256"):
        store.unpack_images(docker_engine, [f"no-such-image@sha256:{'0' * 64}"])


@pytest.mark.docker
def test_an_unpacked_image_equals_what_the_engine_shows(
    docker_engine: docker.APIClient, unpacked_image: str, tmp_path: Path
) -> None:
    found = RootfsStore(None).find(unpacked_image)
    assert found is not None
    container: Any = docker_engine.create_container(unpacked_image)
    try:
        exported = tmp_path / "exported.tar"
        with exported.open("wb") as file:
            for chunk in docker_engine.export(container):
                file.write(chunk)
    finally:
        docker_engine.remove_container(container, force=True)
    differing = []
    with tarfile.open(exported) as tar:
        names = set()
        for member in tar:
            path = found.folder / "rootfs" / member.name
            if member.name.partition("/")[0] in ("dev", "proc", "sys", ".dockerenv") or member.name in _DOCKERS_OWN:
                continue
            names.add(member.name)
            if not os.path.lexists(path) or not _equal(tar, member, path):
                differing.append(member.name)
    assert not differing and len(names) > 1_000
    root = found.folder / "rootfs"
    extra = {str(path.relative_to(root)) for path in root.rglob("*")} - names
    assert {name for name in extra if not name.startswith(("dev", "proc", "sys"))} <= _DOCKERS_OWN


_DOCKERS_OWN = {"etc", "etc/hosts", "etc/hostname", "etc/resolv.conf", "etc/mtab", ""}  # made for each container


def _equal(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> bool:
    facts = path.lstat()
    if member.issym():
        return path.is_symlink() and os.fspath(path.readlink()) == os.path.normpath(member.linkname)
    if member.isdir():
        return path.is_dir() and not path.is_symlink() and stat.S_IMODE(facts.st_mode) == member.mode & 0o1777
    if member.isreg():
        content = tar.extractfile(member)
        assert content is not None
        same = stat.S_IMODE(facts.st_mode) == member.mode & 0o777 and int(facts.st_mtime) == int(member.mtime)
        return same and path.read_bytes() == content.read()
    return True
