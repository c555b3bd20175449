"""Predictions files of any agent, and which files of tests a patch touches."""

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r3.envs.patches import protected
from agent_r3.errors import DataError
from agent_r3.eval.predictions import read_predictions
from agent_r3.eval.records import Prediction
from agent_r3.eval.touched import tests_touched as touched_by

# Any text, and lone surrogates that stand for bytes which are not UTF-8.
PATCHES = st.text(st.characters(exclude_categories=["Cs"]) | st.characters(min_codepoint=0xDC80, max_codepoint=0xDCFF))
NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r\0"), min_size=1).filter(str.strip)
PREDICTIONS = st.lists(
    st.builds(Prediction, NAMES, NAMES, PATCHES, st.integers(0, 3)), min_size=1, unique_by=lambda one: one.key
)


def entry(instance_id: str = "a", patch: str | None = "diff\n", model: str = "m", **more: Any) -> dict[str, Any]:
    return {"instance_id": instance_id, "model_name_or_path": model, "model_patch": patch, **more}


def entry_of(prediction: Prediction) -> dict[str, Any]:
    more = {"sample": prediction.sample} if prediction.sample else {}
    return entry(prediction.instance_id, prediction.model_patch, prediction.model_name_or_path, cost=1.5, **more)


def lines(entries: Sequence[object], end: str = "\n") -> str:
    return "".join(json.dumps(one) + end for one in entries)


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("predictions")


@settings(deadline=None)
@given(PREDICTIONS, st.sampled_from(["\n", "\r\n", "\n \n\r\n"]), st.sampled_from(["", "\ufeff"]))
def test_lines_read_back_exactly_as_they_were_written(
    folder: Path, predictions: list[Prediction], end: str, mark: str
) -> None:
    path = write(folder, "lines.jsonl", mark + lines([entry_of(one) for one in predictions], end))
    assert read_predictions(path) == predictions


@settings(deadline=None)
@given(PREDICTIONS, st.sampled_from([None, 2]), st.sampled_from(["list.json", "list.jsonl"]))
def test_a_list_reads_back_exactly_as_it_was_written(
    folder: Path, predictions: list[Prediction], indent: int | None, name: str
) -> None:
    path = write(folder, name, json.dumps([entry_of(one) for one in predictions], indent=indent))
    assert read_predictions(path) == predictions


@settings(deadline=None)
@given(PREDICTIONS)
def test_an_object_of_instance_ids_reads_back_exactly_as_it_was_written(
    folder: Path, predictions: list[Prediction]
) -> None:
    by_id = {one.instance_id: one for one in predictions}
    path = write(folder, "preds.json", json.dumps({name: entry_of(one) for name, one in by_id.items()}))
    assert read_predictions(path) == list(by_id.values())


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_separators_that_are_no_line_breaks_for_json_do_not_cut_a_line(folder: Path, patch: str) -> None:
    path = write(folder, "raw.jsonl", json.dumps(entry(patch=f"\u2028\x85{patch}"), ensure_ascii=False))
    assert [one.model_patch for one in read_predictions(path)] == [f"\u2028\x85{patch}"]


def test_an_object_may_leave_the_ids_to_its_keys_and_null_is_an_empty_patch(tmp_path: Path) -> None:
    one = entry("a", None)
    del one["instance_id"]
    [prediction] = read_predictions(write(tmp_path, "preds.json", json.dumps({"a": one})))
    assert (prediction.instance_id, prediction.model_patch, prediction.empty) == ("a", "", True)


def test_one_prediction_may_stand_alone_in_a_json_file(tmp_path: Path) -> None:
    assert read_predictions(write(tmp_path, "one.json", json.dumps(entry()))) == [Prediction("a", "m", "diff\n")]


def test_an_id_may_be_longer_than_a_file_name(tmp_path: Path) -> None:
    [prediction] = read_predictions(write(tmp_path, "p.jsonl", lines([entry("x/" * 5_000)])))
    assert len(prediction.instance_id) == 10_000


TWICE = lines([entry("a"), entry("b"), entry("a", "other")])


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("p.jsonl", "", "p.jsonl holds no predictions"),
        ("p.json", " \n", "p.json holds no predictions"),
        ("p.json", "[]", "p.json holds no predictions"),
        ("p.jsonl", "\ufeff\r\n\r\n", "p.jsonl holds no predictions"),
        ("p.txt", "", "p.txt: a predictions file ends in .jsonl (one object a line) or .json"),
        ("p.jsonl", lines([entry()]) + "{oops}\n", "p.jsonl: line 2 is not JSON: Expecting property name"),
        (
            "p.jsonl",
            "\n" + lines([entry()])[:20],
            "p.jsonl: line 2 is not JSON: Expecting property name enclosed in double quotes at column 21",
        ),
        ("p.json", "[1,\n2", "p.json is not JSON: Expecting ',' delimiter at line 2, column 2"),
        ("p.json", TWICE, "p.json is not JSON: Extra data at line 2, column 1; one object a line belongs in a .jsonl"),
        ("p.jsonl", "[" * 100_000, "p.jsonl is not JSON: "),
        ("p.jsonl", b'\n{"instance_id": "\xff\xfe"}\n', "p.jsonl: line 2 is not UTF-8 (byte 0xff)"),
        ("p.jsonl", lines([entry()]).encode("utf-16"), "p.jsonl: line 1 is not UTF-8"),
        ("p.jsonl", TWICE, "p.jsonl: line 1 and line 3 are both of `a`; keep one"),
        ("p.json", json.dumps([entry("b", sample=1)] * 2), "entry 1 and entry 2 are both of `b`, sample 1; keep one"),
        ("p.json", '{"a": {}, "b": {}, "a": {}}', "entries 1 and 3 of one object are both `a`"),
        ("p.jsonl", '{"instance_id": "a", "instance_id": "b"}', "entries 1 and 2 of one object are both `instance_id`"),
        ("p.json", json.dumps({"a": entry("b")}), "entry `a` is of another instance_id, 'b'"),
        ("p.jsonl", '"a"\n', "line 1: a prediction is an object with `instance_id`, `model_name_or_path`, `model_p"),
        ("p.json", "7", "p.json: the file: a prediction is an object with `instance_id`"),
        ("p.json", '{"resolved_ids": []}', "entry `resolved_ids`: a prediction is an object"),
        (
            "p.jsonl",
            '{"instance_id": "a", "patch": ""}',
            "line 1 has no `model_name_or_path`, `model_patch`; it has `i",
        ),
        ("p.jsonl", "{}", "line 1 has no `instance_id`, `model_name_or_path`, `model_patch`; it has nothing"),
        ("p.jsonl", lines([entry(patch=7)]), "line 1: `model_patch`: "),  # type: ignore[arg-type]
        ("p.jsonl", lines([entry(), entry(7)]), "line 2: `instance_id`: "),  # type: ignore[arg-type]
        ("p.jsonl", lines([entry(" ")]), "line 1: `instance_id`: must be a line of text, found ' '"),
        ("p.jsonl", lines([entry("a\nb")]), "line 1: `instance_id`: must be a line of text, found 'a\\nb'"),
        ("p.jsonl", lines([entry(model="")]), "line 1: `model_name_or_path`: must be a line of text"),
        ("p.jsonl", lines([entry() | {"model_name_or_path": None}]), "line 1: `model_name_or_path`: "),
        ("p.jsonl", lines([entry(sample=True)]), "line 1: `sample` must be an integer, found True"),
        ("p.jsonl", lines([entry(sample="1")]), "line 1: `sample` must be an integer, found '1'"),
        ("p.jsonl", lines([entry(sample=-1)]), "line 1: `sample`: "),
        ("p.jsonl", lines([entry(patch="\ud83d")]), "line 1: it holds half of a surrogate pair, '\\ud83d'"),
        ("p.jsonl", lines([entry("a\udc80")]), "line 1: it holds half of a surrogate pair, '\\udc80'"),
    ],
)
def test_what_is_no_predictions_file_is_told_in_one_line_with_its_place(
    tmp_path: Path, name: str, content: str | bytes, said: str
) -> None:
    path = write(tmp_path, name, content)
    with pytest.raises(DataError) as caught:
        read_predictions(path)
    message = str(caught.value)
    assert said in message and str(path) in message, message
    assert "\n" not in message and len(message) < len(str(path)) + 300


def test_a_file_that_is_not_there_and_a_folder_are_named(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    for name in ("nothing.jsonl", "folder.json"):
        with pytest.raises(DataError, match=rf"predictions file .*{name} is not there"):
            read_predictions(tmp_path / name)


def _git(repository: Path, *arguments: str) -> bytes:
    own = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1", "PATH": os.environ["PATH"]}
    names = ("-c", "user.name=a", "-c", "user.email=a@localhost")
    return subprocess.run(
        ["git", "-C", str(repository), *names, *arguments], env=own, capture_output=True, check=True
    ).stdout


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A change of every kind that is to test files and to others, with awkward names, staged."""
    made = tmp_path_factory.mktemp("repository")
    files = [
        *("core.py", "moved.py", "mode.sh", "gone.py", "a b.py", "tests/test_a.py", "tests/moved here.py"),
        *("tests/gone.py", "test_mode.py", "conftest.py", 'tests/caf\u00e9 \t"x\\y.py', "data/tests.bin"),
    ]
    _git(made, "init", "-q", "-b", "main")
    for number, name in enumerate(files):
        (made / name).parent.mkdir(exist_ok=True)
        (made / name).write_text("".join(f"{number} {line}\n" for line in range(30)))
    with (made / os.fsdecode(b"tests/\xff.py")).open("w") as file:
        file.write("x\n")
    _git(made, "add", "-A")
    _git(made, "commit", "-q", "-m", "base")
    for name in ("core.py", "a b.py", "tests/test_a.py", "conftest.py", 'tests/caf\u00e9 \t"x\\y.py'):
        (made / name).write_text((made / name).read_text().replace(" 15\n", " 15\n++ b/tests/no_file.py\n"))
    with (made / os.fsdecode(b"tests/\xff.py")).open("a") as file:
        file.write("-- a/tests/no_file_either.py\n")
    for name in ("mode.sh", "test_mode.py"):
        (made / name).chmod(0o755)
    for name in ("gone.py", "tests/gone.py"):
        (made / name).unlink()
    (made / "moved.py").rename(made / "tests/test_moved.py")
    (made / "tests/moved here.py").rename(made / "moved here.py")
    (made / "tests/empty file.py").touch()
    (made / "tests/data.bin").write_bytes(bytes(range(256)) * 4)
    (made / "other.bin").write_bytes(bytes(range(255, -1, -1)))
    _git(made, "add", "-A")
    return made


@pytest.mark.parametrize("options", [[], ["--no-renames"], ["--binary"], ["-U0"], ["--full-index", "-U30"]])
def test_the_files_of_tests_are_those_that_git_itself_names(repository: Path, options: list[str]) -> None:
    patch = _git(repository, "diff", "--cached", *options)
    listed = _git(repository, "diff", "--cached", "--name-only", "--no-renames", "-z").split(b"\0")[:-1]
    named = [name for name in listed if protected(os.fsdecode(name))]
    assert len(named) == 10 and len(listed) == 17
    assert touched_by(patch) == tuple(name.decode(errors="replace") for name in sorted(named))


def _crlf(patch: bytes) -> bytes:
    return patch.replace(b"\n", b"\r\n")


@pytest.mark.parametrize("change", [bytes, _crlf, lambda patch: patch.rstrip(b"\n")])
def test_line_ends_do_not_matter(repository: Path, change: Callable[[bytes], bytes]) -> None:
    patch = _git(repository, "diff", "--cached", "--no-renames")
    assert touched_by(change(patch)) == touched_by(patch)


@pytest.mark.parametrize(
    ("patch", "names"),
    [
        (b"", ()),
        (b"no patch at all\n", ()),
        (b"--- core.py.orig\t2020-01-01\n+++ core.py\n@@ -1 +1 @@\n-a\n+b\n", ()),
        (b"--- old/setup.cfg\t2020-01-01\n+++ new/setup.cfg\t2020-01-02\n@@ -1 +1 @@\n-a\n+b\n", ("setup.cfg",)),
        (b"--- /dev/null\n+++ b/x/conftest.py\n@@ -0,0 +1 @@\n+--- a/tests/b.py\n", ("x/conftest.py",)),
        (b"diff --git a/tests/a.py b/b.py\ncopy from tests/a.py\ncopy to b.py\n", ()),
        (b'diff --git "a/tests/\\303\\251.py" "b/tests/\\303\\251.py"\nold mode 100644\n', ("tests/\u00e9.py",)),
    ],
)
def test_names_are_read_from_headers_alone(patch: bytes, names: tuple[str, ...]) -> None:
    assert touched_by(patch) == names


def test_a_tasks_own_test_files_count_whatever_they_are_called() -> None:
    patch = b"--- a/own/checks.py\n+++ b/own/checks.py\n@@ -1 +1 @@\n-a\n+b\n"
    assert (touched_by(patch), touched_by(patch, ("own/checks.py",))) == ((), ("own/checks.py",))
