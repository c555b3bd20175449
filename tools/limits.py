"""Cutting what an agent is shown: the head and the tail stay, and the text says how much is gone."""

import re

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


def strip_escapes(text: str) -> str:
    """Remove terminal escape sequences (colours, titles): they are tokens without meaning."""
    return _ESCAPES.sub("", text)


def cut_lines(text: str, limit: int) -> str:
    """Keep the first and last half of `limit` lines. A text of at most `limit` lines is returned as it is."""
    lines = text.split("\n")
    body = lines[:-1] if lines[-1] == "" else lines
    if len(body) <= limit:
        return text
    head, tail = limit - limit // 2, limit // 2
    gone = len(body) - head - tail
    kept = [*body[:head], f"[... {gone} of {len(body)} lines left out ...]", *body[len(body) - tail :]]
    return "\n".join(kept)


def cut_chars(text: str, limit: int) -> str:
    """Cut to at most `limit` characters, the note about the cut included; head and tail are kept."""
    if len(text) <= limit:
        return text
    note = f"\n[... {len(text) - limit} of {len(text)} characters left out ...]\n"
    # The note takes room as well; its own digits may grow by what it displaces.
    room = limit - len(note) - 2
    if room <= 0:
        return text[:limit]
    head, tail = room - room // 2, room // 2
    note = f"\n[... {len(text) - head - tail} of {len(text)} characters left out ...]\n"
    return text[:head] + note + text[len(text) - tail :]
