"""The Qwen3 chat template, rendered piece by piece as token ids.

`transformers.apply_chat_template` renders a whole conversation again at each turn. Here each call gives only the ids
that come next; what was sampled is never rendered at all. Where no thinking is involved both give the same ids, with
one intended difference: text from a repository or an issue is never read as control tokens. A file that holds
`<|im_end|>` becomes the characters of that string, where `apply_chat_template` would end the turn. (The system
message comes from the configuration and may use added tokens, such as `<tool_call>` in an example.)
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from agent_r3.errors import DataError, boundary
from agent_r3.hfconfig import ModelInfo, check_tokenizer
from agent_r3.types import Int32Array

START, END = "<|im_start|>", "<|im_end|>"
RESPONSE, RESPONSE_END = "<tool_response>", "</tool_response>"


@dataclass(frozen=True, slots=True)
class _Mark:
    """A control token of the template, set by us and never taken from text."""

    token: str


class ChatRenderer:
    """Renders turns of one model. Holds no state of a conversation."""

    def __init__(self, full: Tokenizer, plain: Tokenizer, marks: dict[str, int]) -> None:
        self._full = full
        self._plain = plain
        self._marks = marks
        self.stop_id: int = marks[END]
        """The token that ends a sampled turn."""

    @classmethod
    def from_folder(cls, model: ModelInfo) -> "ChatRenderer":
        """Read `tokenizer.json` of a model folder.

        Raises DataError when it is missing, broken, has ids that the model has not, or lacks the template's tokens.
        """
        check_tokenizer(model)
        path = model.path / "tokenizer.json"
        # tokenizers raises plain Exception for whatever it cannot read.
        with boundary(DataError, f"read {path}", Exception):
            source = path.read_text(encoding="utf-8")
            full = Tokenizer.from_str(source)
            plain = Tokenizer.from_str(json.dumps(_without_added_tokens(json.loads(source))))
        added = {token.content: number for number, token in full.get_added_tokens_decoder().items()}
        for mark in (START, END):
            if mark not in added:
                raise DataError(f"{path} has no special token {mark}: not a tokenizer with the Qwen3 chat template")
        # Older Qwen tokenizers spell <tool_response> in ordinary tokens, and so do we then.
        marks = {mark: added[mark] for mark in (START, END, RESPONSE, RESPONSE_END) if mark in added}
        for mark, number in marks.items():
            if number in plain.encode(mark, add_special_tokens=False).ids:
                raise DataError(f"{path}: plain text {mark} cannot be told from the control token {number}")
        return cls(full, plain, marks)

    def initial(self, system: str, user: str) -> Int32Array:
        """System and user message, up to where the assistant's first turn begins."""
        head = self._encode([_Mark(START)])
        head += self._full.encode(f"system\n{system}", add_special_tokens=False).ids
        return _array(
            head
            + self._encode([_Mark(END), "\n", _Mark(START), f"user\n{user}", _Mark(END), "\n"])
            + self._encode([_Mark(START), "assistant\n"])
        )

    def observation(self, texts: Sequence[str], *, closed: bool = True) -> Int32Array:
        """What stands between a sampled `<|im_end|>` and the next turn: separator, tool responses, assistant's head.

        `closed=False`: the sampled turn was cut before its `<|im_end|>`, which is put in front, outside the loss.
        Several texts share one user turn, as Qwen3 merges consecutive tool messages.
        """
        parts: list[str | _Mark] = [] if closed else [_Mark(END)]
        parts += ["\n", _Mark(START), "user"]
        for text in texts:
            parts += ["\n", _Mark(RESPONSE), f"\n{text}\n", _Mark(RESPONSE_END)]
        parts += [_Mark(END), "\n", _Mark(START), "assistant\n"]
        return _array(self._encode(parts))

    def encode_turn(self, text: str) -> Int32Array:
        """Ids of a written assistant turn with its stop token, for supervised learning. Added tokens are recognised."""
        return _array([*self._full.encode(text, add_special_tokens=False).ids, self.stop_id])

    def decode(self, ids: Int32Array) -> str:
        """The text of sampled ids with all control tokens but the one that ends the turn."""
        numbers = [int(number) for number in ids]
        if numbers and numbers[-1] == self.stop_id:
            numbers.pop()
        return str(self._full.decode(numbers, skip_special_tokens=False))

    def _encode(self, parts: Sequence[str | _Mark]) -> list[int]:
        """Neighbouring texts are encoded as one, since only control tokens cut a text into independent pieces."""
        ids: list[int] = []
        text = ""
        for part in [*parts, _Mark("")]:
            number = self._marks.get(part.token) if isinstance(part, _Mark) else None
            if isinstance(part, str):
                text += part
            elif number is None and part.token:
                text += part.token
            else:
                ids += self._plain.encode(text, add_special_tokens=False).ids if text else []
                text = ""
                if number is not None:
                    ids.append(number)
        return ids


def _without_added_tokens(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """Without them no text can become a control token."""
    return tokenizer | {"added_tokens": [], "post_processor": None}


def _array(ids: Sequence[int]) -> Int32Array:
    return np.asarray(ids, dtype=np.int32)
