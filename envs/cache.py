"""Where downloads and built tasks are kept between runs."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """`$AGENT_R3_CACHE`, else `$XDG_CACHE_HOME/agent-r3`, else `~/.cache/agent-r3`; made when it is not there."""
    own = os.environ.get("AGENT_R3_CACHE")
    folder = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agent-r3"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
