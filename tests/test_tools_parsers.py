"""Call syntaxes: what is a call, what is not, and that nothing a model writes can raise."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r3.tools import CallFormat, CallProblem, parse, render
from agent_r3.types import ToolCall

FORMATS: tuple[CallFormat, ...] = ("r2e_xml", "hermes", "qwen3_coder")
NAMES = st.from_regex(r"\A[a-z_][a-z_0-9]{0,11}\Z")
MARKS = st.sampled_from(
    [
        *("<function=", "<function=search>", "</function>", "<parameter=", "<parameter=path>", "</parameter>"),
        *("<tool_call>", "</tool_call>", "<think>", "</think>", "\n", "\n\n", '{"name": "x", "arguments": {}}', "{"),
        *('"\\ud800"', "[" * 50),
    ]
)
CODE = st.lists(st.one_of(MARKS, st.text(max_size=8)), max_size=8).map("".join)


def calls_of(text: str, call_format: CallFormat) -> list[ToolCall]:
    parsed = parse(text, call_format)
    assert isinstance(parsed, list), parsed
    return parsed


def problem_of(text: str, call_format: CallFormat) -> CallProblem:
    parsed = parse(text, call_format)
    assert isinstance(parsed, CallProblem), parsed
    return parsed


@given(st.sampled_from(FORMATS), NAMES, st.dictionaries(NAMES, CODE, max_size=4))
def test_a_rendered_call_parses_back_to_itself_or_is_refused(
    call_format: CallFormat, name: str, arguments: dict[str, str]
) -> None:
    call = ToolCall(name, arguments)
    try:
        text = render(call, call_format)
    except ValueError:
        assert call_format != "hermes" and any("</parameter>" in value for value in arguments.values())
        return
    assert parse(text, call_format) == [call]
    assert parse(f"I will look.\n{text}\nDone.", call_format) == [call]


@given(st.sampled_from(FORMATS), CODE | st.text())
@settings(max_examples=400)
def test_garbage_gives_calls_or_a_problem_and_never_raises(call_format: CallFormat, text: str) -> None:
    parsed = parse(text, call_format)
    assert isinstance(parsed, CallProblem) or (parsed and all(isinstance(call, ToolCall) for call in parsed))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=4), lambda inner: st.lists(inner, max_size=3)
    )
)
def test_hermes_keeps_json_values_of_any_type(value: object) -> None:
    call = ToolCall("f", {"value": value})
    assert parse(render(call, "hermes"), "hermes") == [call]


@pytest.mark.parametrize(
    "value",
    [
        "a < b",
        "<b>x</b>",
        "two\nlines",
        "\n",
        "\n\nx\n",
        "",
        "ends </parameter> in the middle",
        "</function>",
        "<tool_call>",
    ],
)
@pytest.mark.parametrize("call_format", FORMATS)
def test_values_may_hold_markup_and_newlines(value: str, call_format: CallFormat) -> None:
    call = ToolCall("file_editor", {"old_str": value, "new_str": "y"})
    assert calls_of(render(call, call_format), call_format) == [call]


def test_one_newline_at_each_end_of_an_xml_value_is_layout() -> None:
    text = "<function=f>\n<parameter=a>\n  x\n\n</parameter>\n</function>"
    assert calls_of(text, "r2e_xml") == [ToolCall("f", {"a": "  x\n"})]


def test_a_value_ends_where_a_parameter_or_the_end_of_the_function_follows() -> None:
    text = "<function=f><parameter=a>1</parameter> <parameter=b>2</parameter></function>"
    assert calls_of(text, "r2e_xml") == [ToolCall("f", {"a": "1", "b": "2"})]
    with pytest.raises(ValueError, match="cannot carry"):
        render(ToolCall("f", {"a": "1</parameter>\n</function>"}), "r2e_xml")


def test_several_calls_come_in_order() -> None:
    text = render(ToolCall("a", {}), "qwen3_coder") + "\n" + render(ToolCall("b", {"k": "v"}), "qwen3_coder")
    assert calls_of(text, "qwen3_coder") == [ToolCall("a", {}), ToolCall("b", {"k": "v"})]


def test_a_mention_of_the_syntax_before_a_call_is_ignored() -> None:
    text = "I write <function=...> now: <function=f></function>"
    assert calls_of(text, "r2e_xml") == [ToolCall("f", {})]


def test_a_call_inside_a_thought_is_not_a_call() -> None:
    call = "<function=f></function>"
    assert calls_of(f"<think>maybe {call}</think>{call}", "r2e_xml") == [ToolCall("f", {})]
    assert problem_of(f"<think>maybe {call}</think>", "r2e_xml").kind == "none"
    assert problem_of(f"\n<think>maybe {call}", "r2e_xml").message == "The turn ended inside <think>."


@pytest.mark.parametrize(
    ("call_format", "text", "said"),
    [
        ("r2e_xml", "<function=f><parameter=a>1", "parameter a does not end with </parameter>"),
        ("r2e_xml", "<function=f>", "</function> is missing"),
        ("r2e_xml", "<function=>", "<function=NAME> is missing"),
        ("r2e_xml", "<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>", "a is given twice"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}', "</tool_call> is missing"),
        ("hermes", "<tool_call>{nonsense}</tool_call>", "is not JSON"),
        ("hermes", "<tool_call>" + "[" * 100_000, "is not JSON"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "is not JSON"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>', "is not JSON"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', 'needs a "name"'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "x"}</tool_call>', 'needs "arguments"'),
        ("qwen3_coder", "<tool_call>f()</tool_call>", "<function=NAME> is missing"),
        ("qwen3_coder", "<tool_call><function=f></function>", "</tool_call> is missing"),
    ],
)
def test_a_malformed_call_is_told_by_what_is_wrong(call_format: CallFormat, text: str, said: str) -> None:
    problem = problem_of(text, call_format)
    assert problem.kind == "malformed"
    assert said in problem.message


def test_text_without_a_call_is_no_call() -> None:
    for call_format in FORMATS:
        assert problem_of("All done.", call_format) == CallProblem("none", "The turn holds no tool call.")


def test_parsing_a_long_turn_of_openings_takes_no_noticeable_time() -> None:
    began = time.monotonic()
    problem_of("<function=f><parameter=a>" * 1_500, "r2e_xml")
    problem_of("<tool_call>" * 3_000, "hermes")
    assert time.monotonic() - began < 2
