"""How sure one can be of an evaluation: Pass@1 with its interval, pass@k, and the difference between two agents.

Instances are the sample: they stand for all that could have been asked, and samples of one instance are alike. So every
error here is clustered by instance (Miller, "Adding Error Bars to Evals", arXiv 2411.00640, section 2.2).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

RESAMPLES = 10_000
_Z95 = 1.959963984540054  # two-sided 95% of the normal distribution
_MOST_SUMS = 1 << 18  # sign flips are enumerated up to so many different sums, and drawn beyond
_BLOCK = 1 << 22  # counts held at a time while drawing


@dataclass(frozen=True, slots=True)
class PassRate:
    """Pass@1. `low` and `high` bound its 95% interval; `se` is 0 where all instances agree, the interval is not."""

    mean: float
    se: float
    low: float
    high: float
    instances: int
    samples: int


@dataclass(frozen=True, slots=True)
class PassAtK:
    """pass@k and its standard error over the instances that have at least k samples."""

    k: int
    mean: float
    se: float
    instances: int


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean of B - A over instances. Where all of them differ alike the 95% interval is None: none can be told."""

    mean: float
    se: float
    low: float | None
    high: float | None
    p: float  # two-sided, of a difference at least this large if A and B were interchangeable
    instances: int


def pass_at_1(samples: Sequence[Sequence[float]]) -> PassRate:
    """Mean over instances of the mean over their samples (0 or 1 each), with clustered error and 95% interval.

        pass_at_1([[1], [0], [0], [1]])        # four instances, one sample each: 0.5, from 0.15 to 0.85
        pass_at_1([[1, 1], [0, 1], [0, 0]])    # three instances, two samples each: 0.5

    The interval is Wilson's with the effective number of samples n_eff = p(1-p)/SE^2: with one sample an instance n_eff
    is the number of instances, and the interval is Wilson's own. n_eff never exceeds what as many independent samples
    would give, and is the number of instances where SE is 0. Raises ValueError without an instance or a sample.
    """
    means = instance_means(samples)
    rate, se = float(means.mean()), _standard_error(means)
    independent = len(means) ** 2 / sum(1 / len(sample) for sample in samples)
    effective = min(rate * (1 - rate) / se**2, independent) if se > 0 else len(means)
    low, high = wilson(rate, effective)
    return PassRate(rate, se, low, high, len(means), sum(map(len, samples)))


def pass_at_k(samples: Sequence[Sequence[float]], k: int) -> PassAtK:
    """Chance that at least one of k samples passes, mean over the instances that have k samples or more.

    Unbiased: 1 - C(n-c, k)/C(n, k) for c of n that pass, as a product that does not overflow (Chen et al., "Evaluating
    Large Language Models Trained on Code", arXiv 2107.03374, section 2.1). Raises ValueError where no instance has k.
    """
    enough = [sample for sample in samples if len(sample) >= k]
    if k < 1 or not enough:
        raise ValueError(f"no instance has {k} samples")
    values = np.array([_pass_at_k(len(sample), sum(value > 0 for value in sample), k) for sample in enough])
    return PassAtK(k, float(values.mean()), _standard_error(values), len(values))


def pass_at_ks(samples: Sequence[Sequence[float]]) -> tuple[PassAtK, ...]:
    """pass@k for k = 1, 2, 4, ... and the largest number of samples that an instance has."""
    most = max((len(sample) for sample in samples), default=0)
    ks = sorted({most, *(1 << power for power in range(most.bit_length()))} - {0})
    return tuple(pass_at_k(samples, k) for k in ks)


def wilson(rate: float, n: float) -> tuple[float, float]:
    """Wilson's 95% interval of a rate over n samples (Wilson 1927, JASA 22:209); inside [0, 1] and never empty."""
    shrink = 1 + _Z95**2 / n
    centre = (rate + _Z95**2 / (2 * n)) / shrink
    half = _Z95 / shrink * math.sqrt(rate * (1 - rate) / n + _Z95**2 / (4 * n**2))
    return max(0.0, min(centre - half, rate)), min(1.0, max(centre + half, rate))


def paired_difference(
    a: Sequence[float], b: Sequence[float], *, resamples: int = RESAMPLES, seed: int = 0
) -> Difference:
    """Mean of b - a over instances, `a[i]` and `b[i]` being means of the same instance.

    The interval is the percentile bootstrap over instances; p flips signs of the differences, which for one sample an
    instance is McNemar's exact test. Equal seeds give equal results. Raises ValueError without an instance.
    """
    difference = np.asarray(b, np.float64) - np.asarray(a, np.float64)
    if not len(difference):
        raise ValueError("no instance to compare")
    rng = np.random.default_rng(seed)
    low: float | None = None
    high: float | None = None
    if difference.min() < difference.max():
        low, high = map(float, np.quantile(_bootstrap_means(difference, resamples, rng), (0.025, 0.975)))
    p = _sign_flip_p(difference, resamples, rng)
    return Difference(float(difference.mean()), _standard_error(difference), low, high, p, len(difference))


def instance_means(samples: Sequence[Sequence[float]]) -> FloatArray:
    """[I], the mean over each instance's samples. Raises ValueError without an instance, or for one without samples."""
    if not samples or not all(len(sample) for sample in samples):
        raise ValueError("every instance needs a sample, and there must be one")
    return np.array([sum(sample) / len(sample) for sample in samples], np.float64)


def _standard_error(means: FloatArray) -> float:
    """Of the mean of independent instances. Divides by n, not n - 1, so that 0/1 values give sqrt(p(1-p)/n)."""
    return float(means.std() / math.sqrt(len(means)))


def _pass_at_k(n: int, c: int, k: int) -> float:
    """The product over the last c of n factors 1 - k/i; 0 or less among them means that fewer than k fail."""
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def _bootstrap_means(values: FloatArray, resamples: int, rng: np.random.Generator) -> FloatArray:
    """[resamples], means of as many values drawn with replacement, drawn as counts of the distinct values."""
    distinct, counts = np.unique(values, return_counts=True)
    size = max(1, _BLOCK // len(distinct))
    parts = [
        rng.multinomial(len(values), counts / len(values), size=min(size, resamples - start)) @ distinct
        for start in range(0, resamples, size)
    ]
    return np.concatenate(parts) / len(values)


def _sign_flip_p(difference: FloatArray, resamples: int, rng: np.random.Generator) -> float:
    """Share of all assignments of signs to |difference| whose sum is as far from 0, exact where the sums are few."""
    distinct, counts = np.unique(np.abs(difference[difference != 0]), return_counts=True)
    least = abs(float(difference.sum())) - 1e-9 * max(1.0, float(np.abs(difference).sum()))
    if math.prod(int(count) + 1 for count in counts) <= _MOST_SUMS:
        sums, chances = np.zeros(1), np.ones(1)
        for value, count in zip(distinct, counts, strict=True):
            heads = np.arange(count + 1)
            sums = np.add.outer(sums, (2 * heads - count) * value).ravel()
            chances = np.multiply.outer(chances, _fair_coin(int(count))).ravel()
        return min(1.0, float(chances[np.abs(sums) >= least].sum()))
    hits, size = 0, max(1, _BLOCK // len(distinct))
    for start in range(0, resamples, size):
        drawn = rng.binomial(counts, 0.5, size=(min(size, resamples - start), len(counts)))
        hits += int((np.abs((2 * drawn - counts) @ distinct) >= least).sum())
    return (hits + 1) / (resamples + 1)  # the observed assignment is one of them


def _fair_coin(tosses: int) -> FloatArray:
    """[tosses + 1], the chance of each number of heads."""
    whole = math.lgamma(tosses + 1) - tosses * math.log(2)
    return np.exp([whole - math.lgamma(heads + 1) - math.lgamma(tosses - heads + 1) for heads in range(tosses + 1)])
