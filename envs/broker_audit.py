"""The broker's audit log: one JSON line an event, and why a request was refused.

The file may be moved away at any time: SIGHUP opens a new one of the same name, as logrotate expects.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

import structlog
from structlog.typing import WrappedLogger

from agent_r3.errors import UserError

log = structlog.get_logger(__name__)

_STDOUT = 1


class Reason(StrEnum):
    """Why a request was not let through; the field `refused` of its line."""

    TOKEN = "token"  # missing or wrong
    OPERATION = "operation"  # there is none of that name
    MALFORMED = "malformed"  # no frame, or not what the operation takes
    TOO_LARGE = "too_large"
    LEASE = "lease"  # it has ended, or there never was one
    CLOSING = "closing"  # the broker is being stopped
    TASK = "task"  # not in the datasets that are served
    SANDBOX = "sandbox"  # not one that the client has
    SANDBOXES = "sandbox_quota"
    GRADINGS = "grading_quota"
    STARTS = "start_quota"


class Refused(Exception):
    """A request that is not let through; `error` is what the client hears."""

    def __init__(self, reason: Reason, error: Exception) -> None:
        super().__init__(str(error))
        self.reason = reason
        self.error = error


class AuditFile:
    """Where lines go: a file that is appended to, or stdout where `path` is None.

    A line that cannot be written does not stop the broker: `problem` says so until one can be, for the health check.
    """

    def __init__(self, path: Path | None) -> None:
        """Raises OSError."""
        self._path = path
        self._file = self._open()
        self._torn = False  # the last line was cut, by a full disk
        self.problem: str | None = None

    def _open(self) -> io.FileIO:
        """Unbuffered, so that a line is there, or is known not to be, when its request is answered."""
        return io.FileIO(_STDOUT, "a", closefd=False) if self._path is None else io.FileIO(str(self._path), "a")

    def info(self, line: str) -> None:
        """structlog's last step: write one line."""
        data = b"\n" * self._torn + line.encode() + b"\n"
        try:
            self._torn = self._file.write(data) != len(data)
            problem = "it was written in part only" if self._torn else None
        except OSError as exc:
            problem = exc.strerror or str(exc)
        if problem and not self.problem:
            log.error("the audit log cannot be written", path=str(self._path or "stdout"), error=problem)
        self.problem = problem and f"the audit log {self._path or 'on stdout'} cannot be written: {problem}"

    def reopen(self) -> None:
        """Go on in a new file where the old one was moved away. Where that fails, the old one is kept."""
        try:
            fresh = self._open()
        except OSError as exc:
            log.error("the audit log cannot be opened again", path=str(self._path), error=exc.strerror)
            return
        self._file.close()
        self._file, self._torn = fresh, False

    def close(self) -> None:
        self._file.close()


@contextmanager
def open_audit_log(path: Path | None) -> Iterator[AuditFile]:
    """Events are appended to `path`, or go to stdout. Raises UserError."""
    try:
        file = AuditFile(path)
    except OSError as exc:
        raise UserError(f"--audit-log {path} cannot be written: {exc.strerror}") from exc
    try:
        yield file
    finally:
        file.close()


def audit_logger(file: AuditFile) -> WrappedLogger:
    """A logger that makes one JSON line of each event."""
    logger: WrappedLogger = structlog.wrap_logger(
        file,
        processors=[structlog.processors.TimeStamper(fmt="iso", utc=True), structlog.processors.JSONRenderer()],
    )
    return logger
