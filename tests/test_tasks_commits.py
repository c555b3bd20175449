"""ParsedCommit <-> unified diff, with the real `git apply` as the judge."""

import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agent_r3.envs.commits import UnpatchableError, file_diff, is_test_file, patch_of

# \r, \f and U+2028 end a line for str.splitlines but not for git.
_LINE = st.text(alphabet="ab \t\r\f\u2028é-+\\", max_size=4)
_TEXT = st.builds(lambda lines, end: "\n".join(lines) + end, st.lists(_LINE, max_size=12), st.sampled_from(["\n", ""]))


def _apply(patch: str, before: dict[str, bytes]) -> dict[str, bytes]:
    with TemporaryDirectory() as scratch:
        root = Path(scratch)
        for name, data in before.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(data)
        if patch:
            command = ["git", "apply", "--whitespace=nowarn", "-"]
            done = subprocess.run(command, input=patch.encode(), cwd=scratch, capture_output=True, check=False)
            assert done.returncode == 0, f"{done.stderr.decode()}\n{patch}"
        files = [path for path in root.rglob("*") if path.is_file() and ".git" not in path.parts]
        return {path.relative_to(root).as_posix(): path.read_bytes() for path in files}


@settings(max_examples=12, deadline=None)
@given(st.lists(st.tuples(_TEXT, _TEXT), min_size=1, max_size=12))
@example([("a", "a\n"), ("", "a"), ("a\n", ""), ("a\n" * 20 + "b", "b\n" + "a\n" * 20 + "b")])
def test_changed_files_re_emitted_from_their_hunks_apply_to_the_new_texts(pairs: list[tuple[str, str]]) -> None:
    names = [f"pkg/a file {number}.py" for number in range(len(pairs))]
    patch = patch_of([file_diff(name, old, new) for name, (old, new) in zip(names, pairs, strict=True)])
    before = {name: old.encode() for name, (old, _) in zip(names, pairs, strict=True)}
    assert _apply(patch, before) == {name: new.encode() for name, (_, new) in zip(names, pairs, strict=True)}


@settings(max_examples=6, deadline=None)
@given(_TEXT)
@example("")
def test_a_new_file_is_created_and_a_deleted_one_is_gone(text: str) -> None:
    diffs = [file_diff("pkg/new.py", None, text), file_diff("pkg/old.py", text, None)]
    assert _apply(patch_of(diffs), {"pkg/old.py": text.encode()}) == {"pkg/new.py": text.encode()}


def test_several_files_go_into_one_patch_and_test_files_are_left_out() -> None:
    diffs = [
        file_diff("pkg/a.py", "1\n", "2\n"),
        file_diff("tests/helper.py", "1\n", "2\n"),
        file_diff("pkg/test_a.py", "1\n", "2\n"),
        file_diff("b.txt", None, "new\n"),
    ]
    before = {"pkg/a.py": b"1\n", "tests/helper.py": b"1\n", "pkg/test_a.py": b"1\n"}
    assert _apply(patch_of(diffs), before) == before | {"pkg/a.py": b"2\n", "b.txt": b"new\n"}


def test_a_null_length_is_written_without_a_count() -> None:
    assert "@@ -1 +1 @@" in patch_of([file_diff("a.py", "1\n", "2\n")])


def test_what_r2e_writes_for_a_missing_final_newline_is_a_valid_note() -> None:
    diff = file_diff("a.py", "1", "2")
    # R2E keeps the note with or without the backslash, depending on the version that parsed the commit.
    for content in ("No newline at end of file", "\\ No newline at end of file", " No newline at end of file"):
        for line in diff["hunks"][0]["line_group"]["all_lines"]:
            if line["type"] == "note":
                line["content"] = content
        assert _apply(patch_of([diff]), {"a.py": b"1"}) == {"a.py": b"2"}


def _binary() -> dict[str, Any]:
    diff = file_diff("logo.png", None, "")
    return diff | {"is_binary_file": True, "binary_line": "Binary files /dev/null and b/logo.png differ", "hunks": []}


def _renamed() -> dict[str, Any]:
    diff = file_diff("b.py", "1\n", "2\n")
    return diff | {"header": {"file": {"path": "b.py"}, "misc_line": "similarity index 90%"}}


def _miscounted() -> dict[str, Any]:
    diff = file_diff("b.py", "1\n", "2\n")
    diff["hunks"][0]["descriptor"]["new_range"]["length"] = 7
    return diff


@pytest.mark.parametrize("diff", [_binary(), _renamed(), _miscounted()], ids=["binary", "renamed", "miscounted"])
def test_a_commit_that_no_text_diff_can_say_is_refused(diff: dict[str, Any]) -> None:
    with pytest.raises(UnpatchableError, match=r"logo\.png|b\.py"):
        patch_of([file_diff("a.py", "1\n", "2\n"), diff])


def test_a_mode_change_alone_is_left_out() -> None:
    diff = file_diff("run.sh", "1\n", "1\n")
    assert patch_of([diff | {"header": {"file": {"path": "run.sh"}, "misc_line": "old mode 100644"}}]) == ""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a/b_test.py", True),
        ("test_a.py", True),
        ("a/test_b.txt", True),
        ("a/tests/b.py", True),
        ("Test/b.c", True),
        ("testing/a.py", False),
        ("a/latest_b.py", False),
        ("contest/a.py", False),
    ],
)
def test_test_files_are_told_by_r2es_rule(path: str, expected: bool) -> None:
    assert is_test_file(path) is expected
