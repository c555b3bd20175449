"""Statistics of an evaluation against values derived another way: by hand, by enumeration, by scipy."""

import itertools
import math
from fractions import Fraction
from random import Random

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r3.statistics import paired_difference, pass_at_1, pass_at_k, pass_at_ks, wilson

outcomes = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=30)
means = st.lists(st.sampled_from((0.0, 0.25, 0.5, 0.75, 1.0)), min_size=2, max_size=10)


def test_pass_at_1_is_the_mean_over_instances_of_their_means() -> None:
    # Uneven samples: pooled it would be 3/6.
    assert pass_at_1([[1], [0, 0, 1, 0], [1]]).mean == pytest.approx((1 + 1 / 4 + 1) / 3)


@pytest.mark.parametrize(("k", "n"), [(0, 1), (1, 1), (0, 10), (10, 10), (3, 10), (212, 500), (499, 500)])
def test_with_one_sample_an_instance_the_interval_is_wilsons_over_instances(k: int, n: int) -> None:
    rate = pass_at_1([[1]] * k + [[0]] * (n - k))
    theirs = scipy.stats.binomtest(k, n).proportion_ci(0.95, method="wilson")
    assert (rate.low, rate.high) == pytest.approx((theirs.low, theirs.high), abs=1e-12)
    assert rate.se == pytest.approx(math.sqrt(k / n * (1 - k / n) / n))


def test_the_interval_of_all_and_of_none_is_open_to_one_side() -> None:
    none, everything = pass_at_1([[0, 0]] * 10), pass_at_1([[1, 1]] * 10)
    assert (none.low, none.se, everything.high, everything.se) == (0.0, 0.0, 1.0, 0.0)
    assert none.high == pytest.approx(1.959963984540054**2 / (10 + 1.959963984540054**2))
    assert everything.low == pytest.approx(1 - none.high)


def test_samples_of_one_instance_are_no_independent_samples() -> None:
    # Eight equal samples of an instance tell what one tells, so neither error nor interval may shrink.
    once, eight_times = pass_at_1([[1], [0], [0]]), pass_at_1([[1] * 8, [0] * 8, [0] * 8])
    assert (once.se, once.low, once.high) == pytest.approx((eight_times.se, eight_times.low, eight_times.high))


def test_the_error_is_the_clustered_one_of_the_literature() -> None:
    """Miller 2024, eq. 4: the sum over pairs within a cluster; with equal clusters the same as over cluster means."""
    samples = [[1, 0, 1, 1], [0, 0, 0, 1], [1, 1, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]]
    flat = np.array(samples, float) - np.mean(samples)
    within = sum(row[i] * row[j] for row in flat for i in range(4) for j in range(4))
    assert pass_at_1(samples).se == pytest.approx(math.sqrt(within) / flat.size)


def test_means_that_agree_by_chance_count_no_more_than_independent_samples() -> None:
    almost_equal = [[1, 0], [0, 1], [1, 0], [1, 1]]
    rate = pass_at_1(almost_equal)
    assert (rate.low, rate.high) == pytest.approx(wilson(5 / 8, 8))
    assert rate.se < math.sqrt(5 / 8 * 3 / 8 / 8)


@given(outcomes)
def test_the_interval_holds_the_rate_and_stays_between_0_and_1(samples: list[list[int]]) -> None:
    rate = pass_at_1(samples)
    assert 0 <= rate.low <= rate.mean <= rate.high <= 1
    assert rate.low < rate.high


@settings(max_examples=40)
@given(outcomes, st.randoms(use_true_random=False))
def test_neither_order_of_instances_nor_of_samples_matters(samples: list[list[int]], random: Random) -> None:
    shuffled = [random.sample(sample, len(sample)) for sample in samples]
    random.shuffle(shuffled)
    a, b = pass_at_1(samples), pass_at_1(shuffled)
    assert (a.mean, a.se, a.low, a.high) == pytest.approx((b.mean, b.se, b.low, b.high))
    assert [(e.k, e.instances) for e in pass_at_ks(samples)] == [(e.k, e.instances) for e in pass_at_ks(shuffled)]


@given(outcomes)
def test_four_times_the_instances_narrow_the_interval(samples: list[list[int]]) -> None:
    one, four = pass_at_1(samples), pass_at_1(samples * 4)
    assert four.high - four.low < one.high - one.low
    assert four.se == pytest.approx(one.se / 2)


@given(outcomes)
def test_pass_at_1_of_the_unbiased_estimator_is_the_mean(samples: list[list[int]]) -> None:
    assert pass_at_k(samples, 1).mean == pytest.approx(pass_at_1(samples).mean)
    assert pass_at_k(samples, 1).se == pytest.approx(pass_at_1(samples).se)


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(n: int) -> None:
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        samples = [1] * c + [0] * (n - c)
        subsets = [any(subset) for subset in itertools.combinations(samples, k)]
        assert pass_at_k([samples], k).mean == pytest.approx(sum(subsets) / len(subsets), abs=1e-15)


def test_pass_at_k_of_very_many_samples_is_exact_where_factorials_overflow() -> None:
    n, c, k = 3_000, 40, 100
    exact = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
    assert pass_at_k([[1] * c + [0] * (n - c)], k).mean == pytest.approx(float(exact), rel=1e-12)


def test_pass_at_k_rests_on_the_instances_that_have_k_samples() -> None:
    estimates = pass_at_ks([[1], [0, 1, 0], [0] * 6, [1] * 6])
    assert [(e.k, e.instances) for e in estimates] == [(1, 4), (2, 3), (4, 2), (6, 2)]
    assert estimates[1].mean == pytest.approx((2 / 3 + 0 + 1) / 3)
    assert estimates[2].mean == pytest.approx(1 / 2)
    with pytest.raises(ValueError, match="no instance has 7 samples"):
        pass_at_k([[1] * 6], 7)


@given(outcomes)
def test_more_tries_never_lower_pass_at_k_of_the_same_instances(samples: list[list[int]]) -> None:
    least = min(map(len, samples))
    rates = [pass_at_k(samples, k).mean for k in range(1, least + 1)]
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(rates))


def test_nothing_to_count_is_an_error_of_the_caller() -> None:
    for nothing in ([], [[]], [[1], []]):
        with pytest.raises(ValueError, match="needs a sample"):
            pass_at_1(nothing)
    with pytest.raises(ValueError, match="no instance"):
        paired_difference([], [])


def test_the_bootstrap_interval_agrees_with_scipys() -> None:
    rng = np.random.default_rng(5)
    a = rng.integers(0, 5, 120) / 4
    b = np.clip(a + rng.choice((-0.25, 0, 0.25, 0.5), 120), 0, 1)
    ours = paired_difference(a.tolist(), b.tolist())
    theirs = scipy.stats.bootstrap(
        (b - a,), np.mean, n_resamples=10_000, method="percentile", rng=np.random.default_rng(9)
    ).confidence_interval
    assert ours.mean == pytest.approx(float(np.mean(b - a)))
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.004)  # both are drawn
    assert ours.se == pytest.approx(float(np.std(b - a)) / math.sqrt(120))


@pytest.mark.parametrize(("better", "worse", "same"), [(5, 0, 2), (7, 2, 10), (30, 18, 452), (1, 1, 0), (0, 0, 6)])
def test_with_one_sample_p_is_that_of_mcnemars_exact_test(better: int, worse: int, same: int) -> None:
    a = [0.0] * better + [1.0] * worse + [1.0] * same
    b = [1.0] * better + [0.0] * worse + [1.0] * same
    exact = scipy.stats.binomtest(better, better + worse).pvalue if better + worse else 1.0
    assert paired_difference(a, b).p == pytest.approx(exact)


@settings(max_examples=40)
@given(means, st.data())
def test_p_is_the_share_of_sign_assignments_at_least_as_far_from_zero(a: list[float], data: st.DataObject) -> None:
    b = data.draw(st.lists(st.sampled_from((0.0, 0.25, 0.5, 0.75, 1.0)), min_size=len(a), max_size=len(a)))
    d = [y - x for x, y in zip(a, b, strict=True)]  # multiples of 1/4: sums are exact
    sums = [
        abs(sum(s * x for s, x in zip(signs, d, strict=True))) for signs in itertools.product((-1, 1), repeat=len(d))
    ]
    assert paired_difference(a, b).p == pytest.approx(sum(value >= abs(sum(d)) for value in sums) / len(sums))


def test_p_of_many_different_differences_is_drawn_and_agrees_with_scipys() -> None:
    rng = np.random.default_rng(2)
    a, b = rng.normal(size=60), rng.normal(0.3, 1, size=60)
    theirs = scipy.stats.permutation_test(
        (b - a,), np.mean, permutation_type="samples", n_resamples=20_000, rng=np.random.default_rng(3)
    )
    assert paired_difference(a.tolist(), b.tolist()).p == pytest.approx(theirs.pvalue, abs=0.015)


@settings(max_examples=40)
@given(means)
def test_the_difference_turns_its_sign_with_the_sides(a: list[float]) -> None:
    b = a[1:] + a[:1]
    there, back = paired_difference(a, b), paired_difference(b, a)
    assert there.mean == pytest.approx(-back.mean)
    assert (there.se, there.p) == pytest.approx((back.se, back.p))
    if there.low is not None and there.high is not None:
        assert there.low - 1e-12 <= there.mean <= there.high + 1e-12


def test_equal_input_gives_equal_intervals_and_another_seed_another_one() -> None:
    a, b = [0.0, 0.25, 1.0, 0.5] * 9, [0.5, 0.0, 1.0, 0.75] * 9
    assert paired_difference(a, b) == paired_difference(a, b)
    c, d = np.random.default_rng(0).normal(size=(2, 50)).tolist()
    assert paired_difference(c, d, seed=1).low != paired_difference(c, d, seed=2).low


def test_instances_that_all_change_alike_give_no_interval() -> None:
    for a, b in (([0.0], [1.0]), ([0.0] * 5, [1.0] * 5), ([0.5, 1.0], [0.5, 1.0])):
        difference = paired_difference(a, b)
        assert difference.low is difference.high is None
    assert paired_difference([0.0] * 5, [1.0] * 5).p == pytest.approx(2 / 2**5)
