"""Rows in R2E-Gym's DatasetRow schema, small and well-formed; a test overwrites what it wants to be wrong."""

import json
from typing import Any

from agent_r3.envs.commits import file_diff


def commit_content(*diffs: dict[str, Any]) -> str:
    return json.dumps(
        {
            "file_diffs": list(diffs) or [file_diff("pkg/core.py", "a = 1\n", "a = 2\n")],
            "old_commit_hash": "0" * 40 + "^",
            "new_commit_hash": "0" * 40,
            "commit_message": "Fix",
            "commit_date": "2020-01-01T00:00:00Z",
            "metadata": {},
        }
    )


def r2e_row(**changes: Any) -> dict[str, Any]:
    """A row of the repository `tornado`; `None` takes a column away."""
    row = {
        "repo_name": "tornado",
        "docker_image": "namanjain12/tornado_final:0123456789abcdef0123456789abcdef01234567",
        "commit_hash": "0123456789abcdef0123456789abcdef01234567",
        "parsed_commit_content": commit_content(),
        "execution_result_content": "{}",
        "modified_files": ["pkg/core.py"],
        "modified_entity_summaries": [{"ast_type_str": "function", "name": "f"}],
        "relevant_files": ["pkg/core.py"],
        "num_non_test_files": 1,
        "num_non_test_func_methods": 1,
        "num_non_test_lines": 2,
        "prompt": "You write an issue.\n[ISSUE]\nIt is 1.\n[/ISSUE]\nThanks.",
        "problem_statement": "[ISSUE]\nIt is 1, not 2.\n[/ISSUE]",
        "expected_output_json": json.dumps({"T.test_a": "PASSED", "T.test_b": "FAILED"}),
    } | changes
    return {column: value for column, value in row.items() if value is not None}
