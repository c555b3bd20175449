"""What the supervisor of one machine does with roles that die."""

import sys
import time
from pathlib import Path

from agent_r3.supervise import Role

# Starts a helper in its own process group, says its pid, and dies of SIGKILL.
_DIES = """
import os, signal, subprocess, sys
helper = subprocess.Popen(["sleep", "1000"])
print(helper.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_a_role_that_is_started_again_leaves_no_helper_of_its_predecessor(tmp_path: Path) -> None:
    log = tmp_path / "role.log"
    role = Role("trainer", [sys.executable, "-c", _DIES], log, 1.0, again=["sleep", "1000"])
    role.start()
    while role.poll() is None:
        time.sleep(0.01)
    helper = int(log.read_text().split()[0])
    assert alive(helper)
    role.start_again()
    deadline = time.monotonic() + 10
    while alive(helper) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(helper) and role.poll() is None
    await role.stop()
