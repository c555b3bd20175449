"""Runs pytest in a grading container as `python -m pytest` would, and reports to the host what really happened.

The host puts this file into a fresh folder outside the repository and runs it with the interpreter and the options of
the task's test command, so it uses the standard library of any Python from 3.6 and pytest from 6.0. It gets a key and
its settings on stdin and reports through descriptor 3. PYTHONPATH comes in another variable (`PYTHONPATH_KEPT`), and
what else would put the repository on `sys.path` is taken off it, until pytest and what it is made of are imported: no
file of the repository can stand in for them. From then on everything is as `python -m pytest` has it: `sys.path`,
`sys.argv`, `__main__`, the environment.

A record is a line `<HMAC-SHA256 in hex> ["<number>", "<kind>", ...]`, signed without the final newline:

    begin                                   pytest is imported, nothing of the repository is
    report, node id, when, word, failed     one report; `when` is collect, setup, call or teardown; `word` is what the
                                            summary of `-rA` would say; failed is 1 where pytest counts a failure
    finish, exit status, failures, changed  pytest has ended; `changed` names a function or a hook of pytest or
                                            unittest that is not the one it was at the beginning, if there is one

A repository that is part of pytest itself (pluggy, packaging, ...) cannot be graded so: what is tested would be the
installed release.

The code under test runs in this process: what it could do with the knowledge of this file is said in
`tests/redteam/__init__.py`. It does not get the key, which is forgotten before pytest starts, and other processes can
neither trace this one nor open its descriptors.
"""

# ruff: noqa: BLE001, PTH100, PTH109, PTH119, PTH120, RUF005, SIM105  (pathlib and contextlib are not loaded)
import os
import sys

TYPE_CHECKING = False  # typing itself is a tenth of the start-up time
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

KEY_BYTES = 32
PYTHONPATH_KEPT = "AGENT_R3_PYTHONPATH"
PR_SET_DUMPABLE = 4
PUTS_A_FOLDER_FIRST = not (sys.flags.isolated or getattr(sys.flags, "safe_path", False))  # on sys.path
FIRST_FD = 200  # out of the way of tests that count on low descriptor numbers
SEALED = (
    *("_pytest.assertion.rewrite", "_pytest.main", "_pytest.nodes", "_pytest.outcomes", "_pytest.python"),
    *("_pytest.python_api", "_pytest.raises", "_pytest.reports", "_pytest.runner", "_pytest.skipping"),
    *("pluggy._callers", "pluggy._hooks", "pluggy._manager", "pluggy.callers", "pluggy.hooks", "pluggy.manager"),
    *("unittest.case", "unittest.suite"),
)
# Hooks that decide on a verdict, or on who hears of it.
VERDICT_HOOKS = (
    *("pytest_collectreport", "pytest_make_collect_report", "pytest_pyfunc_call", "pytest_report_teststatus"),
    *("pytest_runtest_call", "pytest_runtest_logreport", "pytest_runtest_makereport", "pytest_runtest_protocol"),
    "pytest_sessionfinish",
)
# Loaded while nothing can stand in for them, beyond what pytest imports by itself.
PRELOADED = ("ast", "difflib", "doctest", "linecache", "pprint", "tempfile", "traceback", "unittest", "warnings")


def protect() -> None:
    """Close this process to ptrace and /proc/PID/{mem,fd} of other processes of the same user."""
    try:
        import _ctypes

        prctl = _ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl")  # type: ignore[arg-type]
        _ctypes.call_function(prctl, (PR_SET_DUMPABLE, 0, 0, 0, 0))
    except (ImportError, AttributeError, OSError):
        pass  # a Python without ctypes


def take_stdin() -> bytearray:
    """All of stdin, which is /dev/null from then on."""
    data = bytearray()
    while True:
        part = os.read(0, 1 << 16)
        if not part:
            break
        data += part
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return data


def signer(key: bytes) -> "Callable[[bytes], bytes]":
    """A function bytes -> HMAC-SHA256 in hex. It holds hash states, from which the key cannot be had."""
    from hashlib import sha256

    block = key.ljust(64, b"\0")
    inner, outer = sha256(bytes(x ^ 0x36 for x in block)), sha256(bytes(x ^ 0x5C for x in block))

    def sign(data: bytes) -> bytes:
        first, second = inner.copy(), outer.copy()
        first.update(data)
        second.update(first.digest())
        return second.hexdigest().encode()

    return sign


def reporter(sign: "Callable[[bytes], bytes]") -> "Callable[..., None]":
    """A function that writes one record. Its parts are bound here, so that changing modules later changes nothing."""
    import fcntl
    from json.encoder import encode_basestring_ascii as quote

    fd = fcntl.fcntl(3, fcntl.F_DUPFD_CLOEXEC, FIRST_FD)
    os.close(3)
    write, own_pid, getpid, text, written = os.write, os.getpid(), os.getpid, str, [0]

    def send(*fields: str) -> None:
        if getpid() != own_pid:
            return  # a fork of this process
        record = (text(written[0]),) + fields
        line = ("[" + ", ".join([quote(field) for field in record]) + "]").encode()
        data = sign(line) + b" " + line + b"\n"
        written[0] += 1
        while data:
            data = data[write(fd, data) :]

    return send


def within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def foreign(entry: str, root: str) -> bool:
    """Whether a place on sys.path belongs to the repository in `root`, not to the interpreter (which may lie in it)."""
    prefixes = [sys.prefix, sys.exec_prefix, sys.base_prefix, os.path.realpath(sys.prefix)]
    own = [prefix for prefix in prefixes if within(prefix, root) and prefix != root]
    paths = (os.path.abspath(entry), os.path.realpath(entry))
    return any(within(path, root) and not any(within(path, prefix) for prefix in own) for path in paths)


def as_with_m(path: "list[str]", kept: "str | None", root: str) -> "list[str]":
    """sys.path as `python -m` has it: the working directory, PYTHONPATH, then the rest; each absolute and once."""
    entries = list(path)
    if kept and not sys.flags.ignore_environment:
        entries = [os.path.abspath(entry) for entry in kept.split(os.pathsep)] + entries
    first = root if sys.version_info >= (3, 7) else ""
    return ([first] if PUTS_A_FOLDER_FIRST else []) + list(dict.fromkeys(entries))


def seal() -> "dict[str, tuple[object, object]]":
    """Name -> the function or class under it and its code, for every one of the sealed modules."""
    found = {}  # type: dict[str, tuple[object, object]]
    for name in SEALED:
        module = sys.modules.get(name)
        for key, value in list(vars(module).items()) if module else ():
            if callable(value):
                found[name + "." + key] = (value, getattr(value, "__code__", None))
            if isinstance(value, type) and value.__module__ == name:
                for member, what in list(vars(value).items()):
                    code = getattr(getattr(what, "__func__", what), "__code__", None)
                    if code is not None or isinstance(what, property):
                        found[name + "." + key + "." + member] = (what, code)
    return found


def changed(before: "dict[str, tuple[object, object]]", after: "dict[str, tuple[object, object]]") -> str:
    """The first name that no longer stands for the same, or ''."""
    for name, (value, code) in before.items():
        now = after.get(name, (None, None))
        if now[0] is not value or now[1] is not code:
            return name
    return ""


def hooks_of(config: "Any") -> "dict[str, tuple[object, object]]":
    """Name -> function and code of everything that is called on a verdict."""
    executor = getattr(config.pluginmanager, "_inner_hookexec", None)
    found = {"hook execution": (executor, getattr(executor, "__code__", None))}
    for name in VERDICT_HOOKS:
        caller = getattr(config.hook, name)
        found[name] = (caller, None)
        for hook in caller.get_hookimpls():
            found[name + " of " + str(hook.plugin_name)] = (hook.function, getattr(hook.function, "__code__", None))
    return found


def meddled(before: "dict[str, tuple[object, object]]", after: "dict[str, tuple[object, object]]") -> str:
    """The first hook that is another or has come since, or ''. Those of a conftest.py may come at any time."""
    for name, (function, code) in after.items():
        late = os.path.basename(getattr(code, "co_filename", "")) == "conftest.py"
        known = before.get(name, (function, code) if late else (None, None))
        if known[0] is not function or known[1] is not code:
            return name
    return ""


def make_plugin(send: "Callable[..., None]", ends: "list[tuple[int, str]]") -> object:
    """The pytest plugin that sends every report. At the end `ends` gets pytest's failures and the changed hook."""
    import pytest

    configs = []  # type: list[Any]
    hooks = {}  # type: dict[str, tuple[object, object]]

    def report_of(report: "Any", when: str) -> None:
        config = configs[0]
        word = config.hook.pytest_report_teststatus(report=report, config=config)[2]
        word = word if isinstance(word, str) else word[0]  # some plugins add how to colour it
        counted = report.failed and not hasattr(report, "wasxfail")
        send("report", report.nodeid, when, word, "1" if counted else "0")

    class Plugin:
        @pytest.hookimpl(tryfirst=True)
        def pytest_configure(self, config: "Any") -> None:
            configs.append(config)

        @pytest.hookimpl(tryfirst=True)
        def pytest_collection(self) -> None:
            hooks.update(hooks_of(configs[0]))

        @pytest.hookimpl(tryfirst=True)
        def pytest_collectreport(self, report: "Any") -> None:
            if report.failed:
                report_of(report, "collect")

        @pytest.hookimpl(tryfirst=True)
        def pytest_runtest_logreport(self, report: "Any") -> None:
            report_of(report, report.when or "")

        @pytest.hookimpl(tryfirst=True)
        def pytest_sessionfinish(self, session: "Any") -> None:
            ends.append((session.testsfailed, meddled(hooks, hooks_of(configs[0])) if hooks else ""))

    return Plugin()


def import_framework() -> "Any":
    """Import pytest with all that it starts with, and the modules that decide what a failure is."""
    import importlib

    for name in PRELOADED:
        importlib.import_module(name)
    import pytest
    from _pytest.config import default_plugins

    for name in default_plugins:
        importlib.import_module("_pytest." + name)
    return pytest


def become_pytest(arguments: "list[str]") -> None:
    """Make `__main__` and sys.argv what `python -m pytest` has there; this file is then out of reach by name."""
    import importlib.util
    import types

    spec = importlib.util.find_spec("pytest.__main__")  # type: Any
    module = types.ModuleType("__main__")
    module.__file__, module.__spec__, module.__loader__ = spec.origin, spec, spec.loader
    module.__package__ = "pytest"
    sys.modules["__main__"] = module
    sys.argv[:] = [spec.origin] + arguments


def prepare() -> "tuple[Any, list[str], Callable[..., None], dict[str, tuple[object, object]]]":
    """Everything up to pytest's own start. Returns (pytest, arguments, send, seal)."""
    import json
    import shutil

    root = os.getcwd()
    launcher = os.path.abspath(__file__)
    path = sys.path[1:] if PUTS_A_FOLDER_FIRST else sys.path[:]
    sys.path[:] = [entry for entry in path if not foreign(entry, root)]
    data = take_stdin()
    protect()
    send = reporter(signer(bytes(data[:KEY_BYTES])))
    arguments = json.loads(bytes(data[KEY_BYTES:]).decode())["arguments"]
    data[:] = bytes(len(data))
    pytest = import_framework()
    shutil.rmtree(os.path.dirname(launcher), ignore_errors=True)
    before = seal()
    kept = os.environ.pop(PYTHONPATH_KEPT, None)
    if kept is not None:
        os.environ["PYTHONPATH"] = kept
    become_pytest(arguments)
    send("begin")
    sys.path[:] = as_with_m(path, kept, root)
    return pytest, arguments, send, before


def main() -> None:
    pytest, arguments, send, before = prepare()
    leave, streams = os._exit, (sys.stdout, sys.stderr)
    ends = []  # type: list[tuple[int, str]]
    from traceback import print_exc

    try:
        code = int(pytest.main(arguments, plugins=[make_plugin(send, ends)]))
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else 0 if exc.code is None else 1
    except BaseException:
        print_exc()
        code = 1
    for stream in streams:
        try:
            stream.flush()
        except BaseException:  # whatever has been put in its place
            pass
    failures, hook = ends[-1] if ends else (0, "")
    send("finish", str(code & 0xFF), str(failures), changed(before, seal()) or hook)
    leave(code & 0xFF)  # not by the usual way out, where the repository's exit handlers run


if __name__ == "__main__":
    main()
