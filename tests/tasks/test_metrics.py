"""Metrics of whole sets of predictions, against other people's code and explicit formulas."""

import numpy as np
import pytest

from lln.tasks.metrics import f1, matthews, measure, pearson, ranks, spearman

TIED = np.array([1.0, 2.0, 2.0, 0.5, 3.0, 2.0, 0.5])


def labels(seed, count=31):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 2, count).astype(float), rng.integers(0, 2, count).astype(float)


@pytest.mark.parametrize("seed", range(4))
def test_counts_of_the_confusion_matrix(seed):
    found, true = labels(seed)
    tp, tn = ((found == x) & (true == x) for x in (1, 0))
    fp, fn = ((found == x) & (true != x) for x in (1, 0))
    tp, tn, fp, fn = (int(x.sum()) for x in (tp, tn, fp, fn))
    assert f1(found, true) == pytest.approx(2 * tp / (2 * tp + fp + fn))
    scale = ((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)) ** 0.5
    assert matthews(found, true) == pytest.approx((tp * tn - fp * fn) / scale)


def test_ranks_of_equal_numbers_are_their_mean():
    explicit = [np.mean([i + 1 for i, y in enumerate(sorted(TIED)) if y == x]) for x in TIED]
    assert ranks(TIED).tolist() == explicit


def test_correlations_are_those_of_numpy():
    other = np.array([0.3, 4.0, 1.0, 1.0, 5.0, 2.0, 0.0])
    assert pearson(TIED, other) == pytest.approx(np.corrcoef(TIED, other)[0, 1])
    assert spearman(TIED, other) == pytest.approx(np.corrcoef(ranks(TIED), ranks(other))[0, 1])
    assert spearman(TIED, np.exp(TIED)) == pytest.approx(1.0)


def test_spearman_is_that_of_scipy():
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 9, 50) / 2, rng.standard_normal(50)
    assert spearman(x, y) == pytest.approx(stats.spearmanr(x, y).statistic)
    assert pearson(x, y) == pytest.approx(stats.pearsonr(x, y).statistic)


def test_the_metrics_of_a_classifier_are_those_of_sklearn():
    sklearn = pytest.importorskip("sklearn.metrics")
    found, true = labels(7)
    assert f1(found, true) == pytest.approx(sklearn.f1_score(true, found))
    assert matthews(found, true) == pytest.approx(sklearn.matthews_corrcoef(true, found))


@pytest.mark.parametrize("metric", [matthews, pearson, spearman, f1])
def test_what_is_constant_correlates_with_nothing(metric):
    constant = np.full(5, 0.1) * 0
    assert metric(constant, np.array([0.0, 1.0, 1.0, 0.0, 1.0])) == 0.0


def test_logits_of_classes_and_of_a_number():
    found = measure(("accuracy", "f1"), [[0.0, 1.0], [2.0, 1.0], [0.0, 3.0]], [1, 0, 0])
    assert found == {"accuracy": pytest.approx(2 / 3), "f1": pytest.approx(2 / 3)}
    assert measure(("spearman",), [[0.1], [0.4], [0.2]], [0.0, 5.0, 2.5])["spearman"] == pytest.approx(1.0)
    assert measure(("pearson",), [[np.nan]] * 3, [0.0, 5.0, 2.5]) == {"pearson": 0.0}
