"""Tools in a real container: what they answer, what they refuse, and that a broken container is not an answer."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r3.config import AgentConfig
from agent_r3.envs.runner_sandbox import RunnerSandbox
from agent_r3.errors import ConfigError, SandboxError
from agent_r3.tools import REGISTRY, CallProblem, Toolbox, check_tools, render
from agent_r3.tools.limits import cut_chars, cut_lines, strip_escapes
from agent_r3.types import Observation, ToolCall

docker = pytest.mark.docker


@pytest.fixture
def toolbox() -> Toolbox:
    return Toolbox(AgentConfig(command_timeout_s=20.0))


async def run(toolbox: Toolbox, sandbox: RunnerSandbox, name: str, **arguments: object) -> Observation:
    (observation,) = await toolbox.run([ToolCall(name, arguments)], sandbox)
    return observation


async def edit(toolbox: Toolbox, sandbox: RunnerSandbox, command: str, path: str, **arguments: object) -> str:
    observation = await run(toolbox, sandbox, "file_editor", command=command, path=path, **arguments)
    assert not observation.is_error and not observation.finished
    return observation.text


# --- file_editor ---


@docker
async def test_view_numbers_lines_and_shows_the_range_asked_for(toolbox: Toolbox, sandbox: RunnerSandbox) -> None:
    whole = await edit(toolbox, sandbox, "view", "/testbed/plain.py")
    assert whole == "/testbed/plain.py, lines 1-3 of 3:\n     1\tone\n     2\ttwo\n     3\tthree"
    for wanted in ("[2, -1]", [2, 3], "[2,3]", [2, 99]):
        part = await edit(toolbox, sandbox, "view", "/testbed/plain.py", view_range=wanted)
        assert part == "/testbed/plain.py, lines 2-3 of 3:\n     2\ttwo\n     3\tthree"
    past = await edit(toolbox, sandbox, "view", "/testbed/plain.py", view_range=[4, 5])
    assert past == "/testbed/plain.py has 3 lines; line 4 is past its end."


@docker
async def test_view_tells_folders_binary_empty_and_missing_files(toolbox: Toolbox, sandbox: RunnerSandbox) -> None:
    listing = (await edit(toolbox, sandbox, "view", "/testbed")).split("\n")
    assert {"pkg/", "pkg/mod.py", "plain.py"} <= set(listing) and not any(".git" in line for line in listing)
    assert (
        await edit(toolbox, sandbox, "view", "/testbed/binary.dat")
        == "/testbed/binary.dat is a binary file of 4 bytes."
    )
    assert await edit(toolbox, sandbox, "view", "/testbed/nope") == "There is no file or folder /testbed/nope."
    await sandbox.put("/testbed/empty.py", b"")
    assert await edit(toolbox, sandbox, "view", "/testbed/empty.py") == "/testbed/empty.py is empty."


@docker
async def test_concise_view_leaves_out_the_bodies_of_functions(toolbox: Toolbox, sandbox: RunnerSandbox) -> None:
    source = "import os\n\nclass A:\n    @property\n    def f(self):\n        x = 1\n        return x\n\n"
    source += "    def g(self): return 2\n"
    await sandbox.put("/testbed/a.py", source.encode())
    text = await edit(toolbox, sandbox, "view", "/testbed/a.py", concise="True")
    shown = [line.split("\t")[0].strip() for line in text.split("\n")[1:]]
    assert shown == ["1", "2", "3", "4", "5", "8", "9"]
    await sandbox.put("/testbed/a.py", b"def f(:\n")  # does not parse: shown whole
    assert "def f(:" in await edit(toolbox, sandbox, "view", "/testbed/a.py", concise=True)


@docker
async def test_str_replace_changes_one_place_and_shows_it(toolbox: Toolbox, sandbox: RunnerSandbox) -> None:
    text = await edit(toolbox, sandbox, "str_replace", "/testbed/plain.py", old_str="two\n", new_str="2\n2.5\n")
    assert text == "Edited /testbed/plain.py. It now reads:\n     1\tone\n     2\t2\n     3\t2.5\n     4\tthree"
    assert await sandbox.get("/testbed/plain.py") == b"one\n2\n2.5\nthree\n"
    status = await sandbox.exec("git status --porcelain | grep -v -e gone -e untracked", timeout_s=10)
    assert status.text == " M plain.py\n"  # nothing that `undo_edit` keeps lies in the repository


@docker
async def test_str_replace_that_fits_nowhere_or_twice_changes_nothing(toolbox: Toolbox, sandbox: RunnerSandbox) -> None:
    none = await edit(toolbox, sandbox, "str_replace", "/testbed/plain.py", old_str="four")
    assert none == "`old_str` does not occur in /testbed/plain.py; nothing was changed."
    twice = await edit(toolbox, sandbox, "str_replace", "/testbed/plain.py", old_str="o", new_str="0")
    assert twice == "`old_str` occurs 2 times in /testbed/plain.py, at lines 1, 2; nothing was changed."
    await sandbox.put("/testbed/dos.py", b"one\r\ntwo\r\n")
    assert "CR LF" in await edit(toolbox, sandbox, "str_replace", "/testbed/dos.py", old_str="one\ntwo", new_str="x")
    assert await sandbox.get("/testbed/plain.py") == b"one\ntwo\nthree\n"
    missing = await edit(toolbox, sandbox, "str_replace", "/testbed/nope", old_str="a", new_str="b")
    assert missing == "There is no file /testbed/nope."


@docker
async def test_edits_keep_bytes_line_ends_and_mode(toolbox: Toolbox, sandbox: RunnerSandbox) -> None:
    await sandbox.put("/testbed/tool.sh", b"#!/bin/sh\r\necho \xff ran\r\n", mode=0o755)
    await edit(toolbox, sandbox, "str_replace", "/testbed/tool.sh", old_str=" ran", new_str=" went")
    assert await sandbox.get("/testbed/tool.sh") == b"#!/bin/sh\r\necho \xff went\r\n"
    assert (await sandbox.exec("stat -c %a tool.sh", timeout_s=10)).text == "755\n"


@docker
async def test_insert_puts_whole_lines_at_the_place_asked_for(toolbox: Toolbox, sandbox: RunnerSandbox) -> None:
    await edit(toolbox, sandbox, "insert", "/testbed/plain.py", insert_line="0", new_str="zero")
    await edit(toolbox, sandbox, "insert", "/testbed/plain.py", insert_line=4, new_str="four\n")
    assert await sandbox.get("/testbed/plain.py") == b"zero\none\ntwo\nthree\nfour\n"
    await edit(toolbox, sandbox, "insert", "/testbed/noend.py", insert_line=1, new_str="end")
    assert await sandbox.get("/testbed/noend.py") == b"no end\nend\n"
    past = await edit(toolbox, sandbox, "insert", "/testbed/plain.py", insert_line=9, new_str="x")
    assert past == "/testbed/plain.py has 5 lines; there is no line 9 to insert after."


@docker
async def test_create_makes_folders_and_does_not_overwrite(toolbox: Toolbox, sandbox: RunnerSandbox) -> None:
    path = "/testbed/new dir/it's.py"
    assert await edit(toolbox, sandbox, "create", path, file_text="a\nb") == f"Created {path} with 2 lines."
    assert "is there already" in await edit(toolbox, sandbox, "create", path, file_text="c")
    assert await sandbox.get(path) == b"a\nb"


@docker
async def test_undo_takes_edits_back_one_by_one_even_with_a_new_toolbox(sandbox: RunnerSandbox) -> None:
    path, config = "/testbed/plain.py", AgentConfig()
    await edit(Toolbox(config), sandbox, "str_replace", path, old_str="one", new_str="1")
    await edit(Toolbox(config), sandbox, "insert", path, insert_line=0, new_str="top")
    await edit(Toolbox(config), sandbox, "create", "/testbed/new.py", file_text="x")
    assert await edit(Toolbox(config), sandbox, "undo_edit", path) == f"The last edit of {path} is undone."
    assert await sandbox.get(path) == b"1\ntwo\nthree\n"
    await edit(Toolbox(config), sandbox, "undo_edit", path)
    assert await sandbox.get(path) == b"one\ntwo\nthree\n"
    assert await edit(Toolbox(config), sandbox, "undo_edit", path) == f"No edit of {path} is left to undo."
    await edit(Toolbox(config), sandbox, "undo_edit", "/testbed/new.py")
    assert (await sandbox.exec("ls new.py", timeout_s=10)).exit_code != 0


@docker
async def test_what_the_agent_broke_is_told_to_the_agent(toolbox: Toolbox, sandbox: RunnerSandbox) -> None:
    await sandbox.exec("printf '#!/bin/sh\\necho nonsense' >/usr/bin/stat", timeout_s=10)
    text = await edit(toolbox, sandbox, "str_replace", "/testbed/plain.py", old_str="one", new_str="1")
    assert text.startswith("/testbed/plain.py was not changed") and "nonsense" in text
    below_a_file = await edit(toolbox, sandbox, "create", "/testbed/plain.py/x", file_text="x")
    assert below_a_file.startswith("/testbed/plain.py/x: ")


# --- execute_bash, search, finish ---


@docker
async def test_a_persistent_shell_carries_on_and_its_documentation_says_so(sandbox: RunnerSandbox) -> None:
    carries_on = Toolbox(AgentConfig(command_timeout_s=20.0, persistent_shell=True))
    await run(carries_on, sandbox, "execute_bash", cmd="cd pkg && export MARK=kept")
    assert (await run(carries_on, sandbox, "execute_bash", cmd="pwd; echo $MARK")).text.endswith("/testbed/pkg\nkept")
    assert "stay from call to call" in " ".join(carries_on.documentation.split())
    assert "stay from call to call" not in " ".join(Toolbox(AgentConfig()).documentation.split())


@docker
async def test_execute_bash_tells_exit_code_and_output(toolbox: Toolbox, sandbox: RunnerSandbox) -> None:
    result = await run(toolbox, sandbox, "execute_bash", cmd="pwd; echo err >&2; exit 3")
    assert result == Observation("Exit code 3.\n/testbed\nerr")
    assert (await run(toolbox, sandbox, "execute_bash", command="true")).text == "Exit code 0. No output."
    coloured = await run(toolbox, sandbox, "execute_bash", cmd=r"printf '\033[31mred\033[0m \377\n'; false")
    assert coloured.text == "Exit code 1.\nred \ufffd"


@docker
async def test_a_timed_out_command_is_an_observation_with_its_output(sandbox: RunnerSandbox) -> None:
    toolbox = Toolbox(AgentConfig(command_timeout_s=0.5))
    result = await run(toolbox, sandbox, "execute_bash", cmd="echo started; sleep 60")
    assert result.text.startswith("Exit code 124. The command did not end within 0.5 s") and "started" in result.text
    assert not result.is_error
    assert (await run(toolbox, sandbox, "execute_bash", cmd="echo alive")).text == "Exit code 0.\nalive"


@docker
async def test_long_output_keeps_head_and_tail_and_says_what_is_gone(sandbox: RunnerSandbox) -> None:
    toolbox = Toolbox(AgentConfig(observation_lines=4, observation_chars=300))
    lines = (await run(toolbox, sandbox, "execute_bash", cmd="seq 1000")).text.split("\n")
    assert lines == ["Exit code 0.", "1", "2", "[... 996 of 1000 lines left out ...]", "999", "1000"]
    wide = (await run(toolbox, sandbox, "execute_bash", cmd="head -c 5000 /dev/zero | tr '\\0' a; echo end")).text
    assert len(wide) <= 300 and "of 5016 characters left out" in wide and wide.endswith("aend")
    huge = (await run(toolbox, sandbox, "execute_bash", cmd="yes | head -c 3000000")).text
    assert "It wrote 3000000 bytes; the middle was dropped." in huge


@docker
async def test_search_lists_lines_of_a_file_and_counts_below_a_folder(toolbox: Toolbox, sandbox: RunnerSandbox) -> None:
    await sandbox.put("/testbed/pkg/more.py", b"a.b = 'x'\naxb\n--flag 'x'\n")
    found = await run(toolbox, sandbox, "search", search_term="'x'", path="/testbed/pkg/more.py")
    assert found.text == "\"'x'\" occurs on 2 lines of /testbed/pkg/more.py:\n1:a.b = 'x'\n3:--flag 'x'"
    folder = await run(toolbox, sandbox, "search", search_term="'x'")
    assert folder.text == "\"'x'\" occurs in 1 file below . (matching lines):\n./pkg/more.py (2)"
    literal = await run(toolbox, sandbox, "search", search_term="a.b", path="/testbed/pkg")
    assert literal.text.endswith("/testbed/pkg/more.py (1)")
    assert (await run(toolbox, sandbox, "search", search_term="--flag")).text.endswith("./pkg/more.py (1)")
    nothing = await run(toolbox, sandbox, "search", search_term="zzz", path="/testbed/pkg")
    assert nothing.text == "'zzz' does not occur in /testbed/pkg."
    missing = await run(toolbox, sandbox, "search", search_term="x", path="/nope")
    assert missing.text == "There is no file or folder at /nope." and not missing.is_error


@docker
async def test_finish_ends_the_episode(toolbox: Toolbox, sandbox: RunnerSandbox) -> None:
    for arguments in ({}, {"command": "submit"}, {"command": "submit", "result": "done"}):
        observation = await run(toolbox, sandbox, "finish", **arguments)
        assert observation.finished and not observation.is_error
    assert not (await run(toolbox, sandbox, "finish", command="later")).finished


# --- calls that are not valid; none of them reaches the container ---

BAD: list[tuple[str, Mapping[str, object], str]] = [
    ("python", {}, "There is no tool 'python'. Call one of: file_editor, execute_bash, search, finish."),
    ("execute_bash", {}, "`cmd` is missing"),
    ("execute_bash", {"cmd": ""}, "`cmd` String should have at least 1 character"),
    ("execute_bash", {"cmd": 5}, "`cmd` should be a valid string"),
    ("execute_bash", {"cmd": "a\0b"}, "`cmd` holds a NUL character"),
    ("execute_bash", {"cmd": "ls", "timeout": 5}, "there is no parameter `timeout` (there are: cmd)"),
    ("search", {"search_term": "a\nb"}, "`search_term` must be one line"),
    ("file_editor", {"command": "view"}, "`path` is missing"),
    ("file_editor", {"command": "delete", "path": "/x"}, "`command` should be 'view'"),
    ("file_editor", {"command": "view", "path": "x.py"}, "`path` must be absolute"),
    ("file_editor", {"command": "view", "path": "/x", "view_range": "[3, 1]"}, "[3, 1] is not a range of lines"),
    ("file_editor", {"command": "view", "path": "/x", "view_range": "first"}, "`view_range` should be a valid tuple"),
    ("file_editor", {"command": "create", "path": "/x"}, "`create` needs `file_text`"),
    ("file_editor", {"command": "str_replace", "path": "/x", "old_str": ""}, "`str_replace` needs `old_str`"),
    ("file_editor", {"command": "str_replace", "path": "/x", "old_str": "a", "new_str": "a"}, "are the same"),
    ("file_editor", {"command": "insert", "path": "/x", "new_str": "a"}, "`insert` needs `insert_line` and `new_str`"),
    ("file_editor", {"command": "insert", "path": "/x", "new_str": "a", "insert_line": "one"}, "valid integer"),
]


class Unreachable:
    """A sandbox that no bad call may reach."""

    id = "unreachable"

    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"the sandbox was used: {name}")


@pytest.mark.parametrize(("name", "arguments", "said"), BAD)
async def test_a_bad_call_is_answered_with_what_is_wrong(
    toolbox: Toolbox, name: str, arguments: Mapping[str, object], said: str
) -> None:
    (observation,) = await toolbox.run([ToolCall(name, arguments)], Unreachable())  # type: ignore[arg-type]
    assert observation.is_error and not observation.finished
    assert said in observation.text
    assert "\n" not in observation.text


async def test_a_turn_without_a_call_is_answered(toolbox: Toolbox) -> None:
    calls, (observation,) = await toolbox.step("I am done.", Unreachable())  # type: ignore[arg-type]
    assert calls == () and observation.is_error
    assert observation.text == ("The turn holds no tool call. Call one of: file_editor, execute_bash, search, finish.")
    _, (malformed,) = await toolbox.step("<function=search>", Unreachable())  # type: ignore[arg-type]
    assert malformed.text.startswith("The tool call is not well formed: </function> is missing.")
    (empty,) = await toolbox.run([], Unreachable())  # type: ignore[arg-type]
    assert empty == observation


async def test_of_several_calls_the_first_is_run_and_the_others_are_named(toolbox: Toolbox) -> None:
    text = render(ToolCall("finish", {}), "r2e_xml") + render(ToolCall("search", {"search_term": "x"}), "r2e_xml")
    calls, (first, second) = await toolbox.step(text, Unreachable())  # type: ignore[arg-type]
    assert [call.name for call in calls] == ["finish", "search"]
    assert first.finished and not first.is_error
    assert second == Observation("Only the first call of a turn is run; not run: search.", is_error=True)


@given(
    st.one_of(st.sampled_from([*REGISTRY, "nope"]), st.text()),
    st.dictionaries(st.text(max_size=9), st.text(max_size=9)),
)
async def test_random_arguments_never_raise(name: str, arguments: dict[str, str]) -> None:
    for call in (ToolCall(name, arguments), ToolCall(name, {"command": "view", "path": "x", **arguments})):
        if name != "execute_bash" and name != "search":
            await Toolbox(AgentConfig()).run([call], Unreachable())  # type: ignore[arg-type]


@docker
async def test_a_dead_container_is_not_an_observation(toolbox: Toolbox, sandbox: RunnerSandbox) -> None:
    await sandbox.close()
    for name, arguments in (
        ("execute_bash", {"cmd": "true"}),
        ("search", {"search_term": "x"}),
        ("file_editor", {"command": "view", "path": "/testbed/plain.py"}),
    ):
        with pytest.raises(SandboxError):
            await toolbox.run([ToolCall(name, arguments)], sandbox)


def test_an_unknown_tool_in_the_config_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"agent\.tools: unknown tool 'browser'; known: file_editor"):
        check_tools(AgentConfig(tools=("search", "browser")))


@pytest.mark.parametrize("call_format", ["r2e_xml", "hermes", "qwen3_coder"])
def test_the_documentation_names_every_tool_and_parameter(call_format: str) -> None:
    text = Toolbox(AgentConfig(call_format=call_format)).documentation  # type: ignore[arg-type]
    words = (
        "file_editor execute_bash search finish command path file_text old_str new_str insert_line view_range concise"
    )
    for word in [*words.split(), "cmd", "search_term", "result", "undo_edit", "submit"]:
        assert word in text
    assert "file_editor" not in Toolbox(AgentConfig(tools=("finish",))).documentation
    assert isinstance(Toolbox(AgentConfig(call_format=call_format)).parse(text), list | CallProblem)  # type: ignore[arg-type]


@given(st.text(max_size=400), st.integers(1, 200))
def test_cut_text_is_never_longer_than_the_limit(text: str, limit: int) -> None:
    cut = cut_chars(text, limit)
    assert len(cut) <= limit
    assert cut == text if len(text) <= limit else cut != text


@given(st.lists(st.sampled_from(["a", "b", ""]), max_size=40), st.integers(2, 12))
def test_cut_lines_keeps_head_and_tail(lines: list[str], limit: int) -> None:
    text = "".join(f"{line}\n" for line in lines)
    cut = cut_lines(text, limit).split("\n")
    if len(lines) <= limit:
        assert cut_lines(text, limit) == text
    else:
        assert len(cut) == limit + 1
        assert cut[: limit - limit // 2] == lines[: limit - limit // 2]
        assert cut[len(cut) - limit // 2 :] == lines[len(lines) - limit // 2 :]


def test_escape_sequences_are_removed_and_text_is_kept() -> None:
    assert strip_escapes("\x1b[1;31mFAILED\x1b[0m \x1b]0;title\x07[0] 1\x1b[2K") == "FAILED [0] 1"
