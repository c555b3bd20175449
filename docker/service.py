"""What the stack wraps around a role: `service.py run COMMAND...` keeps it, `service.py health URL...` asks how it is.

A role that ends with status 2 has said in its last line what must be mended: a wrong password, a file that is missing.
Were the container to end with it, Docker would start it over and over and call it neither well nor ill. So it stays,
the role is tried again after a pause, and until it serves, the health check shows that line. Every other end of the
role is the container's. Only the standard library, so that it runs in every image.
"""

import signal
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO

MENDABLE = 2
PAUSE_S = 10.0
TIMEOUT_S = 10.0
SAID = Path(tempfile.gettempdir()) / "agent-r3-said"


def run(command: list[str], *, pause_s: float = PAUSE_S, said: Path = SAID) -> int:
    """Run the role until it ends with another status than 2, or SIGTERM or SIGINT comes. Returns the exit status."""
    stop = threading.Event()
    role: subprocess.Popen[bytes] | None = None

    def forward(number: int, frame: object) -> None:
        stop.set()
        if role is not None:
            role.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    said.unlink(missing_ok=True)
    while True:
        role = subprocess.Popen(command, stderr=subprocess.PIPE)
        if stop.is_set():  # it came before there was a role to forward it to
            role.send_signal(signal.SIGTERM)
        assert role.stderr is not None
        last: list[str] = []
        reader = threading.Thread(target=_pass_on, args=(role.stderr, last), daemon=True)
        reader.start()
        code = role.wait()
        reader.join(timeout=2)  # a child of the role may hold the pipe open
        if code != MENDABLE or stop.is_set():
            return code if code >= 0 else 128 - code
        said.write_text((last or ["the role ended with status 2 and said nothing"])[-1] + "\n")
        if stop.wait(pause_s):
            return code


def _pass_on(stream: IO[bytes], last: list[str]) -> None:
    """Copy lines to our own stderr; `last` is the latest that is not blank."""
    for line in stream:
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()
        if text := line.decode(errors="replace").strip():
            last[:] = [text]


def health(urls: list[str], *, said: Path = SAID) -> int:
    """0 when every URL answers 200, else 1; prints the one line that says why."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for url in urls:
        try:
            with opener.open(url, timeout=TIMEOUT_S) as answer:
                answer.read()
        except urllib.error.HTTPError as exc:
            print(f"{url}: {exc.code} {exc.read(500).decode(errors='replace').strip()}")
            return 1
        except OSError as exc:
            print(said.read_text().strip() if said.is_file() else f"{url}: {getattr(exc, 'reason', exc)}")
            return 1
    print("ok")
    return 0


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] not in ("run", "health"):
        sys.exit("usage: service.py run COMMAND... | service.py health URL...")
    sys.exit(run(sys.argv[2:]) if sys.argv[1] == "run" else health(sys.argv[2:]))
