"""The error tree. Two kinds matter everywhere: what the user can mend, and what the infrastructure did.

An agent's own failure (a bad call, a timed-out command, running out of turns) is data, never an exception.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class AgentR3Error(Exception):
    """Root of every error this package raises on purpose."""


class UserError(AgentR3Error):
    """Something the user can mend: config, paths, data, a missing tool. The CLI prints it as one line, exit code 2.

    The message says what is wrong, where, and what to do.
    """


class ConfigError(UserError):
    """A config key or value is wrong."""


class DataError(UserError):
    """A dataset row, a model folder or a file does not have the shape it must have."""


class ContractError(AgentR3Error):
    """An invariant between processes broke (row count, gap, stale version). Carries the numbers; never retried."""


class ClaimLostError(ContractError):
    """A group is not this process's any more: another one holds or published it, or the run was reset."""


class RoutingError(ContractError):
    """Routing rows that are missing, overlapping, out of range or duplicated."""


class InfraError(AgentR3Error):
    """Infrastructure failed. Never an observation, never a reward: the episode is retried, then left out.

    `kind` is the counter it is booked under, for instance `sandbox`, `engine`, `store`, `grading`.
    """

    kind = "infra"


class SandboxError(InfraError):
    """The container could not be created, died, or its channel broke."""

    kind = "sandbox"


class SandboxDeadError(SandboxError):
    """A sandbox that was running is gone: killed, out of memory, or its engine with it."""

    kind = "sandbox_dead"


class DaemonError(SandboxError):
    """The Docker engine does not answer, or answers with an error of its own."""

    kind = "docker"


class DiskFullError(SandboxError):
    """A sandbox outgrew its share of the disk, or the disk has fallen below its floor."""

    kind = "disk"


class ImagePullError(SandboxError):
    """An image could not be pulled, after retries."""

    kind = "image_pull"


class BrokerError(SandboxError):
    """The sandbox broker is gone or answered with an error."""

    kind = "broker"


class QuotaError(BrokerError):
    """A client has used up its share of the broker for now; asking again after `retry_after_s` may help."""

    kind = "quota"

    def __init__(self, text: str, retry_after_s: float = 1.0) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class EngineError(InfraError):
    """The inference engine is gone, refused, or answered with an error."""

    kind = "engine"


class StoreError(InfraError):
    """Redis could not be reached or answered with an error."""

    kind = "store"


class GradingError(InfraError):
    """The hidden tests could not be run for a reason that is not the agent's."""

    kind = "grading"


@contextmanager
def boundary(error: type[AgentR3Error], what: str, *catch: type[BaseException]) -> Iterator[None]:
    """Name a foreign failure where it enters: `with boundary(SandboxError, "start container x", DockerException): ...`.

    Exceptions of `catch` become `error(f"{what}: {type}: {message}")`; our own errors and everything else pass.
    """
    try:
        yield
    except AgentR3Error:
        raise
    except catch as exc:
        detail = " ".join(str(exc).split())[:500]
        raise error(f"{what}: {type(exc).__name__}: {detail}") from exc


def first_failure(failed: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure that ended the others of a task group, also of one inside another."""
    first = failed.exceptions[0]
    return first_failure(first) if isinstance(first, BaseExceptionGroup) else first
