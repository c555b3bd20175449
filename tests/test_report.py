"""The report: exact figures in the summary, and a page that is whole by itself and lets nothing through unescaped."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agent_r3.errors import DataError, UserError
from agent_r3.report import number, print_table, share, summarize, write_report
from tests.support.runs import make_run

STEPS = [
    {
        "step": 0,
        "train/reward_mean": 0.25,
        "rollout/episodes": 10,
        "rollout/turns_mean": 4.0,
        "rollout/tokens": 1000,
        "rollout/prompt_tokens": 3000,
        "rollout/cached_tokens": 2000,
        "rollout/reprefilled_tokens": 7,
        "rollout/infra/sandbox": 2,
        "r3/coverage": 1.0,
        "r3/rows_missing": 0,
        "r3/kl_replay": 1e-5,
        "r3/kl_native": 2e-5,
        "r3/f2_replay": 0.0,
        "r3/f2_native": 0.5,
        "r3/max_ratio_replay": 1.25,
        "r3/max_ratio_native": 3.0,
        "r3/mismatch_routers": 0.01,
        "r3/diagnosed_tokens": 100,
        "perf/update_s": 1.5,
        "perf/wait_s": 6.0,
    },
    {
        "step": 1,
        "train/reward_mean": 0.75,
        "rollout/episodes": 30,
        "rollout/turns_mean": 6.0,
        "rollout/tokens": 3000,
        "rollout/prompt_tokens": 5000,
        "rollout/cached_tokens": 4000,
        "rollout/reprefilled_tokens": 0,
        "rollout/infra/sandbox": 1,
        "rollout/infra/engine": 4,
        "r3/coverage": 0.5,
        "r3/rows_missing": 1500,
        "r3/kl_replay": 3e-5,
        "r3/kl_native": 8e-5,
        "r3/f2_replay": 0.0,
        "r3/f2_native": 0.1,
        "r3/max_ratio_replay": 1.125,
        "r3/max_ratio_native": 2.0,
        "r3/mismatch_routers": 0.05,
        "r3/diagnosed_tokens": 300,
        "perf/update_s": 2.5,
        "perf/wait_s": 4.0,
    },
]


def test_summary_figures_are_pooled_over_tokens_and_exact() -> None:
    summary = summarize(STEPS, seed=3)
    assert summary == {
        "steps": 2,
        "reward": [0.25, 0.75],
        "reward_first3": 0.5,
        "reward_last3": 0.5,
        "evaluations": [],
        "episodes": 40,
        "turns_mean": 5.5,
        "r3_coverage": pytest.approx(0.625),
        "rows_missing": 1500,
        "reprefilled_tokens": 7,
        "cached_tokens": 6000,
        "prompt_tokens": 8000,
        "kl_replay": pytest.approx(2.5e-5),
        "kl_native": pytest.approx(6.5e-5),
        "f2_replay": 0.0,
        "f2_native": pytest.approx(0.2),
        "max_ratio_replay": 1.25,
        "max_ratio_native": 3.0,
        "route_mismatch": pytest.approx(0.04),
        "infra_failures": {"sandbox": 3, "engine": 4},
        "wall_s": {"update": 4.0, "wait": 10.0},
        "seed": 3,
    }


def test_first_and_last_three_steps_are_means_of_those_alone() -> None:
    summary = summarize([{"step": i, "train/reward_mean": i / 10} for i in range(8)], seed=0)
    assert summary["reward_first3"] == pytest.approx(0.1)
    assert summary["reward_last3"] == pytest.approx(0.6)


def test_full_coverage_is_exactly_one_over_many_uneven_steps() -> None:
    steps = [{"step": i, "r3/coverage": 1.0, "rollout/tokens": 1000.1 + 7 * i} for i in range(100)]
    assert summarize(steps, seed=0)["r3_coverage"] == 1.0


def test_figures_no_step_has_are_null_and_not_zero() -> None:
    summary = summarize([{"step": 0, "train/reward_mean": 0.5, "r3/kl_replay": float("nan")}], seed=0)
    assert summary["kl_replay"] is summary["kl_native"] is summary["r3_coverage"] is summary["rows_missing"] is None
    print_table(summary)


def test_numbers_are_shown_short_and_never_rounded_up_to_whole() -> None:
    assert [number(v) for v in (None, 0.0, 1234567.0, 1.5282e-5, 0.33854)] == [
        "-",
        "0",
        "1,234,567",
        "1.53e-05",
        "0.339",
    ]
    assert [share(v) for v in (None, 1.0, 0.999999, 0.014, 0.0)] == ["-", "100 %", "> 99.99 %", "1.4 %", "0 %"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_run(tmp_path_factory.mktemp("runs") / "made-up")
    write_report(folder)
    return folder


class Page(HTMLParser):
    """Collects tags, what they refer to, and their text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []
        self.titles: list[str] = []
        self._in_title = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._in_title = tag == "h3"
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "data")]

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.titles.append(data)
            self._in_title = False


def test_the_page_refers_to_nothing_outside_itself(run: Path) -> None:
    text = (run / "report.html").read_text()
    assert "://" not in text
    assert "@import" not in text
    page = Page(text)
    assert not {"script", "link", "iframe", "img", "object"} & set(page.tags)
    assert all(reference.startswith("#") for reference in page.references)
    assert not re.search(r"url\((?!#)", text)


def test_the_page_has_every_figure_and_says_what_the_reward_is(run: Path) -> None:
    text = (run / "report.html").read_text()
    assert Page(text).titles == [
        "Training reward",
        "KL between rollout and trainer",
        "F(2)",
        "Largest ratio",
        "Routing mismatch",
        "Prompt tokens by origin",
        "Time of a step",
        "Time inside episodes",
        "How episodes ended",
        "Length",
        "Entropy",
        "Gradient norm",
        "Groups",
    ]
    assert "not generalisation" in text and "warmed up on these same tasks" in text
    assert text.count("<svg") == 13


def test_what_models_and_tools_wrote_is_escaped(run: Path) -> None:
    text = (run / "report.html").read_text()
    assert "<script" not in text
    assert "&lt;script&gt;alert(&#x27;&amp;&#x27;)&lt;/script&gt;" in text
    assert "&lt;function=execute_bash&gt;" in text


def test_good_and_bad_episodes_of_first_middle_and_last_step_are_shown(run: Path) -> None:
    text = (run / "report.html").read_text()
    shown = re.findall(r"class=\"badge (good|bad)\">[^<]*</span> step (\d+)", text)
    assert {(verdict, int(step)) for verdict, step in shown} == {(v, s) for v in ("good", "bad") for s in (0, 6, 11)}


def test_the_report_command_writes_the_same_summary_again_and_prints_the_table(run: Path) -> None:
    import typer

    from agent_r3.cli.runs import report

    before = (run / "summary.json").read_text()
    app = typer.Typer()
    app.command()(report)
    result = CliRunner().invoke(app, [str(run)])
    assert result.exit_code == 0, result.output
    assert "training reward, last 3 steps" in result.stdout
    assert (run / "summary.json").read_text() == before
    assert json.loads(before)["seed"] == 7


def test_one_step_without_r3_and_without_episodes_still_gives_a_page(tmp_path: Path) -> None:
    from agent_r3.metrics import MetricsWriter

    (tmp_path / "config.yaml").write_text("run: {seed: 1}\n")
    with MetricsWriter(tmp_path, first_step=0) as metrics:
        metrics.write(0, {"train/reward_mean": 0.0, "rollout/episodes": 4.0})
    assert write_report(tmp_path)["kl_native"] is None
    assert "archived no episodes" in (tmp_path / "report.html").read_text()


def test_a_folder_without_a_run_or_without_steps_is_one_line_for_the_user(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no finished step"):
        write_report(tmp_path)
    make_run(tmp_path / "run", 1, episodes=0)
    (tmp_path / "run" / "config.yaml").unlink()
    with pytest.raises(UserError, match=r"no config\.yaml"):
        write_report(tmp_path / "run")
