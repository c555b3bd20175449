"""Predictions files of any agent: a JSON object a line, a JSON list, or {instance id: prediction}.

The first is SWE-bench's own, the last what mini-swe-agent and SWE-agent write. Three keys are read of a prediction,
and `sample`, which tells several patches of one instance apart; others are ignored. Patches stay exactly as they are.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from agent_r3.errors import DataError, boundary
from agent_r3.eval.records import Key, Prediction

_REQUIRED = ("instance_id", "model_name_or_path", "model_patch")
_READ = (*_REQUIRED, "sample")
_PREDICTION = TypeAdapter(Prediction)
_MOST_SHOWN = 8


def read_predictions(path: Path) -> list[Prediction]:
    """The file's predictions in its order. A `model_patch` of null is an empty patch.

    Raises DataError, which names the file and the place in it.
    """
    if path.suffix not in (".json", ".jsonl"):
        raise DataError(f"{path}: a predictions file ends in .jsonl (one object a line) or .json (a list or an object)")
    if not path.is_file():
        raise DataError(f"predictions file {path} is not there")
    text = _text(path)
    whole = path.suffix == ".json" or text.lstrip().startswith("[")  # some name a list .jsonl
    found: list[Prediction] = []
    places: dict[Key, str] = {}
    for place, entry in (_of_document if whole else _of_lines)(path, text):
        prediction = _prediction(entry, f"{path}: {place}")
        if (earlier := places.setdefault(prediction.key, place)) != place:
            which = f"`{prediction.instance_id}`" + (f", sample {prediction.sample}" if prediction.sample else "")
            raise DataError(
                f"{path}: {earlier} and {place} are both of {which}; keep one, or give each a `sample` of its own"
            )
        found.append(prediction)
    if not found:
        raise DataError(f"{path} holds no predictions")
    return found


def _text(path: Path) -> str:
    with boundary(DataError, f"read {path}", OSError):
        data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        line = data.count(b"\n", 0, exc.start) + 1
        raise DataError(f"{path}: line {line} is not UTF-8 (byte 0x{data[exc.start]:02x}); save it as UTF-8") from exc


def _of_lines(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    # Only \n ends a line: str.splitlines would also cut at what JSON strings may hold as it is.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"line {number}", _parsed(line, f"{path}: line {number}")


def _of_document(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    document = _parsed(text, str(path)) if text.strip() else []
    if isinstance(document, list):
        yield from ((f"entry {number}", entry) for number, entry in enumerate(document, start=1))
    elif isinstance(document, dict) and not document.keys() & {*_REQUIRED}:
        for name, entry in document.items():
            place = f"entry `{name}`"
            if isinstance(entry, dict) and entry.setdefault("instance_id", name) != name:
                raise DataError(f"{path}: {place} is of another instance_id, {_short(entry['instance_id'])}")
            yield place, entry
    else:
        yield "the file", document


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as exc:
        at = f"column {exc.colno}" if "\n" not in text.strip() else f"line {exc.lineno}, column {exc.colno}"
        hint = "; one object a line belongs in a .jsonl file" if exc.msg == "Extra data" and "\n" in text else ""
        raise DataError(f"{where} is not JSON: {exc.msg} at {at}{hint}") from exc
    except (ValueError, RecursionError) as exc:
        raise DataError(f"{where} is not JSON: {exc}") from exc


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises ValueError for a key that is twice: JSON would take the last one without a word."""
    places: dict[str, int] = {}
    for number, (key, _) in enumerate(pairs, start=1):
        if (earlier := places.setdefault(key, number)) != number:
            raise ValueError(f"entries {earlier} and {number} of one object are both `{key}`")
    return dict(pairs)


def _prediction(entry: Any, where: str) -> Prediction:
    if not isinstance(entry, Mapping):
        raise DataError(f"{where}: a prediction is an object with {_listed(_REQUIRED)}, found {_short(entry)}")
    if missing := [key for key in _REQUIRED if key not in entry]:
        raise DataError(f"{where} has no {_listed(missing)}; it has {_listed(entry) or 'nothing'}")
    fields = {key: entry[key] for key in _READ if key in entry}
    if fields["model_patch"] is None:
        fields["model_patch"] = ""
    if type(sample := fields.get("sample", 0)) is not int:  # neither "1" nor true
        raise DataError(f"{where}: `sample` must be an integer, found {_short(sample)}")
    try:
        prediction = _PREDICTION.validate_python(fields)
        f"{prediction.instance_id}{prediction.model_name_or_path}".encode()
        prediction.model_patch.encode(errors="surrogateescape")
    except ValidationError as exc:
        error = exc.errors()[0]
        problem = str(error["msg"]).removeprefix("Value error, ")
        raise DataError(f"{where}: `{error['loc'][0]}`: {problem}, found {_short(error['input'])}") from exc
    except UnicodeEncodeError as exc:
        raise DataError(f"{where}: it holds half of a surrogate pair, {exc.object[exc.start]!a}") from exc
    return prediction


def _listed(keys: Any) -> str:
    names = [f"`{key}`" for key in keys]
    return ", ".join(names[:_MOST_SHOWN]) + (", ..." if len(names) > _MOST_SHOWN else "")


def _short(value: object) -> str:
    shown = ascii(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
