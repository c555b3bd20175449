"""The launcher of gradings on this machine: a folder of files as the repository, pytest of our own environment."""

import json
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agent_r3.envs import pytest_launcher
from agent_r3.envs.pytest_command import parse_command

# Plugins of our own environment stay out; a real test command names its interpreter and variables like this.
COMMAND = f"PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 PYTHONPATH=.:src {sys.executable} -W ignore -m pytest -p no:cacheprovider"


@dataclass(frozen=True, slots=True)
class Launched:
    """What came of one run."""

    report: bytes
    key: bytes
    exit_status: int
    output: str


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def launch(folder: Path, files: Mapping[str, str], command: str = f"{COMMAND} .") -> Launched:
    """Run `command` in `folder` with the launcher in pytest's place, as a sandbox does: key on stdin, report on 3."""
    write_files(folder, files)
    key = secrets.token_bytes(pytest_launcher.KEY_BYTES)
    parsed = parse_command(command)
    launcher = folder.parent / f"launcher-{secrets.token_hex(8)}" / "launcher.py"
    launcher.parent.mkdir()
    shutil.copyfile(pytest_launcher.__file__, launcher)
    reading, writing = os.pipe()
    process = subprocess.Popen(
        ["bash", "-c", f"exec 3>&{writing} {writing}>&-; {parsed.launch(shlex.quote(str(launcher)))}"],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(folder.parent)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(writing,),
    )
    os.close(writing)
    chunks: list[bytes] = []

    def drain() -> None:
        with os.fdopen(reading, "rb") as pipe:
            chunks.append(pipe.read())

    reader = threading.Thread(target=drain)
    reader.start()
    output, _ = process.communicate(key + json.dumps({"arguments": parsed.arguments}).encode(), timeout=60)
    reader.join()
    return Launched(b"".join(chunks), key, process.returncode, output.decode(errors="replace"))
