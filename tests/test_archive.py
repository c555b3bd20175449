"""Archived episodes: what is written comes back, and nothing damaged or inconsistent passes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file
from typer.testing import CliRunner

from agent_r3.archive import (
    ArchivedEpisode,
    EpisodeInfo,
    check_trajectory,
    episode_step,
    export,
    find_episode,
    list_episodes,
    read_episode,
    read_info,
    turn_text,
    write_episode,
    write_transcript,
)
from agent_r3.cli.runs import trajectory_app
from agent_r3.errors import ContractError, DataError
from agent_r3.trajectory import engine_counters
from agent_r3.types import Ending, Grade, MoEShape, Routing, Turn
from tests.support.store import make_turns

TURNS = make_turns(np.random.default_rng(0), 4, version=2)
GRADE = Grade(0.5, {"test_a": "PASSED"}, "1 of 2 differ: test_b", 3.0, left_out=("conftest.py",), flaky=True)


def write(folder: Path, step: int = 3, name: str = "g000001-00", turns: list[Turn] = TURNS) -> Path:
    return write_episode(
        folder,
        step,
        trajectory_id=name,
        group_id="g000001",
        task_id="task",
        turns=turns,
        ending=Ending.MAX_TURNS,
        grade=GRADE,
        patch=b"--- a\n+++ b\n\xff",
    )


def test_an_episode_comes_back_with_its_arrays_and_its_text(tmp_path: Path) -> None:
    path = write(tmp_path)
    assert path == tmp_path / "trajectories" / "step_3" / "g000001-00.safetensors"
    assert path.stat().st_mode & 0o666 == path.parent.stat().st_mode & 0o666  # whoever may enter the folder may read
    episode = read_episode(path)
    ids = [part for turn in TURNS for part in (turn.prompt_ids, turn.sampled_ids)]
    assert np.array_equal(episode.trajectory.tokens, np.concatenate(ids))
    rows = np.concatenate([turn.routing.experts for turn in TURNS])
    assert np.array_equal(episode.trajectory.routing.experts, rows)
    assert len(rows) == len(episode.trajectory.tokens) - 1 == episode.info.tokens - 1
    assert episode.info == read_info(path)
    assert [turn.text for turn in episode.info.turns] == [turn.text for turn in TURNS]
    assert [turn.calls for turn in episode.info.turns] == [turn.calls for turn in TURNS]
    assert [turn.observations for turn in episode.info.turns] == [turn.observations for turn in TURNS]
    assert [dict(turn.seconds) for turn in episode.info.turns] == [dict(turn.seconds) for turn in TURNS]
    assert (episode.info.reward, episode.info.reason, episode.info.ending) == (0.5, GRADE.reason, Ending.MAX_TURNS)
    assert (episode.info.outcome, episode.info.left_out, episode.info.flaky) == ("failed", ("conftest.py",), True)
    assert episode.info.patch == "--- a\n+++ b\n\ufffd"
    assert episode.info.policy_version == 2
    assert not list(path.parent.glob(".*"))


def test_engine_counters_count_what_was_prefilled_again() -> None:
    cold = [replace(turn, cached_tokens=0) for turn in TURNS]
    sent = sum(turn.start + len(turn.prompt_ids) for turn in TURNS)
    assert engine_counters(TURNS) == {
        "prompt_tokens": sent,
        "cached_tokens": sum(turn.start - 1 for turn in TURNS[1:]),
        "reprefilled_tokens": 0,
    }
    assert engine_counters(cold)["reprefilled_tokens"] == sum(turn.start - 1 for turn in TURNS[1:])


def test_wide_rows_and_rows_of_no_layers_are_kept(tmp_path: Path) -> None:
    wide = make_turns(np.random.default_rng(1), 2, shape=MoEShape(2, 300, 3))
    assert read_episode(write(tmp_path, name="wide", turns=wide)).trajectory.routing.experts.dtype == np.uint16
    dense = [
        replace(turn, routing=Routing(turn.routing.start, np.zeros((len(turn.routing.experts), 0, 0), np.uint8)))
        for turn in TURNS
    ]
    assert read_episode(write(tmp_path, name="dense", turns=dense)).trajectory.routing.experts.shape[1:] == (0, 0)


def test_turns_that_do_not_join_are_not_archived(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="turn 1 at token"):
        write(tmp_path, turns=[TURNS[0], TURNS[2]])
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("keep", [0, 7, 200, -1])
def test_a_cut_file_is_refused(tmp_path: Path, keep: int) -> None:
    path = write(tmp_path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match="g000001-00"):
        read_episode(path)


def test_changed_bytes_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(DataError, match="checksum"):
        read_episode(path)


def test_a_foreign_safetensors_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"tokens": np.zeros(3, np.int32)}, path)
    with pytest.raises(DataError, match="no logprobs, loss_mask, rows, versions"):
        read_episode(path)
    with pytest.raises(DataError, match="not an episode"):
        read_info(path)
    with pytest.raises(DataError, match="nothing"):
        read_info(tmp_path / "nothing.safetensors")


def test_a_file_whose_turns_do_not_fit_its_arrays_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path)
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    story = json.loads(metadata["episode"])
    story["turns"][1]["sampled"] += 1
    save_file(tensors, path, metadata | {"episode": json.dumps(story)})
    with pytest.raises(ContractError, match="turn 2 starts at"):
        read_episode(path)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda t: {"loss_mask": ~t.loss_mask}, "loss mask differs"),
        (lambda t: {"loss_mask": t.loss_mask & (np.arange(len(t.tokens)) > 4)}, "loss mask differs"),
        (lambda t: {"logprobs": np.full(len(t.tokens), -1, np.float32)}, "not sampled"),
        (lambda t: {"versions": t.versions + 1}, "token versions differ"),
        (lambda t: {"routing": Routing(0, t.routing.experts[:-1])}, "routing rows"),
        (lambda t: {"routing": Routing(0, np.concatenate([t.routing.experts[:1], t.routing.experts]))}, "routing rows"),
        (lambda t: {"tokens": t.tokens[:-1]}, "differ in length"),
    ],
)
def test_check_trajectory_names_what_is_wrong(tmp_path: Path, change: Any, problem: str) -> None:
    episode = read_episode(write(tmp_path))
    check_trajectory(episode)
    broken = ArchivedEpisode(episode.info, replace(episode.trajectory, **change(episode.trajectory)))
    with pytest.raises(ContractError, match=problem):
        check_trajectory(broken)


def test_episodes_are_listed_by_step_and_found_by_id(tmp_path: Path) -> None:
    for step, name in ((10, "a"), (2, "b"), (2, "a")):
        write(tmp_path, step, name)
    assert [(episode_step(path), path.stem) for path in list_episodes(tmp_path)] == [(2, "a"), (2, "b"), (10, "a")]
    assert episode_step(find_episode(tmp_path, "a")) == 10
    with pytest.raises(DataError, match="no episode c"):
        find_episode(tmp_path, "c")
    with pytest.raises(DataError, match="no episodes under"):
        list_episodes(tmp_path / "other")


def test_the_export_command_writes_ids_mask_and_rows(tmp_path: Path) -> None:
    path = write(tmp_path)
    out = tmp_path / "out.json"
    result = CliRunner().invoke(trajectory_app, ["export", str(tmp_path), "g000001-00", "--out", str(out), "--rows"])
    assert result.exit_code == 0, result.output
    exported = json.loads(out.read_text())
    assert exported == json.loads(json.dumps(export(path, rows=True)))
    episode = read_episode(path)
    assert exported["token_ids"] == episode.trajectory.tokens.tolist()
    assert exported["loss_mask"] == episode.trajectory.loss_mask.astype(int).tolist()
    assert exported["rows_shape"] == [len(exported["token_ids"]) - 1, 2, 2]
    assert exported["rows"] == episode.trajectory.routing.experts.tolist()
    plain = CliRunner().invoke(trajectory_app, ["export", str(tmp_path), "g000001-00"])
    assert "rows" not in json.loads(plain.stdout)


def test_list_and_show_print_the_episode(tmp_path: Path) -> None:
    write(tmp_path)
    write(tmp_path, 4, "other")
    listed = CliRunner().invoke(trajectory_app, ["list", str(tmp_path), "--step", "3", "--json"])
    assert json.loads(listed.stdout) == {
        **{"step": 3, "id": "g000001-00", "task": "task", "reward": 0.5, "turns": 4, "ending": "max_turns"},
        "tokens": sum(len(turn.prompt_ids) + len(turn.sampled_ids) for turn in TURNS),
    }
    table = CliRunner().invoke(trajectory_app, ["list", str(tmp_path)])
    assert "2 episodes" in table.stdout and "other" in table.stdout
    shown = CliRunner().invoke(trajectory_app, ["show", str(tmp_path), "g000001-00"])
    assert shown.exit_code == 0
    for part in ("turn 1:", "turn 3", "README.md", "reward 0.5", "1 of 2 differ"):
        assert part in shown.stdout


def transcript(**changes: Any) -> EpisodeInfo:
    """Of an episode that was not graded yet."""
    info = EpisodeInfo(
        id="a__b-1.0",
        group_id="a__b-1",
        task_id="a__b-1",
        reward=None,
        reason="",
        ending=Ending.FINISH,
        patch="",
        turns=tuple(turn_text(turn) for turn in TURNS),
        prompt_tokens=9,
        cached_tokens=3,
        reprefilled_tokens=0,
        outcome=None,
        left_out=(),
        flaky=False,
    )
    return replace(info, **changes)


def test_an_evaluations_episode_comes_back_from_its_text_alone(tmp_path: Path) -> None:
    path = write_transcript(tmp_path, transcript())
    assert path == tmp_path / "trajectories" / "step_0" / "a__b-1.0.json"
    assert read_info(path) == transcript()
    graded = transcript(reward=1.0, reason="all 9 as expected", outcome="passed", left_out=("conftest.py",))
    assert write_transcript(tmp_path, graded) == path
    assert read_info(path) == graded
    assert list_episodes(tmp_path) == [path] == [find_episode(tmp_path, "a__b-1.0")]
    assert [name.name for name in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": "agent-r3 episode 2", "episode": {}}'])
def test_a_damaged_transcript_is_refused(tmp_path: Path, text: str) -> None:
    path = write_transcript(tmp_path, transcript())
    path.write_text(text)
    with pytest.raises(DataError, match=r"a__b-1\.0"):
        read_info(path)


def test_a_transcript_has_no_arrays_to_export(tmp_path: Path) -> None:
    path = write_transcript(tmp_path, transcript())
    with pytest.raises(DataError, match=r"of an evaluation.*no arrays"):
        export(path, rows=False)


def test_an_episode_before_its_grading_is_listed_without_a_reward_and_shown_as_such(tmp_path: Path) -> None:
    write_transcript(tmp_path, transcript())
    listed = CliRunner().invoke(trajectory_app, ["list", str(tmp_path), "--json"])
    assert json.loads(listed.stdout)["reward"] is None
    assert CliRunner().invoke(trajectory_app, ["list", str(tmp_path)]).exit_code == 0
    shown = CliRunner().invoke(trajectory_app, ["show", str(tmp_path), "a__b-1.0"])
    assert "not graded yet · ended by finish" in shown.stdout
