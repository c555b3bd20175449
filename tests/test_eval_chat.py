"""An episode as messages: what is sent, what is run, what a turn costs."""

import json

import pytest

from agent_r3.errors import DataError
from agent_r3.tools.parsers import render
from agent_r3.tools.toolbox import Toolbox
from agent_r3.types import Ending, ToolCall
from tests.support.chat_server import (
    DONE,
    FINISH,
    LS,
    Json,
    config_for,
    native,
    run,
    says,
    serving,
    status,
)
from tests.support.scripted import DictSandbox

ONLY_FIRST = "Only the first call of a turn is run; not run: "


# --- native calls ---


async def test_every_native_call_gets_its_tool_message_and_only_the_first_one_is_run() -> None:
    sandbox = DictSandbox()
    pwd = ToolCall("execute_bash", {"cmd": "pwd"})
    turns = (says("Look.", native("a", LS)), says(None, native("b", LS), native("c", pwd), native("d", FINISH)))
    async with serving(*turns, DONE) as server:
        episode = await run(server, sandbox=sandbox)
    assert episode.ending is Ending.FINISH
    assert sandbox.commands == ["ls", "ls"]
    rest = ONLY_FIRST + "execute_bash, finish."
    assert server.messages == [
        {"role": "system", "content": "s"},  # the tools are not described in it
        {"role": "user", "content": "Fix it."},
        {"role": "assistant", "content": "Look.", "tool_calls": [native("a", LS)]},
        {"role": "tool", "tool_call_id": "a", "content": "Exit code 0.\nls"},
        {"role": "assistant", "content": None, "tool_calls": [native("b", LS), native("c", pwd), native("d", FINISH)]},
        {"role": "tool", "tool_call_id": "b", "content": "Exit code 0.\nls"},
        {"role": "tool", "tool_call_id": "c", "content": rest},
        {"role": "tool", "tool_call_id": "d", "content": rest},
    ]
    assert [turn.calls for turn in episode.turns] == [(LS,), (LS, pwd, FINISH), (FINISH,)]
    assert episode.turns[0].text == 'Look.\n\nexecute_bash({"cmd": "ls"})'


async def test_tools_are_offered_as_functions_with_the_options_of_the_config() -> None:
    async with serving(says(None, native("a", LS)), DONE) as server:
        sections: dict[str, Json] = {
            "eval": {"sampling": {"temperature": 0.5, "top_p": 0.9, "top_k": 20}},
            "agent": {"max_turn_tokens": 300},
        }
        await run(server, seed=7, **sections)
    functions = Toolbox(config_for("http://x").agent).functions
    expected = {
        "model": "org/model",
        "max_tokens": 300,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 20,
        "tools": [dict(function) for function in functions],
        "parallel_tool_calls": False,
    }
    for place, request in enumerate(server.requests):
        request.pop("messages")
        assert request == {**expected, "seed": 7 + place}
    assert [function["function"]["name"] for function in functions] == [
        "file_editor",
        "execute_bash",
        "search",
        "finish",
    ]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ('{"cmd": "ls"', "Expecting ',' delimiter: line 1 column 13 (char 12)"),
        ('["ls"]', "a list"),
        ('{"cmd": NaN}', "NaN is not JSON"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
async def test_malformed_arguments_are_answered_and_sent_back_as_an_object(arguments: str, why: str) -> None:
    async with serving(says(None, native("a", LS, arguments), native("b", LS)), DONE) as server:
        episode = await run(server)
    refusal = f"The arguments of execute_bash are not a JSON object: {why}. "
    refusal += "Call one of: file_editor, execute_bash, search, finish."
    assert episode.turns[0].calls == () and episode.turns[0].observations[0].is_error
    sent, *answers = server.messages[2:]
    assert sent["tool_calls"] == [native("a", LS, json.dumps({"malformed": arguments})), native("b", LS)]
    assert answers == [{"role": "tool", "tool_call_id": name, "content": refusal} for name in "ab"]


async def test_odd_calls_are_read_and_ids_that_are_missing_or_stand_twice_are_made_up() -> None:
    no_arguments = {"function": {"name": "finish", "arguments": None}}
    calls = (
        native("a", FINISH, ""),
        native("a", FINISH, "{"),
        no_arguments,
        native("b", FINISH, '{"command": "\\ud800"}'),
    )
    async with serving(says(None, *calls)) as server:
        episode = await run(server)
    assert episode.ending is Ending.FINISH
    empty, broken, alien = (
        ToolCall("finish", {}),
        ToolCall("finish", {"malformed": "{"}),
        {"malformed": '{"command": "\\ud800"}'},
    )
    assert episode.turns[0].calls == (empty, broken, empty, ToolCall("finish", alien))

    async with serving(says(None, native("a", LS, ""), native("a", LS, "{"), no_arguments), DONE) as server:
        await run(server)
    ids = [message["tool_call_id"] for message in server.messages[3:]]
    assert ids == ["a", "call_1", "call_2"]
    assert [call["id"] for call in server.messages[2]["tool_calls"]] == ids


async def test_a_turn_without_a_native_call_is_told_so_even_if_a_call_stands_in_its_text() -> None:
    text = render(LS, "r2e_xml")
    sandbox = DictSandbox()
    async with serving(says(text), says(None), DONE) as server:
        episode = await run(server, sandbox=sandbox)
    refusal = "The turn holds no tool call. Call one of: file_editor, execute_bash, search, finish."
    assert server.messages[2:] == [
        {"role": "assistant", "content": text},
        {"role": "user", "content": refusal},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": refusal},
    ]
    assert sandbox.commands == [] and episode.turns[0].calls == ()


# --- calls in the text ---


async def test_calls_in_the_text_are_run_and_observations_go_back_as_blocks_of_a_user_message() -> None:
    one, two = render(LS, "hermes"), f"{render(LS, 'hermes')}\n{render(FINISH, 'hermes')}"
    agent = {"call_format": "hermes"}
    async with serving(says(f"<think>hm</think>{one}"), says(two), says(render(FINISH, "hermes"))) as server:
        episode = await run(server, eval={"native_calls": False}, agent=agent)
    assert episode.ending is Ending.FINISH
    toolbox = Toolbox(config_for("http://x", agent=agent).agent)
    observed = "<tool_response>\nExit code 0.\nls\n</tool_response>"
    assert server.messages == [
        {"role": "system", "content": f"s{toolbox.documentation}"},
        {"role": "user", "content": "Fix it."},
        {"role": "assistant", "content": f"<think>hm</think>{one}"},
        {"role": "user", "content": observed},
        {"role": "assistant", "content": two},
        {"role": "user", "content": f"{observed}\n<tool_response>\n{ONLY_FIRST}finish.\n</tool_response>"},
    ]
    assert all("tools" not in request and "parallel_tool_calls" not in request for request in server.requests)


async def test_without_native_calls_a_call_beside_the_text_is_none() -> None:
    async with serving(says("Look.", native("a", LS)), says(render(FINISH, "r2e_xml"))) as server:
        episode = await run(server, eval={"native_calls": False})
    told = "The turn holds no tool call. Call one of: file_editor, execute_bash, search, finish."
    assert server.messages[2:] == [
        {"role": "assistant", "content": "Look."},
        {"role": "user", "content": f"<tool_response>\n{told}\n</tool_response>"},
    ]
    assert episode.turns[0].calls == ()


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
async def test_reasoning_is_kept_for_people_and_neither_read_as_a_call_nor_sent_back(field: str) -> None:
    thought, call = f"I could {render(FINISH, 'r2e_xml')}", render(LS, "r2e_xml")
    async with serving(says(call, **{field: thought}), says(render(FINISH, "r2e_xml"))) as server:
        episode = await run(server, eval={"native_calls": False})
    assert episode.turns[0].text == f"<think>\n{thought}\n</think>\n\n{call}"
    assert episode.turns[0].calls == (LS,)
    assert server.messages[2] == {"role": "assistant", "content": call}


async def test_half_a_surrogate_pair_in_an_answer_does_not_go_back_to_the_server() -> None:
    text = json.dumps(says("half \ud800 " + render(LS, "r2e_xml")))
    assert "\\ud800" in text
    async with serving(text, says(render(FINISH, "r2e_xml"))) as server:
        episode = await run(server, eval={"native_calls": False})
    assert episode.turns[0].text.startswith("half ? ")
    assert server.messages[2]["content"].startswith("half ? ")


# --- tokens and limits ---


async def test_turns_count_tokens_as_the_server_does() -> None:
    turns = [
        says("x", usage={"prompt_tokens": 100, "completion_tokens": 30}),
        says("x", usage={"prompt_tokens": 150, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 9}}),
        says("x", usage={"prompt_tokens": 120, "completion_tokens": 10, "prompt_tokens_details": None}),
        says(None, native("a", FINISH), usage={"prompt_tokens": 170, "completion_tokens": 2}),
    ]
    async with serving(*turns) as server:
        episode = await run(server)
    counts = [(turn.index, turn.start, turn.prompt, turn.sampled, turn.cached_tokens) for turn in episode.turns]
    # The third prompt is shorter than the turns before it, as where a server drops reasoning: the room does not grow.
    assert counts == [(0, 0, 100, 30, 0), (1, 130, 20, 5, 9), (2, 120, 0, 10, 0), (3, 165, 5, 2, 0)]
    assert [request["max_tokens"] for request in server.requests] == [4096, 4096 - 130, 4096 - 155, 4096 - 165]
    assert all(set(turn.seconds) == {"generate", "tools"} and turn.policy_version == 0 for turn in episode.turns)


@pytest.mark.parametrize("usage", [(100, 10, "length"), (4000, 97, "stop")])
async def test_a_turn_that_a_token_limit_cut_is_not_acted_on(usage: tuple[int, int, str]) -> None:
    prompt, sampled, finish = usage
    sandbox = DictSandbox()
    text = render(LS, "r2e_xml")
    answer = says(text, finish=finish, usage={"prompt_tokens": prompt, "completion_tokens": sampled})
    async with serving(answer) as server:
        episode = await run(server, sandbox=sandbox, eval={"native_calls": False})
    assert (episode.ending, len(episode.turns), sandbox.commands) == (Ending.MAX_TOKENS, 1, [])


OVERFLOWS = [
    "This model's maximum context length is 8192 tokens. However, your messages resulted in 9000 tokens.",
    "The input (2100 tokens) is longer than the model's context length (2048 tokens).",
    "Requested token count exceeds the model's maximum context length of 2048 tokens. You requested a total of ...",
    "Input length (2100 tokens) exceeds the maximum allowed length (2042 tokens). Use a shorter input or ...",
    "the request exceeds the available context size. try increasing the context size",
    "prompt is too long: 200001 tokens > 200000 maximum",
    "The input token count (1200000) exceeds the maximum number of tokens allowed (1048576).",
]


@pytest.mark.parametrize("said", OVERFLOWS)
async def test_a_context_that_is_full_ends_the_episode_as_a_token_limit_does(said: str) -> None:
    async with serving(says(None, native("a", LS)), status(400, said)) as server:
        episode = await run(server)
        assert (episode.ending, len(episode.turns), len(server.requests)) == (Ending.MAX_TOKENS, 1, 2)
        with pytest.raises(DataError, match="task t1: the endpoint's model has no room for the prompt and 4096 tokens"):
            await run(server)


async def test_a_prompt_beyond_max_tokens_is_refused_at_the_first_turn_and_ends_the_episode_later() -> None:
    big = says(None, native("a", LS), usage={"prompt_tokens": 4096, "completion_tokens": 1})
    async with serving(big) as server:
        with pytest.raises(DataError, match=r"task t1: its prompt has 4096 tokens, agent.max_tokens is 4096"):
            await run(server)
    async with serving(says(None, native("a", LS)), big) as server:
        episode = await run(server)
    assert (episode.ending, len(episode.turns)) == (Ending.MAX_TOKENS, 1)
    full = says(None, native("a", LS), usage={"prompt_tokens": 4000, "completion_tokens": 96})
    async with serving(full) as server:
        episode = await run(server)
    assert (episode.ending, len(episode.turns), len(server.requests)) == (Ending.MAX_TOKENS, 1, 1)
