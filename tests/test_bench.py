"""The benchmarks of sandboxes and of evaluations: their arithmetic, their words, and that each measurement runs."""

import pytest

from agent_r3.types import Task
from benchmarks import evaluation, sandbox, sandbox_ours
from benchmarks.figures import percentile, round_trips, speedups

PEERS = ("sdk", *sandbox.FRAMEWORKS)


def test_percentiles_are_linear_between_neighbours() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([7.0], 95) == 7.0
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_speedups_compare_medians_at_1_and_at_32() -> None:
    figures = round_trips("", [2.0, 2.0, 50.0], [10.0]) | round_trips("sdk_", [40.0, 60.0, 80.0], [400.0])
    assert speedups(figures, ["sdk"]) == {"exec_speedup_vs_sdk": 30.0, "exec_speedup_vs_sdk_32": 40.0}


def test_the_table_names_every_system_once_and_every_other_figure_once() -> None:
    figures = round_trips("", [2.0], [10.0])
    for peer in PEERS:
        figures |= round_trips(f"{peer}_", [50.0], [500.0])
    figures |= speedups(figures, PEERS) | {"warm_start_p50_ms": 0.4, "episodes_64_errors": 0}
    machine = {"machine": {"cpus": 2, "load_before": 0.1, "engine": "20.10 overlay2 runc"}}
    lines = sandbox.in_words(figures | machine).splitlines()
    assert [line.split()[0] for line in lines] == [
        *("command", "ours", "docker", "mini_swe_agent", "swe_rex"),
        *("warm_start_p50_ms", "episodes_64_errors", "2"),
    ]
    assert lines[2].split()[-1] == "25.0x"


@pytest.mark.docker
async def test_every_measurement_of_ours_runs_and_finds_no_error(pathspec_task: Task) -> None:
    async with sandbox_ours.Ours(pathspec_task, 2) as ours:
        assert len(await ours.measure("fresh", 2, 2)) == 4
        assert len(await ours.measure("session", 1, 2)) == 2
    cold, warm = await sandbox_ours.starts(pathspec_task, 1)
    assert cold[0] > warm[0]
    memory = await sandbox_ours.memory(pathspec_task, 1)
    assert memory is None or 1 < memory < 100
    episodes = await sandbox_ours.episodes(pathspec_task, 3, 2)
    assert episodes.errors == 0
    assert episodes.commands_per_s > 0
    grading = await sandbox_ours.grading(pathspec_task, 1)
    assert grading.graded > 0
    assert grading.bare > 0


def test_an_evaluations_own_cost_is_all_that_is_neither_model_nor_commands_nor_tests() -> None:
    timed = [
        evaluation.Timed(episode=12.0, model=10.0, commands=1.5, sandbox=0.3, grading=4.0, tests=3.0),
        evaluation.Timed(episode=20.0, model=19.0, commands=0.5, sandbox=0.1, grading=4.0, tests=4.0),
    ]
    figures = evaluation.figures(timed, wall_s=21.0, cpu_s=1.0)
    assert figures["own_s_per_instance"] == pytest.approx((1.5 + 0.5) / 2)
    assert figures["own_share"] == pytest.approx(2.0 / 40.0)
    parts = ("own_sandbox_wait_s", "own_rest_of_episode_s", "own_rest_of_grading_s")
    assert sum(figures[name] for name in parts) == pytest.approx(figures["own_s_per_instance"])
    assert (figures["instances"], figures["wall_s"], figures["cpu_s_per_instance"]) == (2, 21.0, 0.5)


@pytest.mark.docker
def test_the_evaluation_benchmark_runs_and_every_part_of_it_takes_time(pathspec_task: Task) -> None:
    load = evaluation.Load(tasks=[pathspec_task.id], samples=2, workers=2, turns=4, latency_s=0.05)
    result = evaluation.measure(load)
    assert (result["instances"], result["workers"]) == (2, 2)
    assert result["model_s"] >= 4 * 0.05
    assert min(result["commands_s"], result["tests_s"], result["own_s_per_instance"]) > 0
    assert 0 < result["own_share"] < 1
    assert result["episode_s"] < result["wall_s"]
    assert "ours:" in evaluation.in_words(result)
