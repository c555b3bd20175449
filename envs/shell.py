"""A shell that persists without a process: each command starts from what the last one left, and saves what it leaves.

A bash that stays would hang with its first stuck command and could not be bounded command by command. Saved are the
working directory, variables, functions, aliases and options. A command that is killed, replaces its shell (`exec`) or
sets its own EXIT trap leaves the state as it found it.
"""

import shlex

_STATE = "/var/tmp/agent-r3/shell"

# `declare -p` lists read-only and special variables too, whose assignment fails: those errors are nobody's business.
_SCRIPT = """mkdir -p /var/tmp/agent-r3
shopt -s expand_aliases
[ ! -f {state} ] || . {state} >/dev/null 2>&1
__save_state() {{
    {{ declare -p; declare -f; alias -p; shopt -p; set +o; printf 'cd %q\\n' "$PWD"; }} >{state}.new 2>/dev/null
    mv -f {state}.new {state}
}}
trap '__code=$?; __save_state; exit $__code' EXIT
eval {command}
"""


def persistent(command: str) -> str:
    """Script that runs `command` from the state of the last one."""
    return _SCRIPT.format(state=_STATE, command=shlex.quote(command))
