"""Rows of SWE-bench and SWE-smith, small and well-formed; a test overwrites what it wants to be wrong."""

import json
from typing import Any

BUG = """diff --git a/pkg/core.py b/pkg/core.py
index 1111111..2222222 100644
--- a/pkg/core.py
+++ b/pkg/core.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a + b
+    return a - b
"""


def bench_row(**changes: Any) -> dict[str, Any]:
    """A SWE-bench row as they were before swebench 5; `None` takes a column away."""
    row = {
        "instance_id": "django__django-11099",
        "repo": "django/django",
        "base_commit": "d26b2424437dabeeca94d7900b37d2df4410da0c",
        "patch": BUG,
        "test_patch": "diff --git a/tests/t.py b/tests/t.py\n",
        "problem_statement": "Names may end in a newline.",
        "hints_text": "",
        "created_at": "2019-03-20T03:46:18Z",
        "version": "3.0",
        "FAIL_TO_PASS": json.dumps(["test_a (tests.T) - with words", "test b [12:30:01]"]),
        "PASS_TO_PASS": json.dumps(["test_c"]),
    } | changes
    return {column: value for column, value in row.items() if value is not None}


def row_of_5x(**changes: Any) -> dict[str, Any]:
    """A SWE-bench row with all that swebench 5 reads; `None` takes a column away."""
    script = "#!/bin/bash\n: '>>>>> Start Test Output'\n./tests/runtests.py\n: '>>>>> End Test Output'\n"
    return bench_row(
        **{
            "image": "swebench/sweb.eval.x86_64.django_1776_django-11099:latest",
            "log_parser": "parse_log_django",
            "eval_type": "pass_and_fail",
            "eval_script": script,
            "difficulty": "<15 min fix",
            "image_assets": "{}",
        }
        | changes
    )


def smith_row(**changes: Any) -> dict[str, Any]:
    """A SWE-smith row, whose bug is BUG; `None` takes a column away."""
    row = {
        "instance_id": "Owner__repo.1fd52536.combine_file__09vlzwgc",
        "repo": "swesmith/Owner__repo.1fd52536",
        "patch": BUG,
        "FAIL_TO_PASS": ["tests/test_core.py::test_add[1 - 2]"],
        "PASS_TO_PASS": ["tests/test_core.py::T::test_zero", "tests/test_other.py::test_one"],
        "created_at": "2025-01-01T00:00:00",
        "image_name": "swesmith.x86_64.Owner__repo.1fd52536",
        "problem_statement": "Sums are wrong.",
    } | changes
    return {column: value for column, value in row.items() if value is not None}
