"""Sandboxes, task datasets and grading. Only this package talks to Docker."""
