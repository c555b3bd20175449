"""The Docker engine: is it there, which containers are left over, how one is removed. All calls here block."""

import contextlib
import time

import docker
import structlog
from docker.errors import APIError, NotFound
from docker.utils import kwargs_from_env
from requests.exceptions import RequestException

from agent_r3.envs.docker_faults import FAULTS
from agent_r3.envs.owners import has_ended
from agent_r3.errors import UserError

log = structlog.get_logger(__name__)

RUN_LABEL = "agent_r3.run"
OWNER_LABEL = "agent_r3.owner"
DEADLINE_LABEL = "agent_r3.deadline"  # Unix time after which nobody can still want the container

_GONE_S = 10  # a container that has not gone by itself by then is removed by force
_MEND = "run docker/engine.sh (Debian or Ubuntu, as root), or start Docker and see that `docker info` works"
_JOIN = "let this user into the group of the engine's socket (in the docker-compose stack: DOCKER_GID in .env)"


def connect(timeout_s: int = 30) -> docker.APIClient:
    """A client of the engine that DOCKER_HOST names, by default the local one. Raises UserError in one line."""
    try:
        # The SDK keeps a pool for each URL, and a pool that falls out of the list while a thread uses it is an error:
        # there must be far more of them than threads.
        api = docker.APIClient(version="auto", timeout=timeout_s, num_pools=100, **kwargs_from_env())
        api.headers["Connection"] = "close"  # or each of those pools would keep an open descriptor
    except FAULTS as exc:
        detail = " ".join(str(exc).split())[:200]
        mend = _JOIN if "Permission denied" in detail else _MEND
        raise UserError(f"no Docker engine can be used ({detail}); {mend}") from exc
    if not api.base_url.startswith(("http+docker://", "http://")):
        raise UserError(f"DOCKER_HOST leads to {api.base_url}; only a unix socket or plain TCP works, not TLS or ssh")
    return api


def docker_problem() -> str | None:
    """One line on why Docker cannot be used and what to do about it; None where it can."""
    try:
        connect(10).close()
    except UserError as exc:
        return str(exc)
    return None


def require_docker() -> None:
    """Raises UserError where Docker cannot be used."""
    connect(10).close()


def reap(run: str | None) -> int:
    """Remove left-over containers of `run`, of every run for None, and return their number.

    Left over is one whose owner process on this host has ended, or whose deadline has passed. What cannot be removed is
    logged.
    """
    try:
        api = connect()
    except UserError as exc:
        log.warning("left-over containers not removed", run=run, error=str(exc))
        return 0
    with contextlib.closing(api):
        return remove_left_over(api, run)


def remove_left_over(api: docker.APIClient, run: str | None) -> int:
    """As `reap`, with a client that is there already."""
    label = RUN_LABEL if run is None else f"{RUN_LABEL}={run}"
    removed = 0
    try:
        found = [c for c in api.containers(all=True, filters={"label": label}) if _left_over(c["Labels"])]
    except FAULTS as exc:
        log.warning("left-over containers not removed", run=run, error=str(exc))
        return 0
    for container in found:
        try:
            force_removal(api, container["Id"])
            removed += 1
        except FAULTS as exc:
            log.warning("a left-over container was not removed", container=container["Names"], error=str(exc))
    return removed


def await_removal(api: docker.APIClient, name: str) -> None:
    """Return when a container whose socket was closed has gone; force it when it does not go."""
    try:
        api.wait(name, timeout=_GONE_S, condition="removed")
    except NotFound:
        return
    except RequestException:
        force_removal(api, name)


def force_removal(api: docker.APIClient, name: str) -> bool:
    """Kill and remove a container; returns when it is gone. False when it was not there."""
    try:
        api.remove_container(name, force=True, v=True)
    except NotFound:
        return False
    except APIError as exc:
        if exc.status_code != 409:  # 409: auto_remove got there first and is at it
            raise
        _wait_until_gone(api, name)
    return True


def _wait_until_gone(api: docker.APIClient, name: str) -> None:
    try:
        api.wait(name, timeout=_GONE_S, condition="removed")
    except NotFound:
        return


def _left_over(labels: dict[str, str]) -> bool:
    if time.time() > float(labels.get(DEADLINE_LABEL, "inf")):
        return True
    return has_ended(labels[OWNER_LABEL])
