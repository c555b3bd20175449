"""Evaluation on SWE-bench Verified."""
