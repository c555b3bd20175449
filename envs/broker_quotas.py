"""What one client may have of a broker: sandboxes and gradings at a time, and sandbox starts a minute.

A client is who gives the same name, so that a new lease brings no new starts. The quota of sandboxes is a lease's.
"""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from agent_r3.envs.broker_audit import Reason, Refused
from agent_r3.errors import QuotaError

_ASK_AGAIN_S = 1.0  # a grading ends when it ends
_LEAST_S = 0.05  # a client that asks again at once would only be refused again


@dataclass(frozen=True, slots=True)
class Quotas:
    """Of one client."""

    sandboxes: int = 256
    gradings: int = 64
    starts_per_minute: int = 1_200


class Usage:
    """How much of its quotas each client uses by now."""

    def __init__(self, quotas: Quotas, *, minute_s: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._quotas = quotas
        self._minute_s = minute_s
        self._clock = clock
        self._starts: defaultdict[str, deque[float]] = defaultdict(deque)  # times, oldest first
        self._gradings: Counter[str] = Counter()

    def start(self, client: str) -> None:
        """Count one start of a sandbox. Raises Refused with a QuotaError that says when the next one is free."""
        now, starts = self._clock(), self._starts[client]
        self._forget(now)
        if len(starts) >= self._quotas.starts_per_minute:
            raise Refused(
                Reason.STARTS,
                QuotaError(
                    f"client {client} has started {len(starts)} sandboxes in a minute, as many as this broker gives to "
                    "one; raise its --max-starts-per-minute, or lower rollout.concurrency",
                    max(_LEAST_S, starts[0] + self._minute_s - now),
                ),
            )
        self._starts[client].append(now)

    def _forget(self, now: float) -> None:
        """Starts of more than a minute ago, and clients that have no other."""
        for client, starts in list(self._starts.items()):
            while starts and starts[0] <= now - self._minute_s:
                starts.popleft()
            if not starts:
                del self._starts[client]

    @contextmanager
    def grading(self, client: str) -> Iterator[None]:
        """Count a grading while it runs. Raises Refused with a QuotaError."""
        if self._gradings[client] >= self._quotas.gradings:
            raise Refused(
                Reason.GRADINGS,
                QuotaError(
                    f"client {client} has {self._gradings[client]} gradings under way, as many as this broker gives to "
                    "one; raise its --max-gradings",
                    _ASK_AGAIN_S,
                ),
            )
        self._gradings[client] += 1
        try:
            yield
        finally:
            self._gradings[client] -= 1
            if not self._gradings[client]:
                del self._gradings[client]
