"""The report of an evaluation and the comparison of two: figures by hand, pages that let nothing through."""

import json
import math
import re
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from agent_r3.archive import EpisodeInfo, TurnText, write_transcript
from agent_r3.errors import DataError, UserError
from agent_r3.eval.compare import print_comparison, write_comparison
from agent_r3.eval.folder import episode_id
from agent_r3.eval.records import Failure
from agent_r3.eval.report import print_report, read_report, write_report
from agent_r3.eval.summary import Report
from agent_r3.eval.wording import notes
from agent_r3.report_charts import banded
from agent_r3.statistics import wilson
from agent_r3.types import Ending, Observation
from tests.support.evaluations import MadeEvaluation, facts, large_evaluation

EASY, HARD = "<15 min fix", "1-4 hours"
INSTANCES = {
    "a-1": ("x/a", EASY),
    "a-2": ("x/a", EASY),
    "b-1": ("x/b", HARD),
    "b-2": ("x/b", HARD),
    "b-3": ("x/b", ""),
    "b-4": ("x/b", EASY),
    "c-1": ("x/c", EASY),
    "never-run": ("x/c", HARD),
}
HOSTILE = '<script>alert("&")</script>$x_{1}$ [bold] :bug:'


@pytest.fixture(scope="module")
def gold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = MadeEvaluation(tmp_path_factory.mktemp("gold") / "gold", INSTANCES, model="gold")
    for name in INSTANCES:
        made.add(name, "failed" if name == "c-1" else "resolved", reason="1 of 12 differ: <flaky>")
    return made.path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, gold: Path) -> Path:
    """Two samples an instance. Means of a-1, a-2, b-1, b-2, b-3: 1, 1/2, 0, 1, 0."""
    made = MadeEvaluation(tmp_path_factory.mktemp("evaluation") / "e", INSTANCES, gold=gold)
    made.fail(Failure("a-1", 0, "grading", "docker", "no answer", 3, 0.0))
    made.add("a-1", "resolved", 0, episode=facts(2))
    made.add("a-1", "resolved", 1, episode=facts(4), tests_touched=("tests/conftest.py",))
    made.add("a-2", "resolved", 0, episode=facts(6, attempts=2))
    made.add("a-2", "failed", 1, episode=facts(10, ending=Ending.MAX_TURNS), tests_touched=("setup.cfg",))
    made.add("b-1", "empty_patch", 0, episode=facts(1, ending=Ending.BAD_CALLS))
    made.add("b-1", "not_applied", 1, episode=facts(3))
    made.add("b-2", "resolved", 0, episode=facts(5))
    made.predict("b-2", 1, episode=facts(7))
    made.fail(Failure("b-2", 1, "grading", "docker", "the engine at /run/docker.sock does not answer", 3, 0.0))
    made.add("b-3", "error", 0, episode=facts(8), flaky=True)
    made.add("b-3", "failed", 1, episode=facts(9))
    made.fail(Failure("b-4", 0, "episode", "engine", HOSTILE, 3, 0.0))
    made.predict("b-4", 1, episode=facts(20))
    made.add("c-1", "failed", 0, episode=facts(2))
    made.add("c-1", "failed", 1, episode=facts(2))
    return made.path


@pytest.fixture(scope="module")
def report(folder: Path) -> Report:
    return write_report(folder)


@pytest.fixture(scope="module")
def page(folder: Path, report: Report) -> str:
    return (folder / "report.html").read_text()


def test_pass_at_1_and_pass_at_k_are_those_computed_by_hand(report: Report) -> None:
    rate = report.pass_at_1
    assert (rate.mean, rate.se, rate.instances, rate.samples) == (pytest.approx(0.5), pytest.approx(0.2), 5, 9)
    half = 1.96**2 / 6.25  # n_eff = 0.25 / 0.04
    half = 1.96 / (1 + half) * math.sqrt(0.25 / 6.25 + half / 4 / 6.25)
    assert (rate.low, rate.high) == (pytest.approx(0.5 - half, abs=1e-4), pytest.approx(0.5 + half, abs=1e-4))
    # b-2 has one graded sample: pass@2 is over a-1, a-2, b-1 and b-3.
    assert [(e.k, e.mean, e.instances) for e in report.pass_at_k] == [(1, 0.5, 5), (2, 0.5, 4)]


def test_every_prediction_counts_once(report: Report) -> None:
    assert report.verdicts == {"resolved": 4, "failed": 2, "empty_patch": 1, "not_applied": 1, "error": 1}
    assert (report.instances_in_dataset, report.instances_predicted, report.instances_graded) == (8, 6, 5)
    assert (report.predictions, report.samples, report.pending) == (11, 2, 1)
    assert report.models == ("model-a",)
    assert report.endings == {"finish": 9, "max_turns": 1, "bad_calls": 1}


def test_failures_of_the_infrastructure_are_left_out_and_said(report: Report) -> None:
    infrastructure = report.infrastructure
    assert [(e.instance_id, e.sample, e.stage, e.kind) for e in infrastructure.excluded] == [
        ("b-2", 1, "grading", "docker"),
        ("b-4", 0, "episode", "engine"),
    ]
    assert infrastructure.excluded_by == {"grading: docker": 1, "episode: engine": 1}
    assert (infrastructure.failures, infrastructure.mended) == (3 + 3 + 3 + 1, 3 + 1)  # with the retry inside a-2
    assert report.instances[3].samples[1].reason == "docker: the engine at /run/docker.sock does not answer"
    assert infrastructure.pass_at_1_if_failed == pytest.approx((1 + 1 / 2 + 0 + 1 / 2 + 0 + 0) / 6)


def test_the_floor_counts_whatever_has_no_verdict_as_failed(report: Report) -> None:
    assert report.pass_at_1_of_dataset == pytest.approx((2 + 1 + 0 + 1 + 0 + 0 + 0) / 2 / 7)


def test_what_fails_with_gold_is_left_out_with_its_reason(report: Report, folder: Path, gold: Path) -> None:
    assert report.gold_excluded == {"c-1": "1 of 12 differ: <flaky>"}
    assert report.pass_at_1_with_gold_excluded == pytest.approx(2.5 / 6)
    assert read_report(folder, gold=gold)[0] == report
    assert "c-1" not in {instance.id for instance in report.instances}
    assert any("whose gold patch fails here: c-1. Left in, they make Pass@1 41.7%" in note for note in notes(report))


def test_a_gold_folder_that_is_asked_for_counts_before_the_configs(folder: Path, tmp_path: Path) -> None:
    other = MadeEvaluation(tmp_path / "gold", INSTANCES, model="gold")
    for name in ("b-1", "b-3"):
        other.add(name, "failed")
    report = read_report(folder, gold=other.path)[0]
    assert set(report.gold_excluded) == {"b-1", "b-3"}
    assert report.pass_at_1.mean == pytest.approx((1 + 1 / 2 + 1 + 0) / 4)


def test_tables_by_repository_and_difficulty_hold_their_own_instances(report: Report) -> None:
    assert [(p.name, p.rate.mean, p.rate.instances, p.rate.samples) for p in report.by_repo] == [
        ("x/b", pytest.approx(1 / 3), 3, 5),
        ("x/a", 0.75, 2, 4),
    ]
    assert [(p.name, p.rate.mean, p.rate.instances) for p in report.by_difficulty] == [(EASY, 0.75, 2), (HARD, 0.5, 2)]
    hard = report.by_difficulty[1].rate  # b-1 at 0 and b-2 at 1: as two independent samples
    assert (hard.low, hard.high) == pytest.approx(wilson(0.5, 2))


def test_effort_is_over_all_episodes_whether_graded_or_not(report: Report) -> None:
    episodes = report.episodes
    turns = [2, 4, 6, 10, 1, 3, 5, 7, 8, 9, 20]
    assert episodes["turns"].mean == pytest.approx(sum(turns) / 11)
    assert (episodes["turns"].median, episodes["turns"].p90, episodes["turns"].episodes) == (6, 10, 11)
    assert episodes["sampled_tokens"].median == 600
    assert episodes["seconds"].mean == pytest.approx(2 * sum(turns) / 11)


def test_patches_that_touch_tests_and_flaky_gradings_are_counted_and_noted(report: Report) -> None:
    assert (report.touching_tests, report.touching_tests_resolved, report.flaky) == (2, 1, 1)
    told = "\n".join(notes(report))
    assert "2 patches change tests or their configuration, 1 of them resolved" in told
    assert "1 grading flaky" in told
    assert "1 prediction not graded yet" in told
    assert "Only 5 instances" in told


def test_report_json_is_the_report_without_nan(
    report: Report, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    on_disk = json.loads((folder / "report.json").read_text(), parse_constant=refuse)
    assert on_disk["pass_at_1"]["mean"] == pytest.approx(0.5)
    assert [instance["id"] for instance in on_disk["instances"]] == ["a-1", "a-2", "b-1", "b-2", "b-3", "b-4"]
    assert on_disk["instances"][5]["pass_rate"] is None
    print_report(report, folder, as_json=True)
    assert json.loads(capsys.readouterr().out) == on_disk


def test_the_tables_say_the_same(report: Report, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_report(report, folder, as_json=False)
    out = capsys.readouterr().out
    for line in (
        r"Pass@1\s+│\s+50.0% ± 20.0%",
        r"empty patch\s+│\s+1 ",
        r"x/a\s+│\s+2 │\s+75.0%",
        r"2 left out, 4 mended",
    ):
        assert re.search(line, out), line
    assert f"report: {folder / 'report.html'}" in out


class Page(HTMLParser):
    """Collects tags, what they refer to, and the headings of figures."""

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


def is_whole(text: str) -> bool:
    page = Page(text)
    outside = {"script", "link", "iframe", "img", "object"} & set(page.tags)
    return not outside and all(ref.startswith("#") for ref in page.references) and not re.search(r"url\((?!#)", text)


def test_the_page_has_its_figures_and_refers_to_nothing_outside(page: str) -> None:
    assert is_whole(page)
    assert Page(page).titles == [
        "Verdicts",
        "Pass@1 by difficulty",
        "Pass@1 by repository",
        "pass@k",
        "Turns",
        "Sampled tokens",
        "Seconds",
        "How episodes ended",
    ]
    assert "95% interval 1" in page and "changes tests/conftest.py" in page


def hostile_evaluation(path: Path, model: str) -> Path:
    """Names and reasons that try to be markup, formulas, colours of a terminal, and bytes that are not UTF-8."""
    names = {
        HOSTILE: (HOSTILE, HOSTILE),
        "n" * 300: ("n" * 80, EASY),
        "$\\frac{": ("$\\frac{", EASY),
        "half \udce9": ("\x1b[31mred", EASY),
    }
    made = MadeEvaluation(path, names, model=model)
    for name in names:
        touched = (f"tests/{HOSTILE}", "tests/\udcff.py")
        made.add(name, "failed", 0, reason=f"{HOSTILE}\udcff", episode=facts(2), tests_touched=touched)
    made.add(HOSTILE, "resolved", 1, episode=facts(1))
    made.fail(Failure("half \udce9", 1, "episode", "sandbox", f"{HOSTILE}\udcff\n\x1b[31m", 1, 0.0))
    info = EpisodeInfo(
        id=episode_id((HOSTILE, 1)),
        group_id="",
        task_id=HOSTILE,
        reward=1.0,
        reason=HOSTILE,
        ending=Ending.FINISH,
        patch=HOSTILE,
        turns=(TurnText(0, 0, 5, 7, 0, 0, HOSTILE, (), (Observation(HOSTILE),), {"generate": 1.0}),),
        prompt_tokens=5,
        cached_tokens=0,
        reprefilled_tokens=0,
        outcome="passed",
        left_out=(),
        flaky=False,
    )
    write_transcript(path, info)
    return path


def test_whatever_stands_in_the_records_is_text_on_pages_and_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = hostile_evaluation(tmp_path / "a", HOSTILE)
    other = hostile_evaluation(tmp_path / "b", "model-b")
    print_report(write_report(path), path, as_json=False)
    page = tmp_path / "pages" / "compare.html"
    print_comparison(write_comparison(path, other, page), page, as_json=False)
    out = capsys.readouterr().out
    assert "[bold] :bug:" in out and "\x1b" not in out
    for text in ((path / "report.html").read_text(), page.read_text()):
        assert is_whole(text)
        assert "<script" not in text
        assert "&lt;script&gt;alert(&quot;&amp;&quot;)&lt;/script&gt;$x_{1}$ [bold] :bug:" in text
    assert "nnn…nnn" in (path / "report.html").read_text()  # a label of a chart, cut in the middle


def test_a_few_transcripts_are_shown_where_they_are_archived(tmp_path: Path, page: str) -> None:
    path = hostile_evaluation(tmp_path / "a", "model-a")
    write_report(path)
    assert "turn 1 · tokens 0..11 (5 new, 7 sampled, 0 cached)" in (path / "report.html").read_text()
    assert "None were archived" in page


def test_predictions_from_elsewhere_have_no_episodes_and_still_a_report(tmp_path: Path) -> None:
    made = MadeEvaluation(tmp_path / "e", {"a-1": ("x/a", ""), "a-2": ("x/a", "")})
    made.add("a-1", "resolved")
    made.add("a-2", "not_applied")
    report = write_report(made.path)
    assert (report.episodes, report.endings, report.by_difficulty) == ({}, {}, ())
    assert Page((made.path / "report.html").read_text()).titles == ["Verdicts", "Pass@1 by repository"]


def test_predictions_of_several_models_are_reported_together_and_said(tmp_path: Path) -> None:
    made = MadeEvaluation(tmp_path / "e", INSTANCES)
    made.add("a-1", "resolved")
    made.model = "model-b"
    made.add("a-2", "failed")
    report = write_report(made.path)
    assert report.models == ("model-a", "model-b")
    assert "Predictions of 2 models together: model-a, model-b." in notes(report)


def test_a_verdict_on_an_earlier_patch_does_not_count(tmp_path: Path) -> None:
    made = MadeEvaluation(tmp_path / "e", INSTANCES)
    made.add("a-1", "resolved")
    made.add("a-2", "resolved")
    path = made.path / "predictions.jsonl"
    first, second = path.read_text().splitlines(keepends=True)
    path.write_text(first + second.replace("diff", "another"))
    report = write_report(made.path)
    assert (report.verdicts["resolved"], report.pending) == (1, 1)


def test_nothing_to_report_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not there"):
        write_report(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no config\.yaml"):
        write_report(tmp_path / "empty")
    made = MadeEvaluation(tmp_path / "e", INSTANCES)
    with pytest.raises(DataError, match="holds no evaluation: no predictions"):
        write_report(made.path)
    made.predict("a-1")
    with pytest.raises(DataError, match="none of its 1 predictions is graded yet"):
        write_report(made.path)
    assert not (made.path / "report.json").exists() and not (made.path / "report.html").exists()


def test_only_failures_of_the_infrastructure_are_no_result(tmp_path: Path) -> None:
    made = MadeEvaluation(tmp_path / "e", INSTANCES)
    for name in ("a-1", "a-2"):
        made.fail(Failure(name, 0, "episode", "engine", "gone", 3, 0.0))
    made.fail(Failure("b-1", 0, "episode", "docker", "gone", 3, 0.0))
    with pytest.raises(DataError, match=r"nothing is graded, the infrastructure failed \(engine 2, docker 1\)"):
        write_report(made.path)


def test_gold_that_leaves_nothing_is_one_clear_line(tmp_path: Path, gold: Path) -> None:
    made = MadeEvaluation(tmp_path / "e", INSTANCES, gold=gold)
    made.add("c-1", "failed")
    with pytest.raises(DataError, match="every graded instance is left out"):
        write_report(made.path)


def test_five_hundred_instances_take_seconds_and_stay_folded(tmp_path: Path) -> None:
    path = large_evaluation(tmp_path / "big")
    began = time.process_time()
    report = write_report(path)
    assert time.process_time() - began < 10
    text = (path / "report.html").read_text()
    assert len(report.instances) > 480 and len(text) < 1_000_000
    assert text.count("<details class='group'>") == 12 and "<details class='group' open>" not in text


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One sample each. A: 1 0 0 1 0 0; B: 1 1 1 0 0 and one that only the infrastructure knows. A alone has c-1."""
    base = tmp_path_factory.mktemp("pair")
    names = ("a-1", "a-2", "b-1", "b-2", "b-3", "b-4")
    a, b = MadeEvaluation(base / "a", INSTANCES), MadeEvaluation(base / "b", INSTANCES, model="model-b")
    for name, of_a, of_b in zip(names, (1, 0, 0, 1, 0, 0), (1, 1, 1, 0, 0, None), strict=True):
        a.add(name, "resolved" if of_a else "failed", episode=facts(6))
        if of_b is not None:
            b.add(name, "resolved" if of_b else "failed", episode=facts(4))
    b.fail(Failure("b-4", 0, "grading", "docker", "gone", 3, 0.0))
    a.add("c-1", "resolved", episode=facts(6))
    return a.path, b.path


def test_the_comparison_is_over_the_instances_of_both(pair: tuple[Path, Path]) -> None:
    comparison = write_comparison(*pair, pair[1] / "compare.html")
    assert comparison.shared == 5
    assert (comparison.a.only, comparison.b.only, comparison.b.infrastructure_excluded) == (2, 0, 1)
    assert (comparison.a.pass_at_1.mean, comparison.a.shared.mean) == (pytest.approx(3 / 7), pytest.approx(2 / 5))
    difference = comparison.difference
    assert difference.mean == pytest.approx((0 + 1 + 1 - 1 + 0) / 5)
    # A mean of five differences is a multiple of 1/5; with 2 of 5 at +1 and 1 at -1 the tails end there.
    assert (difference.low, difference.high) == (pytest.approx(-0.4), pytest.approx(0.8))
    assert difference.p == pytest.approx(1.0)
    assert [change.id for change in comparison.gained] == ["a-2", "b-1"]
    assert [(change.id, change.a, change.b) for change in comparison.lost] == [("b-2", 1.0, 0.0)]
    assert comparison.pairs == ((0.0, 0.0, 1), (0.0, 1.0, 2), (1.0, 0.0, 1), (1.0, 1.0, 1))


def test_effort_is_compared_on_the_same_instances(pair: tuple[Path, Path]) -> None:
    effort = write_comparison(*pair, pair[1] / "compare.html").effort
    assert (effort["turns"].a, effort["turns"].b, effort["turns"].difference.mean) == (6, 4, -2)
    assert effort["sampled_tokens"].difference.mean == -200
    assert effort["seconds"].difference.instances == 5


def test_the_comparison_is_on_page_on_disk_and_on_the_terminal(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "deep" / "page.html"
    comparison = write_comparison(*pair, page)
    text = page.read_text()
    assert is_whole(text)
    assert Page(text).titles == ["Instances in A and in B", "Difference B - A", "Pass@1 on the shared instances"]
    assert "2 instances only in A, not compared." in text
    assert "1 sample of B left out: the infrastructure failed" in text
    print_comparison(comparison, page, as_json=True)
    on_disk = json.loads((tmp_path / "deep" / "page.json").read_text())
    assert json.loads(capsys.readouterr().out) == on_disk
    assert on_disk["difference"]["mean"] == pytest.approx(0.2)
    print_comparison(comparison, page, as_json=False)
    out = capsys.readouterr().out
    assert "+20.0 points" in out and "-40.0 to +80.0" in out and "2 better, 1 worse" in out


def test_with_several_samples_an_instance_changes_by_its_mean(tmp_path: Path) -> None:
    a, b = MadeEvaluation(tmp_path / "a", INSTANCES), MadeEvaluation(tmp_path / "b", INSTANCES)
    for made, outcomes in ((a, {"a-1": (1, 0), "a-2": (1, 0)}), (b, {"a-1": (1, 1, 0, 1), "a-2": (0, 1)})):
        for name, values in outcomes.items():
            for sample, value in enumerate(values):
                made.add(name, "resolved" if value else "failed", sample)
    comparison = write_comparison(a.path, b.path, tmp_path / "compare.html")
    assert [(c.id, c.a, c.b) for c in comparison.gained] == [("a-1", 0.5, 0.75)]
    assert comparison.lost == () and comparison.effort == {}
    assert comparison.difference.mean == pytest.approx(0.125)


def test_an_evaluation_against_itself_differs_by_nothing(pair: tuple[Path, Path], tmp_path: Path) -> None:
    comparison = write_comparison(pair[0], pair[0], tmp_path / "compare.html")
    assert (comparison.difference.mean, comparison.difference.low, comparison.difference.p) == (0.0, None, 1.0)
    assert comparison.gained == comparison.lost == ()


def test_evaluations_with_nothing_in_common_are_refused_in_one_line(pair: tuple[Path, Path], tmp_path: Path) -> None:
    other = MadeEvaluation(tmp_path / "other", {"z-1": ("x/z", "")})
    other.add("z-1", "resolved")
    with pytest.raises(DataError, match="no graded instance is in both") as refused:
        write_comparison(pair[0], other.path, tmp_path / "compare.html")
    assert "\n" not in str(refused.value) and not (tmp_path / "compare.html").exists()


def test_the_curve_of_a_training_run_joins_its_evaluations_over_the_steps_between() -> None:
    steps = [{"step": step, "train/reward_mean": 0.5} for step in range(11)]
    for step in (0, 5, 10):
        steps[step] |= {"eval/pass@1": step / 20, "eval/pass@1_low": 0.0, "eval/pass@1_high": 0.9}
    svg = banded(steps, "eval/pass@1", ("eval/pass@1_low", "eval/pass@1_high"), "Pass@1", ylim=(0, 1))
    assert svg is not None
    curve = re.search(r'd="([^"]*)"[^>]*style="fill: none; stroke: #2563eb', svg)
    assert curve is not None and re.findall("[A-Za-z]", curve[1]) == ["M", "L", "L"]
    assert banded(steps[1:5], "eval/pass@1", ("eval/pass@1_low", "eval/pass@1_high"), "Pass@1") is None
