"""One image pulled from its registry: patient with a registry that is busy, quick about a name that does not exist."""

import json
import threading
import time
from collections.abc import Iterator

import docker
import structlog
from docker.auth import get_config_header, resolve_repository_name
from docker.utils import parse_repository_tag
from requests.exceptions import RequestException
from tenacity import (
    Retrying,
    retry_if_exception_type,
    stop_after_attempt,
    stop_after_delay,
    stop_when_event_set,
    wait_exponential,
)
from tenacity.nap import sleep_using_event

from agent_r3.errors import DataError, DiskFullError, ImagePullError

log = structlog.get_logger(__name__)

_ATTEMPTS = 8  # 2 minutes of back-off in all
_SILENCE_S = 300.0  # without any progress the connection counts as dead
_REPORT_S = 10.0
# What registries and engines say of a name that does not exist, or not for this login: no later try will differ.
_NO_SUCH = ("manifest unknown", "not found", "pull access denied", "repository does not exist", "name unknown")


class Puller:
    """`pull` blocks; `close` makes those that wait or read give up."""

    def __init__(self, api: docker.APIClient, timeout_s: float) -> None:
        self._api = api
        self._timeout_s = timeout_s
        self._closed = threading.Event()

    def close(self) -> None:
        self._closed.set()

    def pull(self, name: str) -> None:
        """Raises DataError for an image that does not exist, DiskFullError, and ImagePullError after all tries."""
        deadline = time.monotonic() + self._timeout_s
        retrying = Retrying(
            retry=retry_if_exception_type(ImagePullError),
            stop=stop_after_attempt(_ATTEMPTS) | stop_after_delay(self._timeout_s) | stop_when_event_set(self._closed),
            wait=wait_exponential(min=0.5, max=60),
            sleep=sleep_using_event(self._closed),
            before_sleep=lambda state: log.warning("pull failed, trying again", error=_last_error(state.outcome)),
            reraise=True,
        )
        retrying(self._attempt, name, deadline)

    def _attempt(self, name: str, deadline: float) -> None:
        began = reported = time.monotonic()
        layers: dict[str, tuple[int, int]] = {}
        log.info("pulling image", image=name)
        for event in self._events(name, deadline):
            if "error" in event:
                raise _refusal(name, str(event["error"]))
            detail = event.get("progressDetail") or {}
            if event.get("status") == "Downloading" and isinstance(detail, dict) and detail.get("total"):
                layers[str(event.get("id"))] = int(detail["current"]), int(detail["total"])
            now = time.monotonic()
            if self._closed.is_set():
                raise ImagePullError(f"pull of {name}: given up, the sandboxes are being closed")
            if now > deadline:
                raise ImagePullError(f"pull of {name}: not done after {self._timeout_s:.0f} s (sandbox.pull_timeout_s)")
            if now - reported > _REPORT_S:
                reported = now
                done, total = (sum(part[i] for part in layers.values()) >> 20 for i in (0, 1))
                log.info("pulling image", image=name, done_mib=done, of_mib=total, seconds=round(now - began))
        log.info("image pulled", image=name, seconds=round(time.monotonic() - began, 1))

    def _events(self, name: str, deadline: float) -> Iterator[dict[str, object]]:
        """The engine's progress messages. The SDK's own `pull` would wait for ever on a silent connection."""
        repository, tag = parse_repository_tag(name)
        registry, _ = resolve_repository_name(repository)
        login = get_config_header(self._api, registry)
        silence = max(1.0, min(_SILENCE_S, deadline - time.monotonic()))
        try:
            with self._api.post(
                f"{self._api.base_url}/v{self._api.api_version}/images/create",
                params={"fromImage": repository, "tag": tag or "latest"},
                headers={"X-Registry-Auth": login} if login else {},
                stream=True,
                timeout=silence,
            ) as response:
                if not response.ok:
                    raise _refusal(name, _message(response.text), response.status_code)
                for line in response.iter_lines():
                    if line.strip():
                        yield json.loads(line)
        except (RequestException, OSError) as exc:
            raise ImagePullError(f"pull of {name}: {type(exc).__name__}: {' '.join(str(exc).split())[:300]}") from exc


def _message(body: str) -> str:
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body


def _refusal(name: str, text: str, status: int = 500) -> Exception:
    text = " ".join(text.split())[:300]
    lower = text.lower()
    if "no space left on device" in lower:
        return DiskFullError(f"pull of {name}: {text}")
    if "toomanyrequests" not in lower and (status < 500 or any(words in lower for words in _NO_SUCH)):
        return DataError(f"image {name} cannot be pulled: {text}; see that it exists and that you may read it")
    return ImagePullError(f"pull of {name}: {text}")


def _last_error(outcome: object) -> str:
    return str(outcome.exception()) if hasattr(outcome, "exception") else ""
