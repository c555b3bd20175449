"""Redis as the only place where roles meet: trajectories by turn, finished groups, the policy, heartbeats.

`TrajectoryWriter` (asyncio, rollout workers) and `GroupReader` (blocking, trainer) share keys, scripts and codecs.
"""

from agent_r3.store.connection import check_url, connection_url
from agent_r3.store.embedded import EmbeddedServer
from agent_r3.store.reader import GroupReader
from agent_r3.store.shared import Delivery, Policy, RoleState
from agent_r3.store.writer import TrajectoryWriter

__all__ = [
    "Delivery",
    "EmbeddedServer",
    "GroupReader",
    "Policy",
    "RoleState",
    "TrajectoryWriter",
    "check_url",
    "connection_url",
]
