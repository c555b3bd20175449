"""A new policy into the SGLang servers, through a model folder on disk.

`/update_weights_from_disk` is a whole update session by itself (SGLang 0.5.23, weight_updater.py: it restores, loads
and post-processes; `/begin_weight_update` .. `/end_weight_update` are for tensors sent piece by piece and would do that
twice). Unless generation is paused the server finishes the requests it runs, under the old weights, then swaps, then
flushes: with `flush_cache` neither KV nor routing rows of the old weights can be served under the new version. A server
that could not flush answers with an error, which is raised.
"""

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_exponential

from agent_r3.errors import ContractError, EngineError, boundary

_LOAD_TIMEOUT_S = 1800.0  # one server reading the largest models from a shared disk


class WeightPublisher:
    """Writes `folder`/v000012, makes every server load it, and keeps the last version for servers started later.

        publisher = WeightPublisher(urls, run.folder / "weights")
        folder = publisher.push(12, policy.save_hf)
        store.set_policy(12, str(folder))
        publisher.prune(12)

    A server that does not answer (it is being restarted) is tried again for `retry_s`.
    """

    def __init__(self, urls: Sequence[str], folder: Path, *, retry_s: float = 300.0) -> None:
        self._urls = tuple(url.rstrip("/") for url in urls)
        self._folder = folder.resolve()
        self._retry_s = retry_s

    def folder(self, version: int) -> Path:
        """Where the weights of a version lie."""
        return self._folder / f"v{version:06d}"

    def push(self, version: int, save: Callable[[Path], None]) -> Path:
        """Write the weights and load them everywhere; returns when every server serves `version`, its cache flushed.

        Raises EngineError when a server stays away or refuses, ContractError when it reports another version.
        """
        folder = self.folder(version)
        folder.parent.mkdir(parents=True, exist_ok=True)
        save(folder)
        self.load(version, folder)
        return folder

    def load(self, version: int, folder: Path) -> None:
        """Load weights that are already written, in all servers at once. Raises like `push`."""
        with ThreadPoolExecutor(max_workers=max(len(self._urls), 1)) as pool:
            list(pool.map(lambda url: self._load(url, version, folder), self._urls))

    def prune(self, keep: int) -> None:
        """Delete every other version. Call it once the store names `keep`, from where restarted servers start."""
        for other in self._folder.glob("v[0-9]*"):
            if other != self.folder(keep):
                shutil.rmtree(other, ignore_errors=True)

    def _load(self, url: str, version: int, folder: Path) -> None:
        with (
            boundary(EngineError, f"push weights {version} to {url}", httpx.HTTPError, ValueError),
            httpx.Client(base_url=url, timeout=httpx.Timeout(_LOAD_TIMEOUT_S, connect=10.0), trust_env=False) as http,
        ):
            self._update(http, url, version, folder)
            served = self._retrying()(lambda: _answer(http.get("/model_info")))["weight_version"]
        if served != str(version):
            raise ContractError(f"engine {url} serves weight version {served!r} after version {version} was pushed")

    def _update(self, http: httpx.Client, url: str, version: int, folder: Path) -> None:
        request = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True}
        # Loading the same folder twice is harmless, so a lost answer is simply asked for again.
        answer = self._retrying()(lambda: _answer(http.post("/update_weights_from_disk", json=request)))
        if not answer.get("success"):
            raise EngineError(f"engine {url} did not take weights {version}: {answer.get('message', answer)}")

    def _retrying(self) -> Retrying:
        return Retrying(
            retry=retry_if_exception_type(httpx.TransportError),
            stop=stop_after_delay(self._retry_s),
            wait=wait_exponential(multiplier=0.1, max=2.0),
            reraise=True,
        )


def _answer(response: httpx.Response) -> dict[str, object]:
    """The JSON answer. A refused update is 400 with `success` false; a server still starting is 503."""
    if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
        raise httpx.ConnectError(f"{response.url} is still starting", request=response.request)
    if response.status_code != httpx.codes.BAD_REQUEST:
        response.raise_for_status()
    answer = response.json()
    if not isinstance(answer, dict):
        raise ValueError(f"{response.url} answered {response.text[:200]!r}")
    return answer
