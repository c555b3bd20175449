"""Shared fixtures live in tests/support, one module a real service."""

pytest_plugins = [
    "tests.support.docker",
    "tests.support.engine",
    "tests.support.store",
    "tests.support.hf",
    "tests.support.tasks",
    "tests.support.swe_bench",
    "tests.support.trainer",
    "tests.support.cli",
    "tests.support.predictions",
    "tests.support.private_engine",
    "tests.support.registry",
    "tests.support.refusing_engine",
    "tests.support.bwrap",
    "tests.support.protocol",
    "tests.support.training",
]
