"""`make chaos-stack`: the docker-compose stack trains while each of its services is killed, and a worker is cut off.

Once each, in an order that the seed draws and spread over the run: kill -9 of the main process of redis, broker,
sglang, a rollout worker, trainer and prometheus, each started again by Docker's restart policy and waited for until it
is healthy; and a network cut between Redis and a rollout worker that holds claims, for longer than the time after which
its claims go to the other worker. Then the run must come to its end: the trainer ends with status 0.

The last line of the output is one JSON object: `faults` by kind, `steps_done` of `steps_configured`, and two counts
that must be 0. They count places, that is the pair of a group's index and a sample's number, of which every attempt at
an episode has the same:

lost        places at which an episode finished and that no step trained. Finished is what the archive has (an episode
            is archived once it is graded) and what was published to the trainer. Further, trajectories that a step
            trained and the archive lacks, and those that the record of a step has and its metrics have not.
duplicated  trainings of a place beyond the first, trajectories of groups that were published again, and those that the
            metrics of a step have and its record has not.

A step trains on the groups that it consumes, also on those that dynamic sampling then leaves out of the loss. The steps
are those of which the last policy is made: `groups.jsonl`, the trainer's record, in which a step that a restarted
trainer makes anew takes back what a killed one had made of it (`agent_r3/trainer/record.py`). What was published is
known from the stream of finished groups, read all the time since acknowledged entries go, and from the store's hash of
published groups, which forgets none. An episode of a killed worker whose group was not yet published is run anew and
has its place still; such groups are counted as `groups_run_again`.

The exit status is 1 unless both counts are 0, all steps are done and all faults have happened.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from agent_r3.archive import list_episodes
from agent_r3.errors import AgentR3Error, UserError
from agent_r3.metrics import read_metrics
from agent_r3.trainer.record import FILE, read_steps
from tests.stack.account import Account, Evidence, account
from tests.stack.faults import Faults, inner_address
from tests.stack.stack import SAMPLES, SHORT_RUN, Stack
from tests.stack.watch import Seen, Watcher

SERVICES = ("redis", "broker", "sglang", "rollout", "trainer", "prometheus")
CUT = "network_cut"
_DELAY_S = 8.0  # a fault comes so long at most after the step that it waits for
_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Options:
    seed: int
    steps: int
    workers: int
    cut_s: float
    limit_s: float


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens, `delay_s` after the trainer has made `step` steps, and not before the one before it is over."""

    kind: str
    step: int
    delay_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=8, help="training steps of the run, at least 3")
    parser.add_argument("--workers", type=int, default=2, help="rollout workers, at least 2")
    parser.add_argument("--cut-s", type=float, default=45.0, help="length of the network cut")
    parser.add_argument("--limit-s", type=float, default=3000.0, help="give up after that")
    options = Options(**vars(parser.parse_args()))
    if options.steps < 3 or options.workers < 2:
        parser.error("the run needs 3 steps and 2 workers")
    if os.geteuid():
        parser.error("it kills processes of containers and changes their networks: run it as root")
    result = run(options)
    print(json.dumps(result))
    done = result["steps_done"] == result["steps_configured"]
    raise SystemExit(0 if done and not result["lost"] and not result["duplicated"] else 1)


def plan(seed: int, steps: int) -> list[Fault]:
    """The faults in their order. The last one comes two steps before the end at the latest, to leave a run to hit."""
    chance = random.Random(f"{seed}/plan")
    kinds = [*SERVICES, CUT]
    chance.shuffle(kinds)
    return [
        Fault(kind, place * (steps - 2) // len(kinds), chance.uniform(0.0, _DELAY_S))
        for place, kind in enumerate(kinds)
    ]


def run(options: Options) -> dict[str, Any]:
    """One chaos run on a stack of its own, which is gone afterwards with its volumes."""
    began = time.monotonic()
    settings = {
        **SHORT_RUN,
        "AGENT_R3__TRAIN__STEPS": str(options.steps),
        "AGENT_R3__RUN__SEED": str(options.seed),
        "AGENT_R3__EVAL__EVERY": "0",
    }
    with tempfile.TemporaryDirectory(prefix="chaos-stack-") as scratch:
        folder, copy = Path(scratch, "stack"), Path(scratch, "run")
        folder.mkdir()
        copy.mkdir()
        with Stack(folder, settings) as stack:
            stack.up("--scale", f"rollout={options.workers}")
            _say(f"project {stack.project}: all services are healthy")
            try:
                with Watcher(lambda: _store_url(stack), stack.project) as watcher:
                    faults = _Run(stack, watcher, options, began + options.limit_s).weather()
                    seen = watcher.fresh()
                found = account(_evidence(stack, seen, copy))
            except (RuntimeError, AgentR3Error):
                _say(stack.describe())
                raise
    for problem in found.problems:
        _say(problem)
    return _result(options, faults, found, seen, began)


def _store_url(stack: Stack) -> str:
    """As it is now: the address changes with every start."""
    password = stack.secrets()["redis_password"].strip()
    try:
        return f"redis://:{password}@{inner_address(stack, 'redis')}:6379/0"
    except RuntimeError as exc:  # it is being started again
        raise UserError(str(exc)) from exc


class _Run:
    """The run under its faults, until the trainer has ended."""

    def __init__(self, stack: Stack, watcher: Watcher, options: Options, deadline: float) -> None:
        self._stack = stack
        self._watcher = watcher
        self._options = options
        self._deadline = deadline

    def weather(self) -> Counter[str]:
        """Every planned fault, then the end of the run. Raises RuntimeError where it ends early, or too late."""
        chance = random.Random(f"{self._options.seed}/faults")
        faults = Faults(
            self._stack, self._watcher, chance, cut_s=self._options.cut_s, going_on=self._going_on, say=_say
        )
        happened: Counter[str] = Counter()
        for fault in plan(self._options.seed, self._options.steps):
            self._until_step(fault.step)
            self._let_pass(fault.delay_s)
            _say(f"{fault.kind} after {self._watcher.seen.step} steps")
            if fault.kind == CUT:
                faults.cut()
            else:
                faults.kill(fault.kind)
            happened[fault.kind if fault.kind == CUT else f"kill_{fault.kind}"] += 1
        _say("all faults have happened; waiting for the end of the run")
        while not self._ended():
            self._in_time()
            time.sleep(_POLL_S)
        return happened

    def _until_step(self, step: int) -> None:
        while self._watcher.fresh().step < step:
            self._going_on()
            time.sleep(_POLL_S)

    def _let_pass(self, seconds: float) -> None:
        due = time.monotonic() + seconds
        while time.monotonic() < due:
            self._going_on()
            time.sleep(_POLL_S)

    def _going_on(self) -> None:
        self._in_time()
        if self._ended():
            raise RuntimeError("the run was over before the faults were; ask for more steps")

    def _in_time(self) -> None:
        if time.monotonic() > self._deadline:
            made = f"{self._watcher.seen.step} of {self._options.steps} steps"
            raise RuntimeError(f"{made} after {self._options.limit_s:g} s")

    def _ended(self) -> bool:
        """Whether the trainer has ended with status 0; any other end is followed by a new start."""
        (trainer,) = self._stack.of("trainer")
        return trainer.state == "exited" and trainer.exit_code == 0


def _evidence(stack: Stack, seen: Seen, copy: Path) -> Evidence:
    """What the volume and the store have of the run; the part of the volume that counts is copied to `copy`."""
    for name in ("metrics.jsonl", FILE, "trajectories"):
        stack.fetch(f"/runs/{stack.project}/{name}", copy)
    return Evidence(
        steps=read_steps(copy),
        metrics=read_metrics(copy),
        archived=[path.stem for path in list_episodes(copy)],
        deliveries=seen.deliveries,
        published=seen.published,
        samples=SAMPLES,
    )


def _result(options: Options, faults: Counter[str], found: Account, seen: Seen, began: float) -> dict[str, Any]:
    return {
        "faults": dict(faults),
        "lost": found.lost,
        "duplicated": found.duplicated,
        "steps_done": found.steps_done,
        "steps_configured": options.steps,
        "groups": found.groups,
        "groups_run_again": sum(len(holders) > 1 for holders in seen.holders.values()),
        "trajectories": found.trajectories,
        "left_out": found.groups * SAMPLES - found.trajectories,  # of their groups, after failures of infrastructure
        "seed": options.seed,
        "seconds": round(time.monotonic() - began, 1),
    }


def _say(what: str) -> None:
    print(f"chaos: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    main()
