"""Names of tests, as R2E-Gym has them (`execution_log_parser.py`)."""

import re

_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def clean_name(name: str) -> str:
    """A test's name without colours of any code and without what stands after the first " - "."""
    return _COLOUR.sub("", name).split(" - ")[0]
