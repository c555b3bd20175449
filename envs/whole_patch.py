"""A patch that is taken over whole: a Harbor agent's change, or the bug that makes a SWE-smith task."""

from agent_r3.envs import workdir
from agent_r3.envs.sandbox import Sandbox
from agent_r3.errors import GradingError
from agent_r3.types import Task

_TIMEOUT_S = 120.0


async def apply_whole(sandbox: Sandbox, task: Task, patch: bytes) -> str | None:
    """git's complaint about a patch that does not apply, None when it was applied.

    Raises SandboxError, GradingError when git does not run as it should.
    """
    await sandbox.put(workdir.PATCH, patch)
    result = await sandbox.exec(workdir.apply(task.workdir), timeout_s=_TIMEOUT_S, cwd="/")
    if not result.exit_code:
        return None
    complaint = " ".join(result.text.split())[-300:]
    if result.exit_code not in (1, 128):  # git's codes for a patch it refuses
        raise GradingError(f"{sandbox.id}: git apply ended with {result.exit_code}: {complaint}")
    return complaint
