"""Look-alikes of R2E-Gym's, SWE-bench's and SWE-smith's images, on the environment of a built offline task."""

from collections.abc import Mapping

import docker
import pytest

from agent_r3.types import Task
from tests.support.docker import build_image
from tests.support.tasks import PATHSPEC

_REPOSITORY = r"""
RUN rm -rf /testbed/.git && find /testbed -mindepth 1 -maxdepth 1 ! -name .venv -exec rm -rf {} + ; cd /testbed \
 && printf 'def add(a, b):\n    return a + b\n' >core.py && mkdir tests \
 && printf 'from core import add\n\ndef test_add():\n    assert add(2, 1) == 3\n' >tests/test_core.py \
 && printf 'from core import add\n\ndef test_zero():\n    assert add(0, 0) == 0\n\ndef test_broken():\n    assert 0\n' \
    >tests/test_other.py \
 && git init -q -b main . && printf '.venv/\n' >.git/info/exclude && git add -A \
 && git -c user.name=base -c user.email=base@localhost commit -q -m sound
"""

# The clone and its environment in /testbed, the buggy commit checked out, the fix packed in a remote branch.
_R2E = r"""
FROM {environment}
{repository}
RUN cd /testbed && git update-ref refs/remotes/origin/main HEAD && sed -i 's/a + b/a - b/' core.py \
 && git -c user.name=base -c user.email=base@localhost commit -q -a --amend -m buggy && mkdir /r2e_tests \
 && cp tests/test_core.py /r2e_tests/test_1.py && ln -s /r2e_tests r2e_tests && mkdir -p tests/__pycache__ \
 && touch tests/__pycache__/test_core.pyc run_tests.sh && printf 'r2e_tests\nrun_tests.sh\n' >>.git/info/exclude
ENV VIRTUAL_ENV= PYTHONPATH= PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
"""

# The repository in /testbed, its environment is conda's; the same for SWE-bench and SWE-smith.
_CONDA = r"""
FROM {environment}
{repository}
RUN mkdir -p /opt/miniconda3/envs /opt/miniconda3/condabin && mv /testbed/.venv /opt/miniconda3/envs/testbed \
 && printf '#!/bin/sh\necho conda\n' >/opt/miniconda3/condabin/conda && chmod +x /opt/miniconda3/condabin/conda
ENV VIRTUAL_ENV= PYTHONPATH= PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
"""


def _fill(dockerfile: str, environment: str) -> str:
    return dockerfile.replace("{environment}", environment).replace("{repository}", _REPOSITORY)


@pytest.fixture(scope="session")
def r2e_image(docker_engine: docker.APIClient, built_tasks: Mapping[str, Task]) -> str:
    return build_image(docker_engine, "r2e", _fill(_R2E, built_tasks[PATHSPEC].image))


@pytest.fixture(scope="session")
def conda_image(docker_engine: docker.APIClient, built_tasks: Mapping[str, Task]) -> str:
    return build_image(docker_engine, "conda", _fill(_CONDA, built_tasks[PATHSPEC].image))
