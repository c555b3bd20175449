"""New policies of the trainer: written as model folders, and loaded by all SGLang servers at once."""

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from agent_r3.weight_load import load_weights


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
            list(pool.map(lambda url: load_weights(url, version, folder, retry_s=self._retry_s), self._urls))

    def prune(self, keep: int) -> None:
        """Delete every other version. Call it once the store names `keep`, from where restarted servers start."""
        for other in self._folder.glob("v[0-9]*"):
            if other != self.folder(keep):
                shutil.rmtree(other, ignore_errors=True)
