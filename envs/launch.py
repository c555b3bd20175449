"""How PID 1 of a sandbox becomes our runner: `/bin/sh -c LAUNCH RUNNER`, whatever starts the sandbox."""

import inspect
import shlex
from pathlib import Path

from agent_r3.envs import runner

UNUSABLE = "unusable image: "  # begins what the launch line says of an image in which no runner can run

_TOOLS = "bash cat chmod dd dirname head mkdir mkfifo rm stat tail"
_SHELL_RUNNER = Path(__file__).with_name("shell_runner.sh").read_text()

# The image's own Python, wherever it keeps one; bash where there is none. The shell turns into it, so the runner is
# PID 1.
LAUNCH = f"""
for python in python3 /testbed/.venv/bin/python /root/.venv/bin/python /opt/miniconda3/bin/python; do
    command -v "$python" >/dev/null 2>&1 && exec "$python" -I -S -B -c "$0"
done
# That name may stand for Python 2.
python -c 'import sys; sys.exit(sys.version_info < (3, 6))' >/dev/null 2>&1 && exec python -I -S -B -c "$0"
for tool in {_TOOLS}; do
    command -v $tool >/dev/null 2>&1 && continue
    echo "{UNUSABLE}it has neither Python 3.6 nor the tools of the runner in bash: no $tool" >&2
    exit 127
done
exec bash --norc --noprofile -c {shlex.quote(_SHELL_RUNNER)}
"""
RUNNER = inspect.getsource(runner)
