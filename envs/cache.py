"""Where downloads and built tasks are kept between runs."""

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path


def cache_dir() -> Path:
    """`$AGENT_R3_CACHE`, else `$XDG_CACHE_HOME/agent-r3`, else `~/.cache/agent-r3`; made when it is not there."""
    own = os.environ.get("AGENT_R3_CACHE")
    folder = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agent-r3"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@asynccontextmanager
async def only_one(name: str) -> AsyncIterator[None]:
    """Processes that would make the same things in the cache wait for each other; a lock ends with its process."""
    with (cache_dir() / f"{name}.lock").open("w") as lock:
        await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)
        yield
