"""Reading image archives: what `docker save` writes, and OCI image layouts, both as one uncompressed tar file."""

import gzip
import json
import platform
import re
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from agent_r3.errors import DataError, boundary

_NAME_ANNOTATIONS = ("io.containerd.image.name", "org.opencontainers.image.ref.name")
_DIGEST = re.compile("sha256:[0-9a-f]{64}")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True, slots=True)
class SavedImage:
    """One image of an archive."""

    names: tuple[str, ...]
    layers: tuple[str, ...]  # diff ids, `sha256:HEX` of each uncompressed layer, lowest first
    members: tuple[str, ...]  # where the archive has them
    environment: Mapping[str, str]


class Archive:
    """An open image archive. Raises DataError for whatever is not as it must be."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with boundary(DataError, f"read image archive {path} (an uncompressed tar)", tarfile.TarError, OSError):
            self._tar = tarfile.open(path, "r:")  # noqa: SIM115  (closed by `close`)
        with boundary(DataError, f"read image archive {path}", tarfile.TarError, OSError):
            self._members = {member.name.removeprefix("./"): member for member in self._tar}

    def close(self) -> None:
        self._tar.close()

    def images(self) -> list[SavedImage]:
        """Every image in it that this machine can run."""
        with boundary(DataError, f"image archive {self._path}", KeyError, TypeError, AttributeError, IndexError):
            if "manifest.json" in self._members:
                return [
                    self._image(entry.get("RepoTags") or (), entry["Config"], entry["Layers"])
                    for entry in self._json("manifest.json")
                ]
            if "index.json" in self._members:
                return list(self._oci_images(self._json("index.json")["manifests"], ()))
        raise DataError(f"{self._path} is no image archive: it has neither manifest.json nor index.json")

    @contextmanager
    def layer(self, member: str) -> Iterator[IO[bytes]]:
        """The uncompressed tar stream of a layer."""
        with boundary(DataError, f"layer {member} of {self._path}", OSError, EOFError, tarfile.TarError):
            raw = self._open(member)
            magic = raw.read(4)
            raw.seek(0)
            if magic == b"\x28\xb5\x2f\xfd":
                raise DataError(f"layer {member} of {self._path} is compressed with zstd; save it with gzip or none")
            yield cast("IO[bytes]", gzip.GzipFile(fileobj=raw)) if magic[:2] == b"\x1f\x8b" else raw

    def _oci_images(self, manifests: list[dict[str, Any]], names: tuple[str, ...]) -> Iterator[SavedImage]:
        for entry in manifests:
            annotations = entry.get("annotations") or {}
            own = tuple(annotations[key] for key in _NAME_ANNOTATIONS if key in annotations)[:1] or names
            architecture = (entry.get("platform") or {}).get("architecture")
            if architecture not in (None, _ARCHITECTURES.get(platform.machine())):
                continue
            content = self._json(_blob(entry["digest"]))
            if "manifests" in content:
                yield from self._oci_images(content["manifests"], own)
            else:
                layers = [_blob(layer["digest"]) for layer in content["layers"]]
                yield self._image(own, _blob(content["config"]["digest"]), layers)

    def _image(self, names: tuple[str, ...] | list[str], config: str, members: list[str]) -> SavedImage:
        tree = self._json(config)
        layers = tuple(tree["rootfs"]["diff_ids"])
        if len(layers) != len(members):
            raise DataError(f"image archive {self._path}: {len(members)} layers, but {len(layers)} in {config}")
        if not all(_DIGEST.fullmatch(layer) for layer in layers):  # they become names of folders
            raise DataError(f"image archive {self._path}: {config} has a layer that is no sha256 digest: {layers}")
        pairs = (tree.get("config") or {}).get("Env") or ()
        environment = {name: value for name, _, value in (pair.partition("=") for pair in pairs)}
        return SavedImage(tuple(names), layers, tuple(members), environment)

    def _open(self, name: str) -> IO[bytes]:
        try:
            file = self._tar.extractfile(self._members[name])
        except KeyError:
            file = None
        if file is None:
            raise DataError(f"image archive {self._path} has no file {name}")
        return file

    def _json(self, name: str) -> Any:
        with boundary(DataError, f"image archive {self._path}: {name}", ValueError, OSError):
            return json.load(self._open(name))


def _blob(digest: str) -> str:
    algorithm, _, value = digest.partition(":")
    return f"blobs/{algorithm}/{value}"
