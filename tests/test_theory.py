"""The paper's statements with numbers: where they hold, by how much they fail, and what holds instead."""

import dataclasses
import math

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import torch
from torch import Tensor

import lln
from lln import theory
from lln.instruments import entropy, spectral_gap, variance

TEMPERATURES = (0.2, 0.3, 0.5, 0.8, 1.25, 2.0, 4.0)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def softmax_of(query: Tensor, key: Tensor, score_variance: float) -> Tensor:
    return torch.softmax(query @ key.mT * math.sqrt(score_variance / query.shape[-1]), dim=-1)


# Proposition 3.1


@pytest.mark.parametrize("input_variance", [0.1, 0.5, 1.0, 1.5])
def test_proposition_3_1_is_right_to_3_percent(input_variance: float) -> None:
    variances, means = [], []
    for draw in range(3):
        scores = input_variance * normal(1024, 64, seed=draw) @ normal(64, 1024, seed=100 + draw) / 8
        logs = torch.log_softmax(scores, dim=-1)
        variances.append(logs.var().item() / scores.var().item())
        means.append(logs.mean().item())
    claimed = theory.softmax_log_moments(input_variance**2, num_keys=1024)
    assert claimed.variance == input_variance**2
    assert np.mean(variances) == pytest.approx(1.0, abs=0.03)
    assert np.mean(means) == pytest.approx(claimed.mean, abs=0.03)


def test_the_denominators_variance_is_subtracted() -> None:
    """The numerator is one of the N terms of the denominator; with few keys that is measurable."""
    logs = torch.log_softmax(math.sqrt(0.5) * normal(8192, 64), dim=-1)
    refined = theory.softmax_log_moments_refined(0.5, num_keys=64)
    of_sum = theory.log_normal_sum(0.5, terms=64).variance
    assert logs.var().item() == pytest.approx(refined.variance, rel=0.012)
    assert logs.var().item() < 0.975 * (0.5 + of_sum)
    assert logs.mean().item() == pytest.approx(refined.mean, abs=0.003)
    assert abs(logs.mean().item() - theory.softmax_log_moments(0.5, num_keys=64).mean) > 0.004


def test_dot_products_of_few_features_vary_more() -> None:
    draws = [torch.log_softmax(normal(1024, 16, seed=s) @ normal(16, 1024, seed=50 + s) * math.sqrt(3 / 16), dim=-1)
             for s in range(4)]  # fmt: skip
    measured = np.mean([logs.var().item() for logs in draws])
    assert measured > 1.05 * theory.softmax_log_moments(3.0, num_keys=1024).variance
    refined = theory.softmax_log_moments_refined(3.0, num_keys=1024, head_dim=16)
    assert measured == pytest.approx(refined.variance, rel=0.035)


# Fenton, and proposition 4.1


@pytest.mark.parametrize("terms", [8, 64, 256])
def test_fenton_in_and_beyond_its_range(terms: int) -> None:
    z = normal(2**22 // terms, terms, seed=terms)
    worst_at_1_2 = {8: 0.19, 64: 0.09, 256: 0.045}[terms]  # as in the docstring, with 3 % for the sample
    for s2, error in ((0.2, 0.03), (0.5, 0.06), (1.2, worst_at_1_2)):
        logs = (math.sqrt(s2) * z).exp().sum(dim=1).log()
        claimed = theory.log_normal_sum(s2, terms=terms)
        assert -0.03 < claimed.variance / logs.var().item() - 1 < error
        assert claimed.mean == pytest.approx(logs.mean().item(), abs=0.02)
    assert theory.log_normal_sum(4.0, terms=terms).variance > 1.4 * (2 * z).exp().sum(dim=1).log().var().item()


@pytest.mark.parametrize("terms", [1, 2, 1000])
def test_fenton_has_the_two_moments_of_the_sum(terms: int) -> None:
    claimed, s2 = theory.log_normal_sum(0.7, terms=terms), 0.7
    assert claimed.mean + claimed.variance / 2 == pytest.approx(math.log(terms) + s2 / 2, abs=1e-13)
    relative = math.expm1(claimed.variance)
    assert relative == pytest.approx(math.expm1(s2) / terms, rel=1e-12)
    if terms == 1:
        assert (claimed.mean, claimed.variance) == pytest.approx((0.0, s2), abs=1e-13)


def test_narrow_case_is_about_the_sums_and_not_their_logarithms() -> None:
    s2, d, N = 0.01, 16, 32
    q, k = (math.sqrt(s2 / 2) * x for x in (normal(20000, 1, d), normal(20000, N, d, seed=1)))
    numerator = (q.exp() * k.exp()).sum(dim=-1)
    claimed = theory.narrow_case(s2, head_dim=d, num_keys=N)
    assert numerator[:, 0].var().item() == pytest.approx(claimed.numerator, rel=0.05)
    assert numerator[:, 0].log().var().item() == pytest.approx(s2 / d, rel=0.04)
    denominator = numerator.sum(dim=-1).var().item()
    assert denominator == pytest.approx(N**2 * d * s2 / 2 + N * d * s2 / 2, rel=0.05)
    assert denominator > 200 * claimed.denominator  # N d / 2 = 256


def test_moderate_and_broad_case_are_eq_28_to_33() -> None:
    moderate = theory.moderate_case(0.9, head_dim=64, num_keys=1024)
    assert moderate.numerator == pytest.approx(math.log((math.exp(0.9) - 1) / 64 + 1), rel=1e-12)
    assert moderate.denominator == pytest.approx(math.log((math.exp(0.9) - 1) / 1024 + 1), rel=1e-12)
    assert moderate.total == moderate.numerator + moderate.denominator
    broad = theory.broad_case(8.0, a1=0.2, b1=-0.5, a2=0.05, b2=-0.25)
    assert broad.total == pytest.approx((0.2 + 0.05) * 8 - 0.75)
    assert theory.spread(2.0, 0.5, 3.0, 1.0) == 10.0


def test_broad_slope_is_the_variance_of_a_maximum() -> None:
    assert theory.broad_slope(1) == pytest.approx(1.0, abs=1e-6)
    assert theory.broad_slope(2) == pytest.approx(1 - 1 / math.pi, abs=1e-6)

    def moment(power: int) -> float:
        density = lambda x: x**power * 64 * scipy.stats.norm.pdf(x) * scipy.stats.norm.cdf(x) ** 63  # noqa: E731
        return float(scipy.integrate.quad(density, -8, 10)[0])

    assert theory.broad_slope(64) == pytest.approx(moment(2) - moment(1) ** 2, abs=1e-6)
    z = normal(50_000, 64)
    low, high = (torch.logsumexp(math.sqrt(s2) * z, dim=1).var().item() for s2 in (100.0, 400.0))
    assert (high - low) / 300 == pytest.approx(theory.broad_slope(64), rel=0.03)


@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("s2", [0.1, 0.5, 1.0])
def test_variance_of_lln_is_a_difference_and_not_the_sum_of_eq_32(s2: float, head_dim: int) -> None:
    scale = math.sqrt(s2 / 2)
    draws = [(normal(1, 1, 512, head_dim, seed=s), normal(1, 1, 512, head_dim, seed=9 + s)) for s in range(4)]
    measured = np.mean([lln.attention_matrix(q, k, alpha=scale, beta=scale).log().var().item() for q, k in draws])
    assert theory.lln_log_variance(s2 / 2, s2 / 2, head_dim=head_dim) == pytest.approx(measured, rel=0.15)
    assert theory.moderate_case(s2, head_dim=head_dim, num_keys=512).total > 1.6 * measured


def test_eq_32_fails_because_numerator_and_denominator_share_the_query() -> None:
    query, key = normal(512, 64), normal(512, 64, seed=1)
    check = theory.check_equation_32(query, key, alpha=math.sqrt(0.5), beta=math.sqrt(0.5))
    matrix = lln.attention_matrix(query[None, None], key[None, None], alpha=math.sqrt(0.5), beta=math.sqrt(0.5))
    assert check.measured.item() == pytest.approx(matrix.log().var(correction=0).item(), rel=1e-9)
    assert not check.holds
    assert 2.0 < (check.claimed / check.measured).item() < 2.8
    assert check.covariance.item() == pytest.approx(check.denominator.item(), rel=0.05)
    same = theory.check_equation_32(torch.ones(8, 64, dtype=torch.float64), key)
    assert same.holds  # equal queries have equal denominators, whose variance is 0
    assert same.denominator.item() == pytest.approx(0.0, abs=1e-20)


def test_eq_32_does_not_overflow() -> None:
    check = theory.check_equation_32(500 * normal(32, 8), 500 * normal(32, 8, seed=1))
    assert check.measured.isfinite()
    assert check.measured.item() == pytest.approx((check.claimed - 2 * check.covariance).item())


# Theorems 3.2 and 3.4, lemmas A.1, A.2, A.4

ROWS = {
    "gaussian": normal(5, 100),
    "two values": torch.tensor([[0.0, 1.0], [1.0, 1.0 + 1e-6]], dtype=torch.float64),
    "far from zero": 1e4 + normal(3, 50),
    "a tie at the top": torch.tensor([3.0, 3.0, 0.0], dtype=torch.float64),
    "float32": normal(4, 33).float(),
}
CHECKS = (
    theory.check_lemma_a1,
    theory.check_lemma_a2,
    theory.check_lemma_a4,
    theory.check_theorem_3_2,
    theory.check_theorem_3_4,
)


@pytest.mark.parametrize("temperature", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("rows", ROWS.values(), ids=list(ROWS))
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_theorems_and_lemmas_hold(check, rows: Tensor, temperature: float) -> None:
    found = check(rows, temperature)
    assert found.holds.all()
    assert found.measured.shape == rows.shape[:-1]
    if check in (theory.check_lemma_a2, theory.check_theorem_3_2):
        assert (found.measured > 0).all()
    if check is theory.check_theorem_3_4:
        assert (found.measured < 0).all()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("length", [1, 2, 64])
def test_a_constant_row_gives_equality(check, length: int) -> None:
    found = check(torch.full((length,), 0.3), 0.7)
    assert found.holds
    assert found.measured.item() == pytest.approx(0.0, abs=1e-14)


def test_no_row_is_too_peaked() -> None:
    rows = torch.tensor([[2000.0, 0.0, -5.0]])
    assert all(check(rows, 0.5).holds.all() for check in CHECKS)


def test_derivatives_agree_with_differences_of_what_scipy_and_numpy_give() -> None:
    rows, tau, step = ROWS["gaussian"], 0.8, 1e-5

    def slope(statistic) -> np.ndarray:
        up, down = (statistic(torch.softmax(rows / t, dim=-1).numpy()) for t in (tau + step, tau - step))
        return (up - down) / (2 * step)

    found = theory.check_theorem_3_2(rows, tau)
    expected = slope(lambda p: scipy.stats.entropy(p, base=2, axis=1))
    np.testing.assert_allclose(found.claimed, expected, rtol=1e-7)
    without_ln_2 = found.claimed.numpy() * math.log(2)  # A.4.1 as printed
    np.testing.assert_allclose(without_ln_2 / expected, math.log(2), rtol=1e-7)
    found = theory.check_theorem_3_4(rows, tau)
    np.testing.assert_allclose(found.claimed, slope(lambda p: np.var(p, axis=1)), rtol=1e-7)


@pytest.mark.parametrize("seed", [0, 1])
def test_entropy_and_gap_rise_and_variance_falls_with_temperature(seed: int) -> None:
    scores = normal(192, 64, seed=seed) @ normal(64, 192, seed=seed + 10) / 8
    matrices = [torch.softmax(scores / tau, dim=-1) for tau in TEMPERATURES]
    for instrument, sign in ((entropy, 1), (spectral_gap, 1), (variance, -1)):
        values = np.array([instrument(P).item() for P in matrices])
        assert (sign * np.diff(values) > 0).all(), instrument.__name__


def test_the_gap_of_a_biased_matrix_does_not_follow_temperature() -> None:
    scores = normal(128, 64) @ normal(64, 128, seed=1) / 8
    scores[:, 0] += 6.0
    cold, warm = (torch.softmax(scores / tau, dim=-1) for tau in (0.35, 1.0))
    assert entropy(cold) < entropy(warm)
    assert spectral_gap(cold) > spectral_gap(warm)


# Theorem 3.3


def circulant(row: Tensor) -> Tensor:
    return torch.stack([row.roll(i) for i in range(len(row))])


NORMAL = {
    "uniform": torch.full((6, 6), 1 / 6, dtype=torch.float64),
    "identity": torch.eye(5, dtype=torch.float64),
    "permutation": torch.eye(7, dtype=torch.float64).roll(1, dims=0),
    "circulant": circulant(torch.tensor([0.5, 0.25, 0.15, 0.1, 0.0], dtype=torch.float64)),
    "symmetric": torch.tensor([[0.7, 0.2, 0.1], [0.2, 0.5, 0.3], [0.1, 0.3, 0.6]], dtype=torch.float64),
}


@pytest.mark.parametrize("matrix", NORMAL.values(), ids=list(NORMAL))
def test_theorem_3_3_holds_for_normal_matrices(matrix: Tensor) -> None:
    check = theory.check_theorem_3_3(matrix)
    assert check.departure.item() == pytest.approx(0.0, abs=1e-14)
    assert check.holds
    assert check.bounded
    sizes = np.sort(np.abs(np.linalg.eigvals(matrix.numpy())))
    assert check.measured.item() == pytest.approx(sizes[-2] ** 2, abs=1e-12)


def test_theorem_3_3_fails_for_softmax_attention_of_independent_queries_and_keys() -> None:
    P = torch.stack([softmax_of(normal(128, 64, seed=s), normal(128, 64, seed=20 + s), 1.0) for s in range(3)])
    check = theory.check_theorem_3_3(P)
    assert not check.holds.any()
    assert check.bounded.all()
    assert (check.departure > 0.01).all()
    share = check.measured / check.claimed
    assert ((share > 0.05) & (share < 0.35)).all()
    torch.testing.assert_close(check.along_eigenvector, check.measured, rtol=1e-9, atol=0.0)
    for matrix, measured, claimed in zip(P.numpy(), check.measured, check.claimed, strict=True):
        assert measured.item() == pytest.approx(np.sort(np.abs(np.linalg.eigvals(matrix)))[-2] ** 2, rel=1e-9)
        assert claimed.item() == pytest.approx(np.linalg.norm(matrix - matrix.mean(axis=0), 2) ** 2, rel=1e-9)


def test_theorem_3_3_nearly_holds_when_queries_are_keys() -> None:
    x = normal(128, 64)
    check = theory.check_theorem_3_3(softmax_of(x, x, 1.0))
    assert not check.holds
    assert (check.measured / check.claimed).item() > 0.99


def test_lambda_2_may_vanish_where_the_variance_does_not() -> None:
    """Every state moves towards the first: all eigenvalues but 1 are 0, and nothing is normal."""
    check = theory.check_theorem_3_3(torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]))
    assert check.measured.item() == pytest.approx(0.0, abs=1e-12)
    assert check.claimed.item() == pytest.approx(4 / 3)


# The identity of the decomposed form


@pytest.mark.parametrize("centers", ["means", "any"])
def test_scores_are_content_column_and_row(centers: str) -> None:
    query, key = 1 + 2 * normal(3, 20, 16), normal(3, 31, 16, seed=1) - 4
    given = {} if centers == "means" else {"query_center": 5 * normal(16, seed=2), "key_center": normal(3, 16, seed=3)}
    check = theory.check_decomposition(query, key, **given)
    assert check.holds.shape == (3,)
    assert check.holds.all()
    torch.testing.assert_close(check.claimed, check.measured, rtol=0.0, atol=1e-12)
    np.testing.assert_allclose(check.measured, np.einsum("bid,bjd->bij", query, key) / 4, rtol=0, atol=1e-12)
    m_q, m_k = (given or {"q": query.mean(-2), "k": key.mean(-2)}).values()
    parts = theory.decompose_scores(query, key, m_q, m_k)
    assert (parts.content.shape, parts.row.shape) == ((3, 20, 31), (3, 20, 1))
    without_row = torch.softmax(parts.content + parts.column, dim=-1)
    torch.testing.assert_close(without_row, torch.softmax(check.measured, dim=-1), rtol=1e-11, atol=0.0)


def test_a_wrong_identity_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    decompose = theory.decompose_scores
    monkeypatch.setattr(
        "lln._decomposition.decompose_scores",
        lambda *x: dataclasses.replace(decompose(*x), row=torch.zeros(20, 1, dtype=torch.float64)),
    )
    assert not theory.check_decomposition(normal(20, 8), normal(20, 8, seed=1) + 1).holds


def test_only_the_decomposed_form_does_not_change_with_a_shift_of_all_keys() -> None:
    query, key, shift = normal(2, 40, 16), normal(2, 50, 16, seed=1), 10 * normal(16, seed=2)
    check = theory.check_key_shift(query, key, shift)
    assert check.holds.tolist() == [True, True]
    assert check.claimed.shape == (2, 40, 50)
    torch.testing.assert_close(check.claimed, check.measured, rtol=0.0, atol=1e-12)
    for form in ("paper", "unbiased"):
        assert not theory.check_key_shift(query, key, shift, form=form).holds.any()
        assert theory.check_key_shift(query, key, torch.full((16,), 3.0), form=form).holds.all()


@pytest.mark.parametrize(("head_dim", "error"), [(16, 0.15), (64, 0.07)])
def test_variance_of_the_unbiased_form_is_without_that_of_columns(head_dim: int, error: float) -> None:
    query, key = normal(1024, head_dim), normal(1024, head_dim, seed=1)
    for s2 in (0.1, 0.5):
        a, b = (math.sqrt(s2 / 2) * x for x in (query, key))
        paper, unbiased = ((a.exp() @ x.exp().mT).log().log_softmax(dim=-1) for x in (b, torch.log_softmax(b, dim=-1)))
        claimed = theory.lln_log_variance(s2 / 2, s2 / 2, head_dim=head_dim, form="unbiased")
        assert unbiased.var().item() == pytest.approx(claimed, rel=error)
        assert claimed < 0.25 * theory.lln_log_variance(s2 / 2, s2 / 2, head_dim=head_dim)
        shares = [x.mean(dim=0).var().item() / x.var().item() for x in (paper, unbiased)]
        assert shares[0] > 0.7
        assert shares[1] < 0.003
    narrow = theory.lln_log_variance(1e-4, 1e-4, head_dim=head_dim, form="unbiased")
    assert narrow == pytest.approx(1e-8 * (1 / head_dim - 1 / head_dim**2), rel=1e-3)


# What is refused


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.softmax_log_moments(-1.0, num_keys=8), "score_variance must be a positive"),
        (lambda: theory.softmax_log_moments(1.0, num_keys=0), "num_keys must be an int of at least 1"),
        (lambda: theory.softmax_log_moments_refined(1.0, num_keys=8, head_dim=0), "head_dim must be an int"),
        (lambda: theory.log_normal_sum(math.nan, terms=8), "variance must be a positive finite number, got nan"),
        (lambda: theory.log_normal_sum(1.0, terms=2.5), "terms must be an int"),  # type: ignore[arg-type]
        (lambda: theory.narrow_case(0.0, head_dim=8, num_keys=8), "spread must be a positive"),
        (lambda: theory.broad_slope(True), "terms must be an int"),
        (lambda: theory.check_theorem_3_2(torch.zeros(4), 0.0), "temperature must be a positive"),
        (lambda: theory.check_lemma_a1(torch.tensor(1.0), 1.0), r"rows must be .* \(\.\.\., N\)"),
        (lambda: theory.check_lemma_a2(torch.zeros(3, 0), 1.0), "N >= 1"),
        (lambda: theory.check_lemma_a4(torch.tensor([0.0, -math.inf]), 1.0), "rows must be finite"),
        (lambda: theory.check_theorem_3_4(torch.arange(4), 1.0), "floating point"),
        (lambda: theory.check_theorem_3_3(torch.ones(2, 3) / 3), "matrix must be square"),
        (lambda: theory.check_theorem_3_3(torch.ones(1, 1)), "N >= 2"),
        (lambda: theory.check_theorem_3_3(torch.eye(3) * 2), "rows divided by their sums"),
        (lambda: theory.check_theorem_3_3(torch.full((2, 2), math.nan)), "no negative or NaN entry"),
        (lambda: theory.check_theorem_3_3(torch.tensor([[1.5, -0.5], [0.5, 0.5]])), "no negative or NaN entry"),
        (lambda: theory.check_equation_32(torch.zeros(4, 3), torch.zeros(4, 2)), "same number of features"),
        (lambda: theory.check_equation_32(torch.zeros(4), torch.zeros(4, 2)), r"query must be .* \(4,\)"),
        (lambda: theory.check_equation_32(torch.zeros(4, 2), torch.zeros(4, 2), alpha=-1.0), "alpha must be"),
        (lambda: theory.check_decomposition(torch.zeros(4, 3), torch.zeros(4, 2)), "same number of features"),
        (lambda: theory.check_decomposition(torch.zeros(4, 3), torch.zeros(4, 3), key_center=torch.zeros(2)),
         r"key_center must be .* \(\.\.\., 3\)"),
        (lambda: theory.check_key_shift(torch.zeros(4, 3), torch.full((4, 3), math.nan), torch.ones(3)), "key must be"),
        (lambda: theory.check_key_shift(torch.zeros(4, 3), torch.zeros(4, 3), torch.ones(1)), "shift must be"),
        (lambda: theory.check_key_shift(torch.zeros(4, 3), torch.zeros(4, 3), torch.ones(3), form="x"), "form must be"),  # type: ignore[arg-type]
        (lambda: theory.lln_log_variance(1.0, 1.0, head_dim=8, form="x"), "form must be one of"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_bad_arguments_are_refused_by_name(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_everything_in_all_exists() -> None:
    assert all(hasattr(theory, name) for name in theory.__all__)
