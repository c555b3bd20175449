"""SWE-bench and SWE-smith rows -> tasks, which kind a row is, and what a malformed one is told."""

import json
from pathlib import Path
from typing import Any

import pytest

from agent_r3.config import TasksConfig
from agent_r3.envs.datasets import load_tasks
from agent_r3.envs.reverse import UnreversibleError, reversed_patch
from agent_r3.envs.rows import Origin, task_from_row
from agent_r3.errors import DataError
from agent_r3.types import Source
from tests.support.r2e_rows import r2e_row
from tests.support.swe_rows import BUG, bench_row, row_of_5x, smith_row

ORIGIN = Origin("rows.jsonl", 3, dataset="rows")


def test_a_swe_bench_row_becomes_a_task_with_the_image_of_its_id() -> None:
    task = task_from_row(bench_row(), ORIGIN)
    assert (task.id, task.repo, task.source) == ("django__django-11099", "django/django", Source.SWE_BENCH)
    assert task.image == "swebench/sweb.eval.x86_64.django_1776_django-11099:latest"
    assert task.gold_patch == BUG
    assert (task.workdir, task.bug_patch, task.test_files) == ("/testbed", "", ())


def test_a_swe_bench_row_may_name_its_image() -> None:
    assert task_from_row(bench_row(image="mirror/some:tag"), ORIGIN).image == "mirror/some:tag"


def test_a_row_of_5x_keeps_what_its_harness_reads() -> None:
    row = row_of_5x()
    task = task_from_row(row, ORIGIN)
    assert task.difficulty == "<15 min fix"
    assert json.loads(json.dumps(task.harness_row)) == {
        **{name: row[name] for name in ("instance_id", "repo", "version", "image", "log_parser", "eval_type")},
        "eval_script": row["eval_script"],
        "FAIL_TO_PASS": json.loads(row["FAIL_TO_PASS"]),
        "PASS_TO_PASS": json.loads(row["PASS_TO_PASS"]),
    }


def test_an_older_row_keeps_what_it_has_and_gets_the_image_of_its_id() -> None:
    task = task_from_row(bench_row(), ORIGIN)
    assert set(task.harness_row) == {"instance_id", "repo", "version", "image", "FAIL_TO_PASS", "PASS_TO_PASS"}
    assert (task.harness_row["image"], task.difficulty) == (task.image, "")


@pytest.mark.parametrize("as_json", [False, True])
def test_image_assets_may_be_an_object_or_json(as_json: bool) -> None:
    assets = {"test_patch": [{"path": "a.png", "url": "http://x/a.png"}]}
    task = task_from_row(row_of_5x(image_assets=json.dumps(assets) if as_json else assets), ORIGIN)
    assert task.harness_row["image_assets"] == assets


def test_test_names_are_kept_whole_with_spaces_dashes_and_clocks() -> None:
    expected = task_from_row(bench_row(), ORIGIN).expected
    assert dict(expected) == dict.fromkeys(["test_a (tests.T) - with words", "test b [12:30:01]", "test_c"], "PASSED")
    assert "tests/test_core.py::test_add[1 - 2]" in task_from_row(smith_row(), ORIGIN).expected


@pytest.mark.parametrize("column", ["FAIL_TO_PASS", "PASS_TO_PASS"])
def test_lists_of_tests_may_be_lists_or_json(column: str) -> None:
    for row in (bench_row(), smith_row()):
        names = row[column] if isinstance(row[column], list) else json.loads(row[column])
        both = [task_from_row(row | {column: value}, ORIGIN) for value in (names, json.dumps(names))]
        assert both[0] == both[1]


def test_a_swe_smith_row_becomes_a_task_whose_gold_patch_undoes_its_bug() -> None:
    task = task_from_row(smith_row(), ORIGIN)
    assert (task.source, task.image) == (Source.SWE_SMITH, "jyangballin/swesmith.x86_64.owner_1776_repo.1fd52536")
    assert task.bug_patch == BUG
    assert task.gold_patch == BUG.replace("1111111..2222222", "2222222..1111111").replace(
        "-    return a + b\n+    return a - b", "+    return a + b\n-    return a - b"
    )
    assert task.test_files == ("tests/test_core.py",)
    assert task.test_command == (
        "/opt/miniconda3/envs/testbed/bin/python -m pytest --disable-warnings --color=no "
        "tests/test_core.py tests/test_other.py"
    )
    assert task.other_tests and set(task.expected.values()) == {"PASSED"} and len(task.expected) == 3


def test_a_swe_smith_image_of_another_owner_stays_his() -> None:
    task = task_from_row(smith_row(image_name="swebench/swesmith.x86_64.a__b.12"), ORIGIN)
    assert task.image == "swebench/swesmith.x86_64.a_1776_b.12"


@pytest.mark.parametrize(
    "column",
    ["instance_id", "repo", "base_commit", "patch", "problem_statement", "FAIL_TO_PASS", "PASS_TO_PASS"],
)
def test_a_missing_column_of_swe_bench_is_named_with_file_and_row(column: str) -> None:
    with pytest.raises(DataError, match=f"^rows.jsonl: row 3: column `{column}` is missing$"):
        task_from_row(bench_row(**{column: None}), ORIGIN)


@pytest.mark.parametrize(
    "column", ["instance_id", "repo", "patch", "problem_statement", "FAIL_TO_PASS", "PASS_TO_PASS"]
)
def test_a_missing_column_of_swe_smith_is_named_with_file_and_row(column: str) -> None:
    with pytest.raises(DataError, match=f"^rows.jsonl: row 3: column `{column}` is missing$"):
        task_from_row(smith_row(**{column: None}), ORIGIN)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (bench_row(FAIL_TO_PASS="[1"), "column `FAIL_TO_PASS` is not JSON"),
        (bench_row(FAIL_TO_PASS=[1]), r"column `FAIL_TO_PASS` must be a list of test names, found \[1\]"),
        (bench_row(PASS_TO_PASS='{"a": 1}'), "column `PASS_TO_PASS` must be a list of test names"),
        (bench_row(FAIL_TO_PASS="[]"), "column `FAIL_TO_PASS` names no test"),
        (bench_row(image=7), "column `image` must be a non-empty string, found 7"),
        (bench_row(patch=" "), "column `patch` must be a non-empty string"),
        (row_of_5x(eval_script=["pytest"]), "column `eval_script` must be a non-empty string, found"),
        (row_of_5x(image_assets="{"), "column `image_assets` is not JSON"),
        (row_of_5x(image_assets=["a.png"]), "column `image_assets` must be an object, found"),
        (smith_row(problem_statement=""), "column `problem_statement` must be a non-empty string"),
        (smith_row(patch="nonsense"), "column `patch` is not a diff of text files: 'nonsense'"),
        (smith_row(patch=BUG[:-30]), "column `patch` is not a diff of text files: its last hunk is cut off"),
        (smith_row(FAIL_TO_PASS=["test_add"]), "column `FAIL_TO_PASS` and PASS_TO_PASS must hold ids such as"),
        (smith_row(PASS_TO_PASS=["../../etc/x.py::test"]), "column `FAIL_TO_PASS` and PASS_TO_PASS must hold ids"),
        (smith_row(PASS_TO_PASS=[f"tests/{'x' * 90}{n}.py::t" for n in range(2_000)]), "too many for one command"),
    ],
)
def test_a_malformed_column_is_named_with_file_row_and_reason(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"^rows.jsonl: row 3: .*{message}") as caught:
        task_from_row(row, ORIGIN)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "?", "answer": "!"}, "has none of the columns by which a row is known: R2E-Gym"),
        (bench_row() | {"image_name": "x"}, r"columns of SWE-bench \(`test_patch`\) and SWE-smith \(`image_name`\)"),
        (r2e_row() | {"test_patch": "x"}, r"columns of R2E-Gym \(`repo_name`\) and SWE-bench \(`test_patch`\)"),
    ],
)
def test_a_row_of_no_kind_or_of_two_is_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"^rows.jsonl: row 3: .*{message}"):
        task_from_row(row, ORIGIN)


def test_a_dataset_is_of_one_kind(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([bench_row(), smith_row()]))
    with pytest.raises(
        DataError, match=r"rows\.json: row 2 is a row of SWE-smith, the ones before it are of SWE-bench"
    ):
        load_tasks(TasksConfig(dataset=str(path)))


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_files_of_every_kind_are_loaded(tmp_path: Path, suffix: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for row, source in ((r2e_row(), Source.R2E), (bench_row(), Source.SWE_BENCH), (smith_row(), Source.SWE_SMITH)):
        path = tmp_path / f"{source}{suffix}"
        if suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist([row]), path)
        else:
            path.write_text(json.dumps(row) + "\n")
        tasks = load_tasks(TasksConfig(dataset=str(path)))
        assert [(task.source, task.dataset) for task in tasks] == [(source, path.name)]


def test_a_patch_reversed_twice_is_the_patch() -> None:
    patch = (
        "diff --git a/new.py b/new.py\nnew file mode 100755\nindex 0000000..3333333\n--- /dev/null\n+++ b/new.py\n"
        "@@ -0,0 +1 @@\n+a\n\\ No newline at end of file\n"
        "diff --git a/old.py b/old.py\ndeleted file mode 100644\nindex 3333333..0000000\n--- a/old.py\n+++ /dev/null\n"
        "@@ -1,2 +0,0 @@ class A\n-a\n--- b\n"
        "diff --git a/mode.sh b/mode.sh\nold mode 100644\nnew mode 100755\n"
    )
    undone = reversed_patch(patch + BUG)
    assert "deleted file mode 100755" in undone and "+++ /dev/null\n@@ -1 +0,0 @@\n-a\n\\ No newline" in undone
    assert "old mode 100755\nnew mode 100644\n" in undone and "@@ -0,0 +1,2 @@ class A\n+a\n+-- b\n" in undone
    assert reversed_patch(undone) == patch + BUG


@pytest.mark.parametrize(
    "patch",
    [
        "diff --git a/x b/x\nBinary files a/x and b/x differ\n",
        "diff --git a/x b/y\nsimilarity index 100%\nrename from x\nrename to y\n",
        "diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1,2 +1 @@\n a\n*b\n",
        "diff --git a/x b/x\n--- a/x\n@@ -1 +1 @@\n-a\n+b\n",
        "diff --git a/x b/x\n",
    ],
)
def test_what_is_no_text_diff_is_not_reversed(patch: str) -> None:
    with pytest.raises(UnreversibleError):
        reversed_patch(patch)
