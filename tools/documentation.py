"""The tools' documentation for the system prompt, in the wording each call format needs."""

import json
from functools import cache
from typing import Any

from agent_r3.tools.base import Arguments, Tool
from agent_r3.tools.parsers import CallFormat

_XML_EXAMPLE = "<function=tool_name>\n<parameter=name>value</parameter>\n</function>"
_QWEN_EXAMPLE = (
    "<tool_call>\n<function=tool_name>\n<parameter=name>\nvalue, which may\nspan lines\n</parameter>\n"
    "</function>\n</tool_call>"
)
_JSON_EXAMPLE = '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'


@cache
def describe(tools: tuple[type[Tool], ...], call_format: CallFormat) -> str:
    """Every tool with its parameters, and how to write a call."""
    if call_format == "hermes":
        listing = "\n".join(json.dumps(function_schema(tool)) for tool in tools)
        return (
            "# Tools\n\nYou call one function per turn. "
            "You are provided with function signatures within <tools></tools> XML tags:\n"
            f"<tools>\n{listing}\n</tools>\n\n"
            "For a function call, return a json object with function name and arguments within "
            f"<tool_call></tool_call> XML tags:\n{_JSON_EXAMPLE}"
        )
    example = _XML_EXAMPLE if call_format == "r2e_xml" else _QWEN_EXAMPLE
    listing = "\n\n".join(_paragraph(tool) for tool in tools)
    return f"You have these tools:\n\n{listing}\n\nCall one tool per turn, in this form:\n\n{example}"


def parameters(arguments: type[Arguments]) -> dict[str, dict[str, Any]]:
    """Parameter name -> JSON schema, without pydantic's titles and without the null of optional ones."""
    schema = arguments.model_json_schema(by_alias=False)
    cleaned: dict[str, dict[str, Any]] = {}
    for name, field in schema["properties"].items():
        kinds = [kind for kind in field.get("anyOf", [field]) if kind.get("type") != "null"]
        kind = kinds[0]
        entry: dict[str, Any] = {"type": kind["type"], "description": " ".join(field["description"].split())}
        choices = kind.get("enum", [kind["const"]] if "const" in kind else None)
        if choices is not None:
            entry["enum"] = choices
        if kind["type"] == "array":
            entry["items"] = kind["prefixItems"][0]
        cleaned[name] = entry
    return cleaned


def required(arguments: type[Arguments]) -> list[str]:
    return [name for name, field in arguments.model_fields.items() if field.is_required()]


def function_schema(tool: type[Tool]) -> dict[str, Any]:
    """A tool as OpenAI's API and the Hermes format describe a function."""
    body = {"type": "object", "properties": parameters(tool.arguments), "required": required(tool.arguments)}
    return {"type": "function", "function": {"name": tool.name, "description": tool.description, "parameters": body}}


def _paragraph(tool: type[Tool]) -> str:
    needed = required(tool.arguments)
    lines = [f"{tool.name}: {tool.description}"]
    for name, entry in parameters(tool.arguments).items():
        kind = entry["type"] + ("" if name in needed else ", optional")
        choices = f" One of: {', '.join(entry['enum'])}." if "enum" in entry else ""
        lines.append(f"  - {name} ({kind}): {entry['description']}{choices}")
    return "\n".join(lines)
