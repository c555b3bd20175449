"""What recording and returning routing rows costs: R3 on against off, CPU seconds per multi-turn trajectory.

Two SGLang servers of the same model: one with routed experts, asked for delta rows each turn, one without. Each runs
the same episodes in turn (order swapped from pair to pair) while the other sleeps. Counted: user and system time of
all processes of the server, and of this client (decoding, checks and splice included). CPU time, not wall time, since
on a machine with few cores client and server share them.

    agent-r3 bench r3 --pairs 12 --json
    python benchmarks/r3_overhead.py --model FOLDER --pairs 12 --json
"""

import argparse
import asyncio
import json
import math
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from agent_r3.config import EngineConfig, SamplingConfig
from agent_r3.hfconfig import ModelInfo, read_model
from agent_r3.rollout.client import EngineFleet, SGLangClient
from agent_r3.rollout.launcher import EngineServer
from agent_r3.routing import RoutingLedger, rows_from
from agent_r3.types import Int32Array

# Lengths of the tiny policy's episodes (tokens); a group shares its prompt.
PROMPT, OBSERVATION, SAMPLED, TURNS, GROUP = 130, 45, 24, 5, 8


@dataclass(frozen=True, slots=True)
class Workload:
    groups: int = 8
    turns: int = TURNS
    prompt: int = PROMPT
    observation: int = OBSERVATION
    sampled: int = SAMPLED

    @property
    def trajectories(self) -> int:
        return self.groups * GROUP


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU seconds per trajectory, and what was done for them."""

    server: float
    client: float
    wall: float
    sampled_tokens: float

    @property
    def total(self) -> float:
        return self.server + self.client


class Arm:
    """One server, with or without routed experts."""

    def __init__(self, model: ModelInfo, folder: Path, *, routed_experts: bool) -> None:
        self._engine = EngineConfig(
            dtype="bfloat16",
            context_length=2048,
            max_total_tokens=65_536,
            max_running_requests=64,
            routed_experts=routed_experts,
        )
        self._model = model
        self.server = EngineServer(self._engine, model, log=folder / f"r3-{routed_experts}.log")

    async def measure(self, work: Workload, seed: int) -> Cost:
        """Play the workload with an empty cache."""
        engine = self._engine.model_copy(update={"urls": (self.server.url,)})
        async with EngineFleet(engine, self._model, SamplingConfig(), concurrency=64) as fleet:
            client = fleet.at("bench")
            await client.flush_cache()
            server_before, client_before, start = self._server_cpu(), time.process_time(), time.perf_counter()
            sampled = await asyncio.gather(
                *(
                    self._episode(client, work, seed * 1000 + group, member)
                    for group in range(work.groups)
                    for member in range(GROUP)
                )
            )
            n = work.trajectories
            return Cost(
                server=(self._server_cpu() - server_before) / n,
                client=(time.process_time() - client_before) / n,
                wall=(time.perf_counter() - start) / n,
                sampled_tokens=sum(sampled) / n,
            )

    async def _episode(self, client: SGLangClient, work: Workload, group: int, member: int) -> int:
        vocabulary = self._model.vocab_size
        random = np.random.default_rng(group)
        tokens: Int32Array = random.integers(16, vocabulary, work.prompt).astype(np.int32)
        random = np.random.default_rng([group, member])
        ledger, known, sampled = RoutingLedger("bench"), 0, 0
        for _ in range(work.turns):
            answer = await client.generate(tokens, max_new_tokens=work.sampled, rows_from=rows_from(known))
            tokens = np.concatenate([tokens, answer.output_ids])
            known, sampled = len(tokens), sampled + len(answer.output_ids)
            if self._engine.routed_experts:
                ledger.append(answer.routing, version=answer.policy_version, total_tokens=known)
            observation = random.integers(16, vocabulary, work.observation).astype(np.int32)
            tokens = np.concatenate([tokens, observation])
        if self._engine.routed_experts:
            ledger.finish(known)
        return sampled

    def _server_cpu(self) -> float:
        assert self.server.pid is not None
        leader = psutil.Process(self.server.pid)
        times = [process.cpu_times() for process in (leader, *leader.children(recursive=True))]
        return float(sum(t.user + t.system for t in times))


async def run(model: Path, pairs: int, work: Workload) -> dict[str, Any]:
    """Paired runs after one warm-up of each arm. Ratios are on / off of total CPU seconds per trajectory."""
    info = read_model(model)
    with tempfile.TemporaryDirectory() as folder:
        on, off = (Arm(info, Path(folder), routed_experts=routed) for routed in (True, False))
        async with on.server, off.server:
            await on.measure(work, 0)
            await off.measure(work, 0)
            measured: list[tuple[Cost, Cost]] = []
            for pair in range(1, pairs + 1):
                order = (on, off) if pair % 2 else (off, on)
                costs = {arm: await arm.measure(work, pair) for arm in order}
                measured.append((costs[on], costs[off]))
                print(f"pair {pair:3d}: on / off = {costs[on].total / costs[off].total:.4f}", file=sys.stderr)
    return summarize(measured, work)


def summarize(measured: list[tuple[Cost, Cost]], work: Workload) -> dict[str, Any]:
    """Geometric mean of the paired ratios, with the 95% interval of Student's t."""
    logs = [math.log(on.total / off.total) for on, off in measured]
    middle = statistics.fmean(logs)
    half = _t95(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    mean = {
        name: {
            key: statistics.fmean(getattr(pair[i], key) for pair in measured)
            for key in ("server", "client", "wall", "sampled_tokens")
        }
        for i, name in enumerate(("on", "off"))
    }
    return {
        "ratio": math.exp(middle),
        "ratio_95": [math.exp(middle - half), math.exp(middle + half)],
        "ratio_median": math.exp(statistics.median(logs)),
        "pairs": [on.total / off.total for on, off in measured],
        "cpu_s_per_trajectory": mean,
        "workload": {**asdict(work), "group": GROUP},
    }


def _t95(freedom: int) -> float:
    from scipy.stats import t  # type: ignore[import-untyped]

    return float(t.ppf(0.975, freedom))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="model folder")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--groups", type=int, default=Workload().groups, help="groups of 8 trajectories a run")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    options = parser.parse_args()
    if options.pairs < 2:
        parser.error("--pairs must be at least 2")
    result = asyncio.run(run(options.model, options.pairs, Workload(groups=options.groups)))
    print(json.dumps(result) if options.json else in_words(result))


def in_words(result: dict[str, Any]) -> str:
    low, high = result["ratio_95"]
    costs = result["cpu_s_per_trajectory"]
    return (
        f"R3 on / off, CPU seconds a trajectory: {result['ratio']:.4f} (95% {low:.4f} to {high:.4f}, "
        f"median {result['ratio_median']:.4f}, {len(result['pairs'])} pairs); "
        f"on {costs['on']['server'] + costs['on']['client']:.4f} s, "
        f"off {costs['off']['server'] + costs['off']['client']:.4f} s"
    )


if __name__ == "__main__":
    main()
