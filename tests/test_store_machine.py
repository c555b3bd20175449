"""Any order of opens, appends, retries, drops and finishes leaves exactly the turns that were accepted."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest
import redis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from agent_r3.errors import ContractError
from agent_r3.store import GroupReader, TrajectoryWriter
from agent_r3.types import Ending, Turn
from tests.support.store import hold_group, make_turn

NAMES = st.sampled_from(["a", "b"])
SIZES = st.integers(1, 4)
COUNTERS = {"prompt_tokens": 5, "cached_tokens": 2, "reprefilled_tokens": 0}


class AppendMachine(RuleBasedStateMachine):
    """The model is a list of accepted turns for each trajectory of the writer, and which have ended."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        client = redis.Redis.from_url(self.url)
        client.flushall()
        client.close()
        self.rng = np.random.default_rng(0)
        self.runner = asyncio.Runner()
        self.connection = TrajectoryWriter.connect(self.url, "run")
        self.store = self.run(self.connection.__aenter__())
        self.run(hold_group(self.url, self.store))
        self.turns: dict[str, list[Turn]] = {}
        self.ended: set[str] = set()

    def run(self, call: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(call)

    def refused(self, call: Coroutine[Any, Any, Any]) -> None:
        with pytest.raises(ContractError):
            self.run(call)

    def length(self, name: str) -> int:
        return sum(len(turn.prompt_ids) + len(turn.sampled_ids) for turn in self.turns[name])

    @rule(name=NAMES)
    def open(self, name: str) -> None:
        if self.turns.get(name):
            self.refused(self.store.open_trajectory(name, 0, "g", "task"))
        else:
            self.run(self.store.open_trajectory(name, 0, "g", "task"))
            self.turns[name] = []

    @rule(name=NAMES, prompt=st.integers(0, 4), sampled=SIZES, repeats=st.integers(1, 3))
    def append(self, name: str, prompt: int, sampled: int, repeats: int) -> None:
        held = self.turns.get(name)
        start = 0 if held is None else self.length(name)
        prompt = max(prompt, 1) if not held else prompt
        turn = make_turn(self.rng, len(held or []), start, prompt=prompt, sampled=sampled)
        if held is None or name in self.ended:
            self.refused(self.store.append_turn(name, turn))
            return
        for _ in range(repeats):
            self.run(self.store.append_turn(name, turn))
        held.append(turn)

    @precondition(lambda self: any(self.turns.values()))
    @rule(data=st.data())
    def retry_an_earlier_turn(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(name for name, held in self.turns.items() if held)))
        turn = data.draw(st.sampled_from(self.turns[name]))
        self.run(self.store.append_turn(name, turn))

    @precondition(lambda self: any(self.turns.values()))
    @rule(data=st.data(), off=st.sampled_from([-2, -1, 1, 2]), ahead=st.integers(0, 2))
    def append_in_a_wrong_place(self, data: st.DataObject, off: int, ahead: int) -> None:
        name = data.draw(st.sampled_from(sorted(name for name, held in self.turns.items() if held)))
        start = max(self.length(name) + off, 1)
        if start != self.length(name):
            self.refused(self.store.append_turn(name, make_turn(self.rng, len(self.turns[name]) + ahead, start)))

    @rule(name=NAMES)
    def drop(self, name: str) -> None:
        self.run(self.store.drop_trajectory(name))
        self.turns.pop(name, None)
        self.ended.discard(name)

    @rule(name=NAMES)
    def finish(self, name: str) -> None:
        call = self.store.finish_trajectory(name, 1.0, Ending.FINISH, COUNTERS)
        if self.turns.get(name):
            self.run(call)
            self.ended.add(name)
        else:
            self.refused(call)

    def teardown(self) -> None:
        with GroupReader.connect(self.url, "run") as reader:
            for name in ("a", "b"):
                if name not in self.ended:
                    with pytest.raises(ContractError):
                        reader.load(name)
                    continue
                trajectory = reader.load(name)
                ids = [part for turn in self.turns[name] for part in (turn.prompt_ids, turn.sampled_ids)]
                assert np.array_equal(trajectory.tokens, np.concatenate(ids))
                rows = np.concatenate([turn.routing.experts for turn in self.turns[name]])
                assert np.array_equal(trajectory.routing.experts, rows)
                assert len(rows) == len(trajectory.tokens) - 1
        self.run(self.connection.__aexit__(None, None, None))
        self.runner.close()


def test_only_accepted_turns_are_there_in_their_order(store_url: str) -> None:
    machine = type("Machine", (AppendMachine,), {"url": store_url})
    run_state_machine_as_test(machine, settings=settings(max_examples=20, stateful_step_count=25, deadline=None))
