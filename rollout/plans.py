"""One provider of sandboxes for several workers of a process: what they announce is one plan."""

from agent_r3.envs.sandbox import Sandbox, SandboxProvider
from agent_r3.types import Task


class SharedProvider(SandboxProvider):
    """A worker's share of `provider`, which it does not close. Make the first with `of`, further ones with `share`.

    A provider has one plan; a share's announcement replaces its own part of it and comes first in it.
    """

    def __init__(self, provider: SandboxProvider, shares: "list[SharedProvider]") -> None:
        self._provider = provider
        self._shares = shares  # of the provider, the latest announcement first
        self._plan: list[Task] = []
        shares.append(self)

    @classmethod
    def of(cls, provider: SandboxProvider) -> "SharedProvider":
        return cls(provider, [])

    def share(self) -> "SharedProvider":
        """Another worker's share of the same provider."""
        return SharedProvider(self._provider, self._shares)

    async def prefetch(self, tasks: list[Task]) -> None:
        """See the protocol."""
        self._plan = list(tasks)
        self._shares.remove(self)
        self._shares.insert(0, self)
        await self._provider.prefetch([task for share in self._shares for task in share._plan])

    async def acquire(self, task: Task) -> Sandbox:
        """See the protocol."""
        return await self._provider.acquire(task)

    async def acquire_for_grading(self, task: Task) -> Sandbox:
        """See the protocol."""
        return await self._provider.acquire_for_grading(task)

    async def close(self) -> None:
        """Takes this share out of the plan."""
        await self.prefetch([])
