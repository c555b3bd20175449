"""What the records of an evaluation say. Pure: records in, a `Report` out, which is also what report.json holds.

Pass@1 is over predictions that have a verdict. An infrastructure failure is none: such a sample is left out and listed.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from agent_r3.errors import DataError
from agent_r3.eval.dataset import InstanceInfo
from agent_r3.eval.folder import EvaluationFolder
from agent_r3.eval.records import VERDICTS, Failure, Graded, Prediction, Verdict
from agent_r3.statistics import PassAtK, PassRate, pass_at_1, pass_at_ks

EFFORT = ("turns", "prompt_tokens", "cached_tokens", "sampled_tokens", "seconds")  # fields of a Sample
_DIFFICULTIES = ("<15 min fix", "15 min - 1 hour", "1-4 hours", ">4 hours")  # of SWE-bench Verified, easiest first


@dataclass(frozen=True, slots=True)
class Sample:
    """One prediction and its verdict; figures of the episode are None for predictions that came from elsewhere."""

    sample: int
    verdict: Verdict | None  # None: not graded
    reason: str  # of the verdict, or what kept it from one
    tests_passed: int
    tests: int
    flaky: bool
    tests_touched: tuple[str, ...]
    log: str | None
    ending: str | None = None
    turns: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    sampled_tokens: int | None = None
    seconds: float | None = None
    attempts: int = 1

    @property
    def resolved(self) -> bool:
        return self.verdict == "resolved"


@dataclass(frozen=True, slots=True)
class Instance:
    """An instance and its samples, at least one. `pass_rate` is None where none of them is graded."""

    id: str
    repo: str
    difficulty: str
    pass_rate: float | None
    samples: tuple[Sample, ...]

    @property
    def graded(self) -> tuple[Sample, ...]:
        return tuple(sample for sample in self.samples if sample.verdict is not None)


@dataclass(frozen=True, slots=True)
class Excluded:
    """A sample that the infrastructure kept from a verdict, all retries included."""

    instance_id: str
    sample: int
    stage: str
    kind: str
    error: str


@dataclass(frozen=True, slots=True)
class Infrastructure:
    """`failures` of it, retries counted; `mended` of them by a later try that got to a verdict."""

    failures: int
    mended: int
    excluded: tuple[Excluded, ...]
    excluded_by: Mapping[str, int]  # "stage: kind" -> samples
    pass_at_1_if_failed: float  # Pass@1 if every excluded sample had failed


@dataclass(frozen=True, slots=True)
class Spread:
    """Of a figure over the episodes that have it."""

    mean: float
    median: float
    p90: float
    episodes: int


@dataclass(frozen=True, slots=True)
class Part:
    """A repository or a difficulty."""

    name: str
    rate: PassRate


@dataclass(frozen=True, slots=True)
class Report:
    models: tuple[str, ...]  # one, unless predictions of several were mixed
    dataset: str
    instances_in_dataset: int | None  # None where the dataset's own list is not at hand
    instances_predicted: int
    instances_graded: int
    samples: int  # n, the most that an instance has
    predictions: int
    pending: int  # predictions without a verdict, for no known reason: grading goes on or was stopped
    pass_at_1: PassRate
    pass_at_1_of_dataset: float  # every sample without a verdict, of any instance of the dataset, counted as failed
    pass_at_k: tuple[PassAtK, ...]
    verdicts: Mapping[Verdict, int]  # over predictions
    infrastructure: Infrastructure
    gold_excluded: Mapping[str, str]  # instance id -> why its gold patch fails here
    pass_at_1_with_gold_excluded: float | None  # with these left in; None where none is left out
    by_repo: tuple[Part, ...]
    by_difficulty: tuple[Part, ...]  # empty where the dataset tells none
    endings: Mapping[str, int]
    episodes: Mapping[str, Spread]  # turns, prompt_tokens, cached_tokens, sampled_tokens, seconds
    flaky: int  # predictions whose runs of the tests disagreed
    touching_tests: int  # predictions that change tests or their configuration
    touching_tests_resolved: int
    instances: tuple[Instance, ...]


def summarize(
    folder: EvaluationFolder, dataset: str, known: Mapping[str, InstanceInfo], gold_failures: Mapping[str, str]
) -> Report:
    """The report on what there is so far. Raises DataError where nothing is graded."""
    seen = [*folder.predictions, *(failure.key for failure in folder.failures)]
    names = dict.fromkeys([*known, *(name for name, _ in seen)])
    everything = [_instance(name, known.get(name), samples) for name, samples in _by_instance(folder, names)]
    kept = [instance for instance in everything if instance.id not in gold_failures]
    outcomes = _outcomes(kept)
    if not outcomes:
        raise DataError(_nothing(folder, gold_failures))
    samples = [sample for instance in kept for sample in instance.samples]
    graded = [sample for sample in samples if sample.verdict is not None]
    failures = [failure for failure in folder.failures if failure.instance_id not in gold_failures]
    infrastructure = _infrastructure(folder, failures, samples, outcomes)
    without_verdict = {(e.instance_id, e.sample) for e in infrastructure.excluded} & set(folder.predictions)
    with_gold, n = _outcomes(everything), max(sample + 1 for _, sample in seen)
    return Report(
        models=tuple(dict.fromkeys(prediction.model_name_or_path for prediction in folder.predictions.values())),
        dataset=dataset,
        instances_in_dataset=len(known) or None,
        instances_predicted=len(kept),
        instances_graded=len(outcomes),
        samples=n,
        predictions=len(samples),
        pending=len(samples) - len(graded) - len(without_verdict),
        pass_at_1=pass_at_1(list(outcomes.values())),
        pass_at_1_of_dataset=fmean(sum(outcomes.get(name, ())) / n for name in names if name not in gold_failures),
        pass_at_k=pass_at_ks(list(outcomes.values())),
        verdicts={verdict: sum(sample.verdict == verdict for sample in graded) for verdict in VERDICTS},
        infrastructure=infrastructure,
        gold_excluded={name: reason for name, reason in gold_failures.items() if name in names},
        pass_at_1_with_gold_excluded=None if len(with_gold) == len(outcomes) else _rate(with_gold),
        by_repo=_parts(kept, {instance.id: instance.repo for instance in kept}),
        by_difficulty=_parts(kept, {instance.id: instance.difficulty for instance in kept if instance.difficulty}),
        endings=dict(Counter(sample.ending for sample in samples if sample.ending is not None).most_common()),
        episodes=_spreads(samples),
        flaky=sum(sample.flaky for sample in graded),
        touching_tests=sum(bool(sample.tests_touched) for sample in graded),
        touching_tests_resolved=sum(bool(sample.tests_touched) and sample.resolved for sample in graded),
        instances=tuple(kept),
    )


def _by_instance(folder: EvaluationFolder, names: Iterable[str]) -> Iterator[tuple[str, tuple[Sample, ...]]]:
    """Instances that have predictions, in the order of `names`, with their samples."""
    failed = {failure.key: failure for failure in folder.failures}
    found: dict[str, list[Prediction]] = {}
    for prediction in folder.predictions.values():
        found.setdefault(prediction.instance_id, []).append(prediction)
    for name in names:
        predictions = sorted(found.get(name, ()), key=lambda prediction: prediction.sample)
        if predictions:
            yield name, tuple(_sample(one, folder.grade_of(one), failed.get(one.key)) for one in predictions)


def _instance(name: str, info: InstanceInfo | None, samples: tuple[Sample, ...]) -> Instance:
    resolved = [float(sample.resolved) for sample in samples if sample.verdict is not None]
    repo, difficulty = (info.repo, info.difficulty) if info is not None else ("", "")
    return Instance(name, repo, difficulty, fmean(resolved) if resolved else None, samples)


def _sample(prediction: Prediction, graded: Graded | None, failure: Failure | None) -> Sample:
    facts = prediction.episode
    kept_from_it = f"{failure.kind}: {failure.error}" if failure and failure.stage == "grading" else ""
    return Sample(
        sample=prediction.sample,
        verdict=graded.verdict if graded else None,
        reason=graded.reason if graded else kept_from_it,
        tests_passed=graded.tests_passed if graded else 0,
        tests=graded.tests if graded else 0,
        flaky=graded.flaky if graded else False,
        tests_touched=graded.tests_touched if graded else (),
        log=graded.log if graded else None,
        ending=facts.ending.value if facts else None,
        turns=facts.turns if facts else None,
        prompt_tokens=facts.prompt_tokens if facts else None,
        cached_tokens=facts.cached_tokens if facts else None,
        sampled_tokens=facts.sampled_tokens if facts else None,
        seconds=facts.seconds.get("total") if facts else None,
        attempts=facts.attempts if facts else 1,
    )


def _outcomes(instances: Iterable[Instance]) -> dict[str, list[float]]:
    """{instance id: 1 or 0 for each graded sample}, of instances that have any."""
    found = {instance.id: [float(sample.resolved) for sample in instance.graded] for instance in instances}
    return {name: values for name, values in found.items() if values}


def _rate(outcomes: Mapping[str, Sequence[float]]) -> float:
    return pass_at_1(list(outcomes.values())).mean


def _infrastructure(
    folder: EvaluationFolder,
    failures: Sequence[Failure],
    samples: Iterable[Sample],
    outcomes: Mapping[str, Sequence[float]],
) -> Infrastructure:
    retries = sum(sample.attempts - 1 for sample in samples)
    last = {failure.key: failure for failure in failures if not _mended(folder, failure)}
    excluded = tuple(Excluded(*key, failure.stage, failure.kind, failure.error) for key, failure in last.items())
    failed = {name: list(values) for name, values in outcomes.items()}
    for left_out in excluded:
        failed.setdefault(left_out.instance_id, []).append(0.0)
    return Infrastructure(
        failures=retries + sum(failure.attempts for failure in failures),
        mended=retries + sum(failure.attempts for failure in failures if _mended(folder, failure)),
        excluded=excluded,
        excluded_by=dict(Counter(f"{left_out.stage}: {left_out.kind}" for left_out in excluded).most_common()),
        pass_at_1_if_failed=_rate(failed),
    )


def _mended(folder: EvaluationFolder, failure: Failure) -> bool:
    """Whether what failed was done later."""
    prediction = folder.predictions.get(failure.key)
    return prediction is not None and (failure.stage == "episode" or folder.grade_of(prediction) is not None)


def _nothing(folder: EvaluationFolder, gold_failures: Mapping[str, str]) -> str:
    """Why there is nothing to report, in one line."""
    if not folder.predictions and not folder.failures:
        return f"{folder.path} holds no evaluation: no predictions; `agent-r3 eval CONFIG` makes one"
    kinds = Counter(failure.kind for failure in folder.failures if not _mended(folder, failure))
    if kinds:
        told = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())
        return f"{folder.path}: nothing is graded, the infrastructure failed ({told}); run the same command again"
    if any(folder.grade_of(prediction) for prediction in folder.predictions.values()):
        return f"{folder.path}: every graded instance is left out, for its gold patch fails here; see eval.gold"
    return f"{folder.path}: none of its {len(folder.predictions)} predictions is graded yet; run the same command again"


def _parts(instances: Sequence[Instance], names: Mapping[str, str]) -> tuple[Part, ...]:
    """A rate for each name, by difficulty where the names are difficulties, else by number of instances."""
    found: dict[str, list[Instance]] = {}
    for instance in instances:
        if instance.graded and instance.id in names:
            found.setdefault(names[instance.id] or "unknown", []).append(instance)
    order = {name: place for place, name in enumerate(_DIFFICULTIES)}
    parts = [Part(name, pass_at_1(list(_outcomes(members).values()))) for name, members in found.items()]
    return tuple(sorted(parts, key=lambda part: (order.get(part.name, len(order)), -part.rate.instances, part.name)))


def _spreads(samples: Iterable[Sample]) -> dict[str, Spread]:
    spreads = {}
    kept = list(samples)
    for name in EFFORT:
        values = [value for sample in kept if (value := getattr(sample, name)) is not None]
        if values:
            median, p90 = np.quantile(values, (0.5, 0.9))
            spreads[name] = Spread(fmean(values), float(median), float(p90), len(values))
    return spreads
