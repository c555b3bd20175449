"""pytest's short test summary -> {test: status}, under R2E-Gym's naming (`execution_log_parser.py`).

Names are the parts after the file joined with "." and cut at " - "; SKIPPED, XFAIL and XPASS are left out; a file that
could not be collected has the name "". Departures from R2E's own parser, which can be misled by a test's output: a
line's status is its first word (not any word in it), colours of any code are stripped, and the summary is the last
section of that title (not whatever stands after its first mention).
"""

import re

_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_TITLE = re.compile(r"^=+ short test summary info =+$")
_RULE = re.compile(r"^=+ .* =+$")
_LINE = re.compile(r"^(PASSED|FAILED|ERROR) (\S.*)$")


def parse_summary(output: str) -> dict[str, str]:
    """Statuses of the last short test summary in a pytest log; empty when there is none."""
    lines = [_COLOUR.sub("", line).rstrip() for line in output.split("\n")]
    titles = [index for index, line in enumerate(lines) if _TITLE.match(line)]
    statuses: dict[str, str] = {}
    for line in lines[titles[-1] + 1 :] if titles else []:
        if _RULE.match(line):  # "=== 2 failed, 66 passed in 0.31s ===": what follows is not pytest's
            break
        if found := _LINE.match(line):
            # pytest lists passed tests first, failed ones last, so of equal names the worse status stays.
            statuses[clean_name(".".join(found[2].split("::")[1:]))] = found[1]
    return statuses


def clean_name(name: str) -> str:
    """A test's name without colours and without the message after " - "."""
    return _COLOUR.sub("", name).split(" - ")[0]
