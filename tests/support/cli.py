"""`agent-r3` in this process."""

import sys
from collections.abc import Callable

import pytest

from agent_r3.cli.main import main

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run `agent-r3 ARGS` in this process: (exit code, stdout, stderr)."""

    def call(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["agent-r3", *map(str, args)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        return (code if isinstance(code, int) else 0), *capsys.readouterr()

    return call
