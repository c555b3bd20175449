"""What the processes in a container of the stack see of it: who they are, what they may become, what is mounted."""

import re
from dataclasses import dataclass

from tests.stack.stack import Container, Stack

# Not every image has more than sh and cat.
_LOOK = """
cat /proc/[0-9]*/status 2>/dev/null
echo ---
cat /proc/1/status
echo ---
cat /proc/mounts
echo ---
for path in /var/run/docker.sock /run/docker.sock; do [ ! -e "$path" ] || echo "$path"; done
"""


@dataclass(frozen=True, slots=True)
class Inside:
    container: Container
    users: frozenset[int]  # real, effective, saved and file system ids of all processes
    capabilities: int  # bits of those that the first process could ever have
    no_new_privileges: bool  # of the first process
    root_options: frozenset[str]  # of the mount at /
    engine_sockets: frozenset[str]  # of Docker, by their paths


def look_inside(stack: Stack, container: Container) -> Inside:
    """The container must be running."""
    statuses, first, mounts, sockets = stack.exec(container, "sh", "-c", _LOOK).split("---\n")
    users = [int(number) for line in re.findall(r"^Uid:(.*)$", statuses, re.MULTILINE) for number in line.split()]
    mounted = [(fields[1], fields[3]) for fields in map(str.split, mounts.splitlines())]
    return Inside(
        container=container,
        users=frozenset(users),
        capabilities=int(re.findall(r"^CapBnd:\s*(\w+)$", first, re.MULTILINE)[0], 16),
        no_new_privileges=bool(re.search(r"^NoNewPrivs:\s*1$", first, re.MULTILINE)),
        root_options=frozenset([options for place, options in mounted if place == "/"][-1].split(",")),
        engine_sockets=frozenset(sockets.split()) | {place for place, _ in mounted if place.endswith("docker.sock")},
    )
