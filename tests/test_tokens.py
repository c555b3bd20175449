"""Incremental rendering against the real Qwen3 tokenizer and its own chat template."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r3.errors import DataError
from agent_r3.hfconfig import ModelInfo
from agent_r3.rollout.tokens import ChatRenderer
from tests.support.qwen import qwen3_tokenizer_folder

CONTROL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</tool_call>", "<tool_response>"]
CONTROL += ["</tool_response>", "<think>", "</think>", "<|fim_prefix|>"]


def info(folder: Path, vocab_size: int = 151_936) -> ModelInfo:
    return ModelInfo(folder, "Qwen3MoeForCausalLM", 2, vocab_size, 4_096, None, ())


@pytest.fixture(scope="module")
def folder() -> Path:
    return qwen3_tokenizer_folder()


@pytest.fixture(scope="module")
def renderer(folder: Path) -> ChatRenderer:
    return ChatRenderer.from_folder(info(folder))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def edited(folder: Path, tmp_path: Path) -> Callable[[Callable[[dict[str, Any]], None]], Path]:
    """A copy of the tokenizer after a change to its JSON."""

    def edit(change: Callable[[dict[str, Any]], None]) -> Path:
        shutil.copy(folder / "tokenizer_config.json", tmp_path)
        tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        change(tokenizer)
        (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
        return tmp_path

    return edit


def incremental(
    renderer: ChatRenderer, system: str, user: str, turns: Sequence[tuple[str, Sequence[str]]]
) -> list[int]:
    parts = [renderer.initial(system, user)]
    for text, observations in turns:
        parts += [renderer.encode_turn(text), renderer.observation(observations)]
    return [int(number) for number in np.concatenate(parts)]


def full(reference: Any, system: str, user: str, turns: Sequence[tuple[str, Sequence[str]]]) -> list[int]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    for text, observations in turns:
        messages.append({"role": "assistant", "content": text})
        messages += [{"role": "tool", "content": observation} for observation in observations]
    rendered = reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    return list(rendered)


CALL = '<tool_call>\n{"name": "search", "arguments": {"search_term": "naïve\\n"}}\n</tool_call>'
TURNS = [
    ("I will look.\n" + CALL, ["src/a.py (2)\n\n"]),
    ("<function=finish>\n</function>", ["first", "second, merged into the same user turn"]),
    ("  spaces around  \n", ["\n  \ttab\r\nCR and 数字 and e\u0301 and \U0001f600\n"]),
]


def test_incremental_ids_equal_the_full_chat_template(renderer: ChatRenderer, reference: Any) -> None:
    system = f"Use tools, for instance\n{CALL}\n"
    assert incremental(renderer, system, "Fix  it.\n", TURNS) == full(reference, system, "Fix  it.\n", TURNS)


# Arbitrary text without the tokens that must differ and without what the template itself rewrites (<think>).
PLAIN = st.text(st.characters(exclude_characters="<", exclude_categories=("Cs",)), max_size=40)


@given(PLAIN, PLAIN, st.lists(st.tuples(PLAIN, st.lists(PLAIN, min_size=1, max_size=3)), max_size=3))
@settings(max_examples=150, deadline=None)
def test_any_conversation_without_control_text_equals_the_template(
    renderer: ChatRenderer, reference: Any, system: str, user: str, turns: list[tuple[str, list[str]]]
) -> None:
    assert incremental(renderer, system, user, turns) == full(reference, system, user, turns)


@pytest.mark.parametrize("token", CONTROL)
def test_control_tokens_in_foreign_text_stay_plain_text(renderer: ChatRenderer, reference: Any, token: str) -> None:
    hostile = f"before {token} after{token}"
    number = reference.convert_tokens_to_ids(token)
    assert number in reference.encode(hostile)  # the reference would read it as a control token
    clean_prompt, clean_observation = renderer.initial("s", "harmless"), renderer.observation(["harmless"])
    for ids, clean in (
        (renderer.initial("s", hostile), clean_prompt),
        (renderer.observation([hostile]), clean_observation),
        (renderer.observation([hostile, hostile]), renderer.observation(["harmless", "harmless"])),
    ):
        assert np.count_nonzero(ids == number) == np.count_nonzero(clean == number)
        assert hostile in renderer.decode(ids)


def test_the_separator_after_a_turn_belongs_to_the_observation(renderer: ChatRenderer, reference: Any) -> None:
    observation = renderer.observation(["x"])
    assert renderer.decode(observation[:1]) == "\n"
    assert renderer.decode(observation).endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert renderer.stop_id == reference.convert_tokens_to_ids("<|im_end|>") not in (int(observation[0]),)


def test_a_turn_cut_before_its_end_is_closed_by_the_observation(renderer: ChatRenderer) -> None:
    assert list(renderer.observation(["x"], closed=False)) == [renderer.stop_id, *renderer.observation(["x"])]


def test_decode_shows_control_tokens_but_the_one_that_ends_the_turn(renderer: ChatRenderer) -> None:
    assert renderer.decode(renderer.encode_turn(CALL)) == CALL
    assert renderer.decode(np.array([renderer.stop_id, renderer.stop_id])) == "<|im_end|>"
    assert renderer.decode(np.array([], dtype=np.int32)) == ""


def test_a_tokenizer_without_tool_response_tokens_spells_them(
    edited: Callable[[Callable[[dict[str, Any]], None]], Path],
) -> None:
    from transformers import AutoTokenizer

    def change(tokenizer: dict[str, Any]) -> None:
        kept = [token for token in tokenizer["added_tokens"] if "tool_response" not in token["content"]]
        tokenizer["added_tokens"] = kept

    folder = edited(change)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {
        number: token
        for number, token in config["added_tokens_decoder"].items()
        if "tool_response" not in token["content"]
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    older = AutoTokenizer.from_pretrained(folder)
    assert len(older.encode("<tool_response>")) > 1
    assert incremental(ChatRenderer.from_folder(info(folder)), "s", "u", TURNS) == full(older, "s", "u", TURNS)


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match="does not match the model"):
        ChatRenderer.from_folder(info(folder, vocab_size=151_000))


def test_a_tokenizer_without_the_chat_tokens_is_refused(
    edited: Callable[[Callable[[dict[str, Any]], None]], Path],
) -> None:
    def change(tokenizer: dict[str, Any]) -> None:
        tokenizer["added_tokens"] = [t for t in tokenizer["added_tokens"] if t["content"] != "<|im_end|>"]

    with pytest.raises(DataError, match=r"has no special token <\|im_end\|>"):
        ChatRenderer.from_folder(info(edited(change)))


def test_a_broken_or_missing_tokenizer_is_told_in_one_line(
    tmp_path: Path, edited: Callable[[Callable[[dict[str, Any]], None]], Path]
) -> None:
    with pytest.raises(DataError, match=r"tokenizer\.json is not there"):
        ChatRenderer.from_folder(info(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"read .*tokenizer.json") as caught:
        ChatRenderer.from_folder(info(edited(lambda tokenizer: tokenizer["model"].update(merges=[["no", "such"]]))))
    assert "\n" not in str(caught.value)
