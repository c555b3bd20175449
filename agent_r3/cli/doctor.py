"""`agent-r3 doctor`: is everything there, and what to do if not."""

from typing import Annotated

import typer


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of the table.")] = False,
) -> None:
    """Check every part this machine needs and say what to do about what is missing; exit code 1 if one is.

    Example: agent-r3 doctor
    """
    import json

    from rich.console import Console
    from rich.table import Table

    from agent_r3.diagnose import diagnose

    findings = diagnose()
    if as_json:
        print(json.dumps([finding.as_dict() for finding in findings]))
    else:
        table = Table("part", "state", "found", "what to do", title="agent-r3 doctor")
        for finding in findings:
            table.add_row(finding.part, "ok" if finding.ok else "[red]missing[/red]", finding.found, finding.advice)
        Console().print(table)
    if not all(finding.ok or finding.optional for finding in findings):
        raise typer.Exit(1)
