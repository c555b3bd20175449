"""A new policy into one SGLang server, through a model folder on disk.

`/update_weights_from_disk` is a whole update session by itself (SGLang 0.5.23, weight_updater.py: it restores, loads
and post-processes; `/begin_weight_update` .. `/end_weight_update` are for tensors sent piece by piece and would do that
twice). Unless generation is paused the server finishes the requests it runs, under the old weights, then swaps, then
flushes: with `flush_cache` neither KV nor routing rows of the old weights can be served under the new version. A server
that could not flush answers with an error, which is raised.
"""

from pathlib import Path

import httpx
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_exponential

from agent_r3.errors import ContractError, EngineError, boundary

_LOAD_TIMEOUT_S = 1800.0  # the largest models from a shared disk


def load_weights(url: str, version: int, folder: Path, *, retry_s: float) -> None:
    """Returns when the server at `url` serves the weights in `folder` as `version`, its cache flushed.

    One that does not answer (it is being restarted) is tried again for `retry_s`. Raises EngineError when it stays away
    or refuses, ContractError when it reports another version.
    """
    retrying = Retrying(
        retry=retry_if_exception_type(httpx.TransportError),
        stop=stop_after_delay(retry_s),
        wait=wait_exponential(multiplier=0.1, max=2.0),
        reraise=True,
    )
    request = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True}
    with (
        boundary(EngineError, f"push weights {version} to {url}", httpx.HTTPError, ValueError),
        httpx.Client(base_url=url, timeout=httpx.Timeout(_LOAD_TIMEOUT_S, connect=10.0), trust_env=False) as http,
    ):
        # Loading the same folder twice is harmless, so a lost answer is simply asked for again.
        answer = retrying.copy()(lambda: _answer(http.post("/update_weights_from_disk", json=request)))
        if not answer.get("success"):
            raise EngineError(f"engine {url} did not take weights {version}: {answer.get('message', answer)}")
        served = retrying.copy()(lambda: _answer(http.get("/model_info")))["weight_version"]
    if served != str(version):
        raise ContractError(f"engine {url} serves weight version {served!r} after version {version} was pushed")


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
