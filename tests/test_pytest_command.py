"""Test commands, taken apart into what grading needs."""

import pytest

from agent_r3.envs.offline import TEST_COMMAND
from agent_r3.envs.pytest_command import PytestCommand, UnknownCommandError, parse_command


def test_the_offline_tasks_command() -> None:
    command = parse_command(TEST_COMMAND)
    assert dict(command.variables)["PYTHONPATH"] == ".:src"
    assert dict(command.variables)["PYTHONWARNINGS"] == "ignore::UserWarning,ignore::SyntaxWarning"
    assert command.interpreter == (".venv/bin/python", "-W", "ignore")
    assert command.arguments == ("-rA", "--color=no", "-p", "no:cacheprovider", "r2e_tests")


def test_r2es_command_under_a_display() -> None:
    command = parse_command(
        "PYTHONWARNINGS='ignore::UserWarning' QT_QPA_PLATFORM=minimal xvfb-run --auto-servernum "
        ".venv/bin/python -W ignore -m pytest -rA r2e_tests"
    )
    assert command.wrapper == ("xvfb-run", "--auto-servernum")
    assert ("QT_QPA_PLATFORM", "minimal") in command.variables
    assert command.interpreter[0] == ".venv/bin/python" and command.arguments == ("-rA", "r2e_tests")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("python -m pytest", PytestCommand((), (), ("python",), ())),
        ("python3.9 -Xdev -bB -W error -m pytest -k 'a or (b)'",
         PytestCommand((), (), ("python3.9", "-Xdev", "-bB", "-W", "error"), ("-k", "a or (b)"))),
        ("A= B='x y' /opt/env/bin/python -m pytest 'a[1-b *].py'",
         PytestCommand((("A", ""), ("B", "x y")), (), ("/opt/env/bin/python",), ("a[1-b *].py",))),
        ("xvfb-run -a -s '-screen 0 1x1x8' -n 7 python -m pytest x",
         PytestCommand((), ("xvfb-run", "-a", "-s", "-screen 0 1x1x8", "-n", "7"), ("python",), ("x",))),
    ],
)  # fmt: skip
def test_options_variables_and_quotes(text: str, parts: PytestCommand) -> None:
    assert parse_command(text) == parts


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("true", "a Python is expected where 'true' stands"),
        ("", "a Python is expected where 'it ends' stands"),
        ("A=1", "a Python is expected where 'it ends' stands"),
        ("pytest -rA", "a Python is expected where 'pytest' stands"),
        ("python run.py", "`-m pytest` is expected where 'run.py' stands"),
        ("python -m unittest", "`-m pytest` is expected where '-m' stands"),
        ("python -c pass -m pytest", "`-m pytest` is expected where '-c' stands"),
        ("python", "`-m pytest` is expected where 'it ends' stands"),
        ("cd x && python -m pytest", "it has the shell's '&'"),
        ("python -m pytest; true", "it has the shell's ';'"),
        ("python -m pytest $ARGS", "it has the shell's '$'"),
        ('python -m pytest "$ARGS"', "it has the shell's '$'"),
        ("python -m pytest `args`", "it has the shell's '`'"),
        ("python -m pytest test_*.py", "it has the shell's '*'"),
        ("python -m pytest 'x", "its quotes do not match"),
    ],
)
def test_anything_else_is_refused_with_what_is_wrong(text: str, problem: str) -> None:
    with pytest.raises(UnknownCommandError) as caught:
        parse_command(text)
    assert problem in str(caught.value)


def test_the_launched_command_keeps_variables_quotes_and_options() -> None:
    script = parse_command("A='x y' xvfb-run -a python -W 'ignore::A' -m pytest r2e_tests").launch("/l/launcher.py")
    assert "export A='x y'\n" in script and "unset PYTHONPATH\n" in script
    assert script.endswith("exec xvfb-run -a python -W ignore::A /l/launcher.py")
