"""PID 1 of a sandbox: runs commands and moves files on behalf of the host, over its stdin and stdout.

The host passes this file's source to the image's own Python (`python3 -I -S -B -c SOURCE`), so it uses the standard
library of any Python from 3.6 and nothing else, and imports little: start-up is paid once per container.

A message is a list of byte fields: a 4-byte field count, then each field with its 4-byte length (`pack`). Requests:

    run, command, cwd, timeout in ms, output cap, input, report cap
        -> done, head, tail, total bytes, exit code, why, microseconds, report
    put, path, mode, data    -> done
    get, path, largest size  -> done, data
    stop                     -> no answer of its own: ends the command that runs, if one does

The greeting is `ready, 1`, or `ready, 0` where this process could not be closed to its children (see `protect`).

A command's stdin holds `input` (which must fit a pipe's buffer) and ends there. With a report cap above 0 the command
finds a pipe at descriptor 3; what is written there comes back as `report`, one byte above the cap when it was more.

An OSError is answered as `oserror, errno, text`; a path without a regular file as `missing, text`. Whatever else goes
wrong ends the process, and with it the container: the host takes that as an infrastructure failure.

As PID 1 it is the parent that every orphan falls to, so `kill(-1)` and waiting until no child is left ends whatever a
command started, double-forked, in a session of its own or deaf to SIGTERM.
"""

import os
import select
import time

# The C module: `signal` itself imports enum, which is a third of the start-up time.
from _signal import SIG_DFL, SIGINT, SIGKILL, SIGPIPE, SIGXFSZ, signal  # type: ignore[import-not-found]

PR_SET_DUMPABLE = 4
CHUNK = 1 << 16
FLOOD = 256 << 20  # bytes of output after which a command is ended: nobody reads that much, `yes` never stops
LONGEST_WAIT_S = 0.05


def pack(fields: "list[bytes]") -> bytes:
    return len(fields).to_bytes(4, "big") + b"".join(len(f).to_bytes(4, "big") + f for f in fields)


def read_exactly(size: int) -> bytes:
    parts = []
    while size:
        data = os.read(0, min(size, 1 << 20))
        if not data:
            os._exit(0)  # the host has gone; the container ends with us
        parts.append(data)
        size -= len(data)
    return b"".join(parts)


def read_message() -> "list[bytes]":
    count = int.from_bytes(read_exactly(4), "big")
    return [read_exactly(int.from_bytes(read_exactly(4), "big")) for _ in range(count)]


def send(*fields: bytes) -> None:
    write_all(1, pack(list(fields)))


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view[: 1 << 20]) :]


class Output:
    """The first and last half of at most `cap` bytes, and the count of all."""

    def __init__(self, cap: int) -> None:
        self.half = max(cap // 2, 1)
        self.head = bytearray()
        self.tail = bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self.half - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        self.tail += data
        if len(self.tail) > self.half + (1 << 20):  # cut now and then, not on every chunk
            del self.tail[: -self.half]

    def ends(self) -> "tuple[bytes, bytes]":
        return bytes(self.head), bytes(self.tail[-self.half :])


class Report:
    """The first `cap` bytes of a report, and one more where there were more."""

    def __init__(self, cap: int) -> None:
        self.most = cap + 1
        self.data = bytearray()

    def add(self, data: bytes) -> None:
        self.data += data[: self.most - len(self.data)]


def protect() -> bool:
    """Close this process to ptrace and /proc/PID/{mem,fd} of processes of the same user; what it runs is open again.

    Whoever could write there could answer in our place. False where the image's Python cannot call prctl.
    """
    try:
        import _ctypes  # its parent, ctypes, would be a third of the start-up time

        prctl = _ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl")  # type: ignore[arg-type]
        return bool(_ctypes.call_function(prctl, (PR_SET_DUMPABLE, 0, 0, 0, 0)) == 0)
    except (ImportError, AttributeError, OSError):
        return False


def find_bash() -> bytes:
    """Its path, so that commands need not search PATH for it: in a forked Python that costs as much as bash itself."""
    for folder in os.environb.get(b"PATH", b"/usr/bin:/bin").split(b":"):
        path = folder + b"/bash"
        if folder and os.access(path, os.X_OK):
            return path
    return b"/bin/bash"


BASH = find_bash()
INHERITED = (SIGPIPE, SIGXFSZ)  # Python ignores these, and an ignored signal is inherited
score_fd = -1  # /proc/self/oom_score_adj, opened before `protect` makes it root's


def spawn(command: bytes, cwd: bytes, stdin: bytes, reports: bool) -> "tuple[int, int, int]":
    """Start bash in a session of its own; its stdout and stderr are one pipe.

    Returns (pid, read end, read end of the report or -1).
    """
    in_read, in_write = os.pipe()
    os.write(in_write, stdin)
    os.close(in_write)
    read_end, write_end = os.pipe()
    report_read, report_write = os.pipe() if reports else (-1, -1)
    own_score = os.pread(score_fd, 16, 0)
    # Under memory pressure the kernel should take the command, not PID 1 and the container with it. It inherits this.
    os.write(score_fd, b"1000")
    try:
        try:
            pid = spawn_bash(command, cwd, in_read, write_end, report_write)
        except (AttributeError, NotImplementedError, OSError, ValueError):
            # An old Python or C library; or it cannot be done, and a child of ours tells the agent why.
            pid = fork_bash(command, cwd, in_read, write_end, report_write)
    finally:
        os.write(score_fd, own_score)
    for fd in (in_read, write_end, report_write):
        if fd >= 0:
            os.close(fd)
    return pid, read_end, report_read


def spawn_bash(command: bytes, cwd: bytes, stdin: int, output: int, report: int) -> int:
    """The pid. Half the price of a fork, since no memory of ours is copied. Raises where `fork_bash` has to do it."""
    actions = [(os.POSIX_SPAWN_DUP2, stdin, 0), (os.POSIX_SPAWN_DUP2, output, 1), (os.POSIX_SPAWN_DUP2, output, 2)]
    if report >= 0:
        actions.append((os.POSIX_SPAWN_DUP2, report, 3))
        os.set_inheritable(report, report == 3)  # dup2 to itself changes nothing
    os.chdir(cwd)
    try:
        return os.posix_spawn(
            BASH, [b"bash", b"-c", command], os.environb, file_actions=actions, setsid=True, setsigdef=INHERITED
        )
    finally:
        os.chdir("/")


def fork_bash(command: bytes, cwd: bytes, stdin: int, output: int, report: int) -> int:
    """The pid. A child that cannot become bash says why, and ends with 127 or 126."""
    pid = os.fork()
    if pid:
        return pid
    status = 126
    try:
        os.setsid()
        os.dup2(stdin, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if report == 3:
            os.set_inheritable(3, True)
        elif report >= 0:
            os.dup2(report, 3)
        for number in INHERITED:
            signal(number, SIG_DFL)
        os.chdir(cwd)
        os.execv(BASH, [b"bash", b"-c", command])
    except FileNotFoundError as exc:
        status = 127
        os.write(2, f"cannot run the command: {exc}\n".encode())
    except (OSError, ValueError) as exc:
        os.write(2, f"cannot run the command: {exc}\n".encode())
    finally:
        os._exit(status)


def reap(pid: int) -> "int | None":
    """Collect the children that have ended; the wait status of `pid` if it is one of them."""
    status = None
    while True:
        try:
            done, found = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if not done:
            return status
        if done == pid:
            status = found


def end_all(pid: int, status: "int | None") -> int:
    """Kill every process but ourselves and wait until none is left. Returns the wait status of `pid`."""
    while True:
        try:  # noqa: SIM105  (contextlib would have to be imported)
            os.kill(-1, SIGKILL)
        except ProcessLookupError:
            pass
        try:
            done, found = os.waitpid(-1, 0)
        except ChildProcessError:
            return 0 if status is None else status
        if done == pid:
            status = found


def watch(pid: int, sinks: "dict[int, Output | Report]", output: Output, deadline: float) -> "tuple[int | None, bytes]":
    """Read the pipes until `pid` has ended. Returns its wait status, or None, and why it has to be ended."""
    wait = 0.0005
    waiting_on = [0, *sinks]
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            return None, b"timeout"
        if output.total > FLOOD:
            return None, b"flood"
        ready = select.select(waiting_on, [], [], min(wait, left))[0]
        wait = min(2 * wait, LONGEST_WAIT_S)
        for fd in ready:
            if fd:
                data = os.read(fd, CHUNK)
                sinks[fd].add(data)
                if not data:
                    waiting_on.remove(fd)
                wait = 0.0005
        if 0 in ready and read_message() == [b"stop"]:
            return None, b"stopped"
        status = reap(pid)
        if status is not None:
            return status, b""


def drain(fd: int, sink: "Output | Report") -> None:
    """Read what is left in a pipe that nobody writes to any more."""
    while True:
        data = os.read(fd, CHUNK)
        if not data:
            break
        sink.add(data)
    os.close(fd)


def run(command: bytes, cwd: bytes, timeout_ms: bytes, cap: bytes, stdin: bytes, report_cap: bytes) -> None:
    began = time.monotonic()
    output, report = Output(int(cap)), Report(int(report_cap))
    pid, pipe, report_pipe = spawn(command, cwd, stdin, int(report_cap) > 0)
    sinks = {pipe: output}  # type: dict[int, Output | Report]
    if report_pipe >= 0:
        sinks[report_pipe] = report
    status, why = watch(pid, sinks, output, began + int(timeout_ms) / 1000)
    status = end_all(pid, status)
    for fd, sink in sinks.items():
        drain(fd, sink)
    code = 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    head, tail = output.ends()
    elapsed = int((time.monotonic() - began) * 1e6)
    send(b"done", head, tail, b"%d" % output.total, b"%d" % code, why, b"%d" % elapsed, bytes(report.data))


def is_regular(fd: int) -> bool:
    return os.fstat(fd).st_mode & 0o170000 == 0o100000


def put(path: bytes, mode: bytes, data: bytes) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
    flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK  # a FIFO must not hold us
    try:
        fd = os.open(path, flags | os.O_EXCL, 0o600)
        os.fchmod(fd, int(mode))
    except FileExistsError:
        fd = os.open(path, flags)
    try:
        if not is_regular(fd):
            raise OSError(22, "not a regular file")
        os.ftruncate(fd, 0)
        write_all(fd, data)
    finally:
        os.close(fd)
    send(b"done")


def get(path: bytes, largest: bytes) -> None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError) as exc:
        return send(b"missing", str(exc.strerror).encode())
    try:
        if not is_regular(fd):
            return send(b"missing", b"not a regular file")
        parts = []  # type: list[bytes]
        left = int(largest) + 1
        while left > 0:  # the size in the inode says nothing about files of /proc
            data = os.read(fd, min(left, 1 << 20))
            if not data:
                return send(b"done", b"".join(parts))
            parts.append(data)
            left -= len(data)
        raise OSError(27, f"larger than {largest.decode()} bytes")
    finally:
        os.close(fd)


def name_localhost() -> None:
    """Without a network Docker leaves /etc/hosts empty, and tests that listen on localhost could not resolve it."""
    try:
        if os.stat("/etc/hosts").st_size == 0:  # noqa: PTH116
            fd = os.open("/etc/hosts", os.O_WRONLY)
            write_all(fd, b"127.0.0.1 localhost\n::1 localhost\n127.0.1.1 " + os.uname().nodename.encode() + b"\n")
            os.close(fd)
    except OSError:
        pass  # an image that has its own idea of the file


def main() -> None:
    if os.getpid() != 1:
        raise SystemExit("runner: not PID 1, and its kill(-1) would reach processes that are not its own")
    signal(SIGINT, SIG_DFL)  # PID 1 then ignores it; Python's own handler would raise KeyboardInterrupt here
    name_localhost()
    global score_fd
    score_fd = os.open("/proc/self/oom_score_adj", os.O_RDWR)
    send(b"ready", b"%d" % protect())
    while True:
        operation, *fields = read_message()
        try:
            if operation == b"run":
                run(*fields)
            elif operation == b"put":
                put(*fields)
            elif operation == b"get":
                get(*fields)
            elif operation != b"stop":
                raise SystemExit(f"runner: unknown operation {operation!r}")
        except OSError as exc:
            if operation == b"run":
                raise  # no process or pipe to be had: ours, not the command's
            send(b"oserror", b"%d" % (exc.errno or 5), (exc.strerror or str(exc)).encode())
        except ValueError as exc:
            send(b"oserror", b"22", str(exc).encode())


if __name__ == "__main__":
    main()
