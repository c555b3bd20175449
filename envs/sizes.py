"""The sizes of a sandbox config, in bytes."""

from dataclasses import dataclass
from typing import Self

from docker.errors import DockerException
from docker.utils import parse_bytes

from agent_r3.config import SandboxConfig
from agent_r3.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Sizes:
    """What `sandbox.memory`, `file_size`, `disk` and `disk_floor` say, in bytes."""

    memory: int
    file_size: int
    disk: int
    disk_floor: int

    @classmethod
    def of(cls, config: SandboxConfig) -> Self:
        """Raises ConfigError for a text that is no size."""
        return cls(
            memory=_bytes("memory", config.memory),
            file_size=_bytes("file_size", config.file_size),
            disk=_bytes("disk", config.disk),
            disk_floor=_bytes("disk_floor", config.disk_floor),
        )


def _bytes(key: str, text: str) -> int:
    try:
        return int(parse_bytes(text))
    except DockerException as exc:
        raise ConfigError(f"sandbox.{key}: `{text}` is not a size; write a number and b, k, m or g, like 2g") from exc
