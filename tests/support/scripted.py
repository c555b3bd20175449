"""A scripted engine and a sandbox of a dictionary: for unit tests of the loop, never for the tests that matter."""

from collections.abc import Callable, Sequence

import numpy as np

from agent_r3.envs.sandbox import ExecResult, FileMissingError
from agent_r3.errors import EngineError
from agent_r3.rollout.engine import Generation
from agent_r3.rollout.tokens import ChatRenderer
from agent_r3.types import Int32Array, MoEShape, Routing
from tests.support.trajectories import random_rows


class ScriptedEngine:
    """Answers each request with the next text; remembers what it was sent; reports perfect caching."""

    def __init__(
        self,
        renderer: ChatRenderer,
        texts: Sequence[str | None],
        *,
        shape: MoEShape,
        version: int = 0,
        cached: Callable[[int], int] = lambda seen: seen,
    ) -> None:
        self._renderer = renderer
        self._texts = list(texts)
        self._shape = shape
        self._version = version
        self._cached = cached
        self._seen = 0
        self.inputs: list[Int32Array] = []
        self.outputs: list[Int32Array] = []

    @property
    def rest(self) -> list[str | None]:
        """What was not asked for yet."""
        return self._texts

    async def generate(
        self, input_ids: Int32Array, *, max_new_tokens: int, rows_from: int, seed: int | None = None
    ) -> Generation:
        """None in the script is a dead engine; a text longer than `max_new_tokens` is cut as a server cuts it."""
        text = self._texts.pop(0)
        if text is None:
            raise EngineError("scripted: the engine is gone")
        ids = self._renderer.encode_turn(text)
        finished = len(ids) <= max_new_tokens
        ids = ids[:max_new_tokens]
        cached, self._seen = self._cached(self._seen), len(input_ids) + len(ids) - 1
        self.inputs.append(input_ids)
        self.outputs.append(ids)
        rows = len(input_ids) + len(ids) - 1 - rows_from
        return Generation(
            output_ids=ids,
            logprobs=np.full(len(ids), -0.5, np.float32),
            routing=Routing(rows_from, random_rows(np.random.default_rng(rows_from), rows, self._shape)),
            cached_tokens=cached,
            policy_version=self._version,
            finished=finished,
            retractions=0,
        )


class DictSandbox:
    """Files in a dictionary; every command prints its own text."""

    id = "dict"
    protected = False

    def __init__(self, files: dict[str, bytes] | None = None) -> None:
        self.files = files or {}
        self.commands: list[str] = []
        self.closed = False

    async def exec(
        self,
        command: str,
        *,
        timeout_s: float,
        cwd: str | None = None,
        max_output_bytes: int = 1 << 20,
        persistent: bool = False,
        stdin: bytes = b"",
        max_report_bytes: int = 0,
    ) -> ExecResult:
        self.commands.append(command)
        output = command.encode()
        return ExecResult(output, len(output), 0, timed_out=False, truncated=False, seconds=0.0)

    async def put(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        self.files[path] = data

    async def get(self, path: str, *, max_bytes: int = 16 << 20) -> bytes:
        if path not in self.files:
            raise FileMissingError(path)
        return self.files[path]

    async def diff(self) -> bytes:
        return b"a change"

    async def close(self) -> None:
        self.closed = True
