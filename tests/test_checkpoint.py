"""A checkpoint is whole or not there; what was damaged later is skipped."""

import json
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from agent_r3.trainer.checkpoint import Checkpoints, TrainerState


def _checkpoints(folder: Path, keep: int = 2) -> Checkpoints:
    return Checkpoints(folder, keep=keep, writer=True, barrier=lambda: None)


def _policy(folder: Path) -> None:
    folder.mkdir()
    (folder / "weights").write_bytes(b"w" * 100)


def _state(step: int) -> TrainerState:
    return TrainerState(step=step, version=step + 1, groups=8 * step)


def test_the_latest_checkpoint_gives_back_its_state(tmp_path: Path) -> None:
    checkpoints = _checkpoints(tmp_path)
    assert checkpoints.latest() is None
    for step in (9, 10, 100):
        checkpoints.save(_state(step), _policy)
    found = checkpoints.latest()
    assert found is not None and found.state == _state(100)
    assert (found.policy / "weights").stat().st_size == 100


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints = _checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3):
        checkpoints.save(_state(step), _policy)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000002", "step_000003"]


def test_a_failed_save_leaves_the_earlier_checkpoint_and_no_half_one(tmp_path: Path) -> None:
    checkpoints = _checkpoints(tmp_path)
    checkpoints.save(_state(1), _policy)

    def half(folder: Path) -> None:
        _policy(folder)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        checkpoints.save(_state(2), half)
    found = checkpoints.latest()
    assert found is not None and found.state.step == 1
    checkpoints.save(_state(2), _policy)
    found = checkpoints.latest()
    assert found is not None and found.state.step == 2


@pytest.mark.parametrize("damage", ["truncated", "missing", "no state", "broken state", "old state"])
def test_a_damaged_checkpoint_is_skipped_with_a_warning(tmp_path: Path, damage: str) -> None:
    checkpoints = _checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(_state(step), _policy)
    newest = tmp_path / "step_000002"
    match damage:
        case "truncated":
            (newest / "policy" / "weights").write_bytes(b"w" * 50)
        case "missing":
            (newest / "policy" / "weights").unlink()
        case "no state":
            (newest / "trainer.json").unlink()
        case "broken state":
            (newest / "trainer.json").write_text("{")
        case "old state":
            (newest / "trainer.json").write_text(json.dumps({"state": {"steps": 2}, "files": {}}))
    with capture_logs() as logs:
        found = checkpoints.latest()
    assert found is not None and found.state.step == 1
    assert [(line["log_level"], line["folder"]) for line in logs] == [("warning", str(newest))]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    checkpoints = _checkpoints(tmp_path)
    checkpoints.save(_state(1), _policy)
    (tmp_path / "step_000001" / "policy" / "weights").write_bytes(b"")
    checkpoints.save(_state(1), _policy)
    assert checkpoints.latest() is not None
