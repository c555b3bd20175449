"""What crosses between broker and client: addresses, the token, typed requests, binary frames and typed errors.

A request is `POST /v1/OPERATION`, its body and the answer's body are frames: 4 bytes of length, a JSON header of that
length, then plain bytes (file content, a patch, a command's output and report), which need no encoding that way.
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, InstanceOf, ValidationError

from agent_r3 import errors
from agent_r3.envs.sandbox import ExecResult, FileMissingError
from agent_r3.errors import AgentR3Error, BrokerError, ConfigError, QuotaError
from agent_r3.types import Grade

TOKEN_VARIABLE = "AGENT_R3_BROKER_TOKEN"
LEASE_HEADER = "Agent-R3-Lease"
FAILED, LEASE_ENDED = 422, 410  # HTTP status of an answer that is an error; of one that says so of the whole lease
LARGEST_BODY = 65 << 20  # bytes of a request; a sandbox's diff, which comes back as the patch to grade, has 64 MiB
HEARTBEAT_S = 30.0  # between pings of a lease, from both ends; one that is not answered in half of it ends the lease

_HEAD = 4
_LARGEST_HEADER = 16 << 20
_LEAST_TOKEN = 16  # characters


class Address(NamedTuple):
    """Where a broker listens: a unix socket's path, or a host and a port."""

    path: str | None
    host: str
    port: int

    @property
    def base_url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return "http://broker" if self.path else f"http://{host}:{self.port}"

    def __str__(self) -> str:
        return f"unix://{self.path}" if self.path else self.base_url


def parse_address(text: str, key: str) -> Address:
    """Read `unix:///PATH` or `http://HOST:PORT`; `key` names the setting in the error. Raises ConfigError."""
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        parts, host, port = urlsplit(""), None, None
    if parts.scheme == "unix" and not parts.netloc and parts.path.startswith("/"):
        return Address(parts.path, "", 0)
    if parts.scheme == "http" and host and port is not None and parts.path in ("", "/") and parts.username is None:
        return Address(None, host, port)
    raise ConfigError(f"{key}: {text!r} is neither unix:///PATH nor http://HOST:PORT")


def read_token(file: Path | None) -> str | None:
    """The token in `file`, else in AGENT_R3_BROKER_TOKEN; None where there is neither. Raises ConfigError."""
    if file is None:
        token, where = os.environ.get(TOKEN_VARIABLE), TOKEN_VARIABLE
    else:
        try:
            token, where = file.read_text().strip(), str(file)
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError(f"the broker's token file {file} cannot be read: {exc}") from exc
    if token is not None and not (token.isascii() and token.isprintable() and len(token) >= _LEAST_TOKEN):
        raise ConfigError(f"the broker's token in {where} must be one line of at least {_LEAST_TOKEN} ASCII characters")
    return token


# What a sandbox or a grading may raise, for the agent, the worker or the user to hear.
CROSSING = (AgentR3Error, FileMissingError, OSError, ValueError)

Text = InstanceOf[str]  # any string, lone surrogates too, which stand for bytes of file names that are not UTF-8
_Size = Annotated[int, Field(ge=0, le=LARGEST_BODY)]


class Message(BaseModel):
    """Header of a request; what its body holds stands beside each kind."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def read(cls, header: dict[str, Any]) -> Self:
        """Raises ValueError, in one line, for a header that is not this message."""
        try:
            return cls.model_validate(header)
        except ValidationError as exc:
            problems = "; ".join(f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in exc.errors())
            raise ValueError(f"a request for the broker: {problems}") from exc


class OfTasks(Message):
    """prefetch, and health: are these served?"""

    tasks: tuple[Text, ...] = ()


class OfTask(Message):
    """acquire; grade, whose body is the patch."""

    task: Text


class OfSandbox(Message):
    """diff, close."""

    sandbox: Text


class Exec(OfSandbox):
    """Body: the command's stdin."""

    command: Text
    timeout_s: float = Field(allow_inf_nan=False)
    cwd: Text | None
    max_output_bytes: _Size
    persistent: bool
    max_report_bytes: _Size


class Put(OfSandbox):
    """Body: the file's content."""

    path: Text
    mode: int


class Get(OfSandbox):
    path: Text
    max_bytes: _Size


def unknown_task(task_id: str) -> str:
    return (
        f"the broker has no task {task_id}; the config that it was started with must have the same dataset, and "
        "tasks.include and tasks.exclude that let this task in"
    )


def frame(header: dict[str, Any], body: bytes = b"") -> bytes:
    text = json.dumps(header).encode()  # ASCII, in which lone surrogates have escapes
    return len(text).to_bytes(_HEAD, "big") + text + body


def unframe(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and body. Raises ValueError for what is no frame."""
    size = int.from_bytes(data[:_HEAD], "big")
    if len(data) < _HEAD + size or size > _LARGEST_HEADER:
        raise ValueError(f"{len(data)} bytes are no frame")
    header = json.loads(data[_HEAD : _HEAD + size])
    if not isinstance(header, dict):
        raise ValueError("the header is no object")
    return header, data[_HEAD + size :]


def result_frame(result: ExecResult) -> bytes:
    """The body is the output, then the report."""
    names = ("total_bytes", "exit_code", "timed_out", "truncated", "seconds")
    header = {name: getattr(result, name) for name in names}
    return frame({**header, "report_bytes": len(result.report)}, result.output + result.report)


def result_from(header: dict[str, Any], body: bytes) -> ExecResult:
    at = len(body) - header.pop("report_bytes")
    return ExecResult(output=body[:at], report=body[at:], **header)


def grade_frame(grade: Grade) -> bytes:
    """The body is the log."""
    header = dataclasses.asdict(grade)
    return frame(header, header.pop("log"))


def grade_from(header: dict[str, Any], log: bytes) -> Grade:
    fields: dict[str, Any] = {  # JSON has lists for our tuples
        name: tuple(value) if isinstance(value, list) else value for name, value in header.items()
    }
    return Grade(**fields, log=log)


def _subtypes(kind: type[AgentR3Error]) -> dict[str, type[AgentR3Error]]:
    found = {kind.__name__: kind}
    for subtype in kind.__subclasses__():
        found |= _subtypes(subtype)
    return {name: subtype for name, subtype in found.items() if subtype.__module__ == errors.__name__}


def error_header(exc: Exception) -> dict[str, Any]:
    """How an error of `CROSSING` is sent."""
    match exc:
        case QuotaError():
            return {"error": QuotaError.__name__, "text": str(exc), "retry_after_s": exc.retry_after_s}
        case AgentR3Error():
            named = next(kind for kind in type(exc).__mro__ if kind.__module__ == errors.__name__)
            return {"error": named.__name__, "text": str(exc)}
        case OSError(errno=int()):
            path = exc.filename if isinstance(exc.filename, str) else None
            return {"error": "OSError", "errno": exc.errno, "text": exc.strerror or "", "path": path}
        case FileMissingError() | ValueError():
            return {
                "error": "FileMissingError" if isinstance(exc, FileMissingError) else "ValueError",
                "text": str(exc),
            }
    return {"error": BrokerError.__name__, "text": f"the broker failed: {type(exc).__name__}: {exc}"}


def error_from(header: dict[str, Any]) -> Exception:
    """The error that `error_header` has described; BrokerError for one of a kind that is not known here."""
    kind, text = str(header.get("error")), str(header.get("text"))
    match kind:
        case "FileMissingError":
            return FileMissingError(text)
        case "OSError":
            return OSError(int(header["errno"]), text, header.get("path"))
        case "ValueError":
            return ValueError(text)
        case "QuotaError":
            return QuotaError(text, float(header["retry_after_s"]))
    return _subtypes(AgentR3Error).get(kind, BrokerError)(text)
