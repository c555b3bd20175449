"""Made-up evaluations on disk, written by what writes real ones."""

import random
from collections.abc import Mapping
from pathlib import Path

from agent_r3.config import TasksConfig, config_of, dump_config
from agent_r3.eval.dataset import write_dataset
from agent_r3.eval.folder import EvaluationFolder, digest
from agent_r3.eval.records import EpisodeFacts, Failure, Graded, Prediction, Verdict
from agent_r3.types import Ending, Outcome, Task

_OUTCOMES: Mapping[Verdict, Outcome | None] = {
    "resolved": "passed",
    "failed": "failed",
    "empty_patch": None,
    "not_applied": "unapplied",
    "error": "timeout",
}
_REASONS: Mapping[Verdict, str] = {
    "resolved": "all 12 as expected",
    "failed": "2 of 12 differ: tests/test_x.py::test_a",
    "empty_patch": "the patch is empty",
    "not_applied": "the patch does not apply: src/x.py",
    "error": "timed out after 300 s",
}


def facts(turns: int = 4, *, ending: Ending = Ending.FINISH, attempts: int = 1) -> EpisodeFacts:
    """100 tokens sampled and 1,000 sent a turn, 80% of those cached; 2 seconds a turn."""
    return EpisodeFacts(
        ending=ending,
        turns=turns,
        prompt_tokens=1_000 * turns,
        cached_tokens=800 * turns,
        sampled_tokens=100 * turns,
        seconds={"generate": 1.5 * turns, "tools": 0.5 * turns, "sandbox": 0.0, "total": 2.0 * turns},
        attempts=attempts,
    )


class MadeEvaluation:
    """A folder with its config and dataset, to which predictions, verdicts and failures are added."""

    def __init__(
        self, path: Path, instances: Mapping[str, tuple[str, str]], *, model: str = "model-a", gold: Path | None = None
    ) -> None:
        """`instances`: {id: (repository, difficulty)}."""
        self.path, self.model = path, model
        path.mkdir(parents=True)
        tree = {"model": {"path": model}, "tasks": {"dataset": "made-up"}}
        config = config_of(tree, [f"eval.gold={gold}"] if gold else [], "a test")
        (path / "config.yaml").write_text(dump_config(config))
        write_dataset(path, [_task(name, *of) for name, of in instances.items()], TasksConfig(dataset="made-up"))
        self._folder = EvaluationFolder(path)

    def predict(
        self, name: str, sample: int = 0, *, patch: str = "diff", episode: EpisodeFacts | None = None
    ) -> Prediction:
        prediction = Prediction(name, self.model, patch, sample, episode)
        self._folder.add_prediction(prediction)
        return prediction

    def grade(
        self,
        prediction: Prediction,
        verdict: Verdict,
        *,
        reason: str | None = None,
        flaky: bool = False,
        tests_touched: tuple[str, ...] = (),
    ) -> None:
        resolved = verdict == "resolved"
        self._folder.add_grade(
            Graded(
                *prediction.key,
                digest(prediction),
                verdict,
                float(resolved),
                _OUTCOMES[verdict],
                _REASONS[verdict] if reason is None else reason,
                1.5,
                tests_passed=12 if resolved else 10 if verdict == "failed" else 0,
                tests=12,
                flaky=flaky,
                tests_touched=tests_touched,
            )
        )

    def add(
        self,
        name: str,
        verdict: Verdict,
        sample: int = 0,
        *,
        episode: EpisodeFacts | None = None,
        tests_touched: tuple[str, ...] = (),
        flaky: bool = False,
        reason: str | None = None,
    ) -> None:
        """A prediction with its verdict."""
        prediction = self.predict(name, sample, patch="" if verdict == "empty_patch" else "diff", episode=episode)
        self.grade(prediction, verdict, reason=reason, tests_touched=tests_touched, flaky=flaky)

    def fail(self, failure: Failure) -> None:
        self._folder.add_failure(failure)


def large_evaluation(
    path: Path, *, instances: int = 500, samples: int = 1, skill: float = 0.0, seed: int = 0, model: str = "model-a"
) -> Path:
    """Like SWE-bench Verified: 12 repositories, 4 difficulties. Instances are as hard in every evaluation."""
    repos = ["django/django"] * 11 + ["sympy/sympy"] * 4 + ["sphinx-doc/sphinx"] * 3 + ["scikit-learn/scikit-learn"] * 2
    repos += ["matplotlib/matplotlib", "pytest-dev/pytest", "pydata/xarray", "astropy/astropy", "psf/requests"]
    repos += ["pylint-dev/pylint", "mwaskom/seaborn", "pallets/flask"]
    levels = ["<15 min fix"] * 4 + ["15 min - 1 hour"] * 5 + ["1-4 hours", ">4 hours"]
    hard, luck = random.Random(1), random.Random(seed)
    known = {}
    for number in range(instances):
        repo = repos[number % len(repos)]
        known[f"{repo.replace('/', '__')}-{1000 + number}"] = (repo, hard.choice(levels))
    made = MadeEvaluation(path, known, model=model)
    for name, (_, level) in known.items():
        chance = max(
            0.02, 0.75 - 0.2 * ["<15 min fix", "15 min - 1 hour", "1-4 hours", ">4 hours"].index(level) + skill
        )
        chance *= hard.choice((0.1, 0.7, 1.2))
        for sample in range(samples):
            _large_sample(made, name, sample, luck, chance)
    return path


def _large_sample(made: MadeEvaluation, name: str, sample: int, luck: random.Random, chance: float) -> None:
    resolved = luck.random() < chance
    turns = min(50, 4 + int(luck.expovariate(1 / (12 if resolved else 22))))
    if luck.random() < 0.006:
        made.fail(Failure(name, sample, "episode", "engine", "the engine at 127.0.0.1 does not answer", 3, 0.0))
        return
    ending = Ending.MAX_TURNS if turns == 50 else Ending.FINISH if luck.random() < 0.9 else Ending.MAX_TOKENS
    verdict: Verdict = (
        "resolved" if resolved else luck.choices(("failed", "empty_patch", "not_applied", "error"), (14, 3, 1, 1))[0]
    )
    touched = ("tests/test_x.py",) if luck.random() < 0.04 else ()
    made.add(name, verdict, sample, episode=facts(turns, ending=ending), tests_touched=touched)


def _task(name: str, repo: str, difficulty: str) -> Task:
    return Task(name, "made-up", repo, "image", "Fix it.", {"test_a": "PASSED"}, "pytest", "", difficulty=difficulty)
