"""Shared fixtures live in tests/support, one module a real service."""

pytest_plugins = [
    "tests.support.docker",
    "tests.support.engine",
    "tests.support.store",
    "tests.support.hf",
    "tests.support.tasks",
]
