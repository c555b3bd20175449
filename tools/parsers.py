"""Tool calls in the text of a turn: the three syntaxes that models were trained on, and their inverse.

`parse` never raises: it returns calls or a `CallProblem`. Rules, the same for all formats:
- a leading `<think>...</think>` is thought, not a call; a thought that does not end leaves no room for a call;
- text around calls is ignored; a malformed call is told only where no well-formed one is there;
- in the XML formats a value ends at the first `</parameter>` after which a parameter or the end of the function
  follows, so `<`, newlines and a stray `</parameter>` may stand in a value; one newline at each end is layout.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from agent_r3.types import ToolCall

CallFormat = Literal["r2e_xml", "hermes", "qwen3_coder"]


@dataclass(frozen=True, slots=True)
class CallProblem:
    """Why a turn holds no call that can be run. `message` is a sentence for the agent."""

    kind: Literal["none", "malformed"]
    message: str


_FUNCTION = re.compile(r"<function=([^<>\n]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>")
_VALUE_END = re.compile(r"</parameter>(?=\s*(?:<parameter=[^<>\n]+>|</function>))")
_FUNCTION_END = re.compile(r"\s*</function>")
_WRAP_START = re.compile(r"<tool_call>\s*")
_WRAP_END = re.compile(r"\s*</tool_call>")
_MARKS = {"r2e_xml": "<function=", "hermes": "<tool_call>", "qwen3_coder": "<tool_call>"}


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


_JSON = json.JSONDecoder(parse_constant=_refuse_constant)


class _MalformedError(Exception):
    """A place that starts like a call and does not go on like one."""


def parse(text: str, call_format: CallFormat) -> list[ToolCall] | CallProblem:
    """All well-formed calls of a turn in order, at least one; or the reason why there is none."""
    body = _without_thought(text)
    if body is None:
        return CallProblem("none", "The turn ended inside <think>.")
    calls: list[ToolCall] = []
    problem = ""
    mark, at = _MARKS[call_format], 0
    while (at := body.find(mark, at)) >= 0:
        try:
            call, at = _read(body, at, call_format)
            calls.append(call)
        except _MalformedError as exc:
            problem = problem or str(exc)
            at += len(mark)
    if calls:
        return calls
    if problem:
        return CallProblem("malformed", f"The tool call is not well formed: {problem}.")
    return CallProblem("none", "The turn holds no tool call.")


def render(call: ToolCall, call_format: CallFormat) -> str:
    """The text of a call, such that `parse` gives the call back. Raises ValueError where the format cannot carry it."""
    if call_format == "hermes":
        body = json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False)
        return f"<tool_call>\n{body}\n</tool_call>"
    parts = [f"<function={call.name}>\n"]
    for key, value in call.arguments.items():
        text = str(value)
        layout = "\n" if call_format == "qwen3_coder" or text[:1] == "\n" or text[-1:] == "\n" else ""
        parts.append(f"<parameter={key}>{layout}{text}{layout}</parameter>\n")
    text = "".join(parts) + "</function>"
    if call_format == "qwen3_coder":
        text = f"<tool_call>\n{text}\n</tool_call>"
    wanted = ToolCall(call.name, {key: str(value) for key, value in call.arguments.items()})
    if parse(text, call_format) != [wanted]:
        raise ValueError(f"{call_format} cannot carry this call of {call.name!r}")
    return text


def _without_thought(text: str) -> str | None:
    if not text.lstrip().startswith("<think>"):
        return text
    _, end, rest = text.partition("</think>")
    return rest if end else None


def _read(text: str, at: int, call_format: CallFormat) -> tuple[ToolCall, int]:
    if call_format == "r2e_xml":
        return _read_function(text, at)
    start = _WRAP_START.match(text, at)
    if start is None:
        raise _MalformedError("<tool_call> is missing")
    call, stop = (_read_json if call_format == "hermes" else _read_function)(text, start.end())
    end = _WRAP_END.match(text, stop)
    if end is None:
        raise _MalformedError("</tool_call> is missing")
    return call, end.end()


def _read_function(text: str, at: int) -> tuple[ToolCall, int]:
    head = _FUNCTION.match(text, at)
    if head is None:
        raise _MalformedError("<function=NAME> is missing")
    arguments: dict[str, object] = {}
    at = head.end()
    for key, value, stop in _parameters(text, at):
        if key in arguments:
            raise _MalformedError(f"parameter {key} is given twice")
        arguments[key], at = value, stop
    end = _FUNCTION_END.match(text, at)
    if end is None:
        raise _MalformedError("</function> is missing")
    return ToolCall(head.group(1).strip(), arguments), end.end()


def _parameters(text: str, at: int) -> Iterator[tuple[str, str, int]]:
    while (head := _PARAMETER.match(text, at)) is not None:
        end = _VALUE_END.search(text, head.end())
        if end is None:
            raise _MalformedError(f"parameter {head.group(1).strip()} does not end with </parameter>")
        value = text[head.end() : end.start()]
        at = end.end()
        yield head.group(1).strip(), value.removeprefix("\n").removesuffix("\n"), at


def _read_json(text: str, at: int) -> tuple[ToolCall, int]:
    try:
        value, stop = _JSON.raw_decode(text, at)
        json.dumps(value, ensure_ascii=False).encode()  # an escaped half of a surrogate pair is not text
    except (ValueError, RecursionError) as exc:
        raise _MalformedError(f"the text between the tags is not JSON ({exc})") from exc
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"].strip():
        raise _MalformedError('the JSON object needs a "name"')
    arguments = value.get("arguments")
    if not isinstance(arguments, dict):
        raise _MalformedError('the JSON object needs "arguments", an object')
    return ToolCall(value["name"].strip(), arguments), stop
