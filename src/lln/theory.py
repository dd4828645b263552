"""The paper's closed forms, each with the range in which it was measured to hold, and checks of its theorems.

Proposition 3.1 (softmax), Fenton's sum of log-normal variables, proposition 4.1 (LLN) in its three cases; checks of
theorems 3.2, 3.3, 3.4, of lemmas A.1, A.2, A.4 and of eq. 32 (`lln._theorems`), and of the identity on which the
decomposed form rests (`lln._decomposition`), on given rows, matrices or inputs. `docs/theory.md` has all measurements
in one place.

Letters: N keys, d features of a head, s² = alpha² sigma_q² + beta² sigma_k² the spread (eq. 26). What was measured was
measured on Gaussian queries and keys (or summands) in float64, over a few draws, unless stated otherwise.
"""

import math
from dataclasses import dataclass

import torch

from lln._decomposition import ScoreParts, check_decomposition, check_key_shift, decompose_scores
from lln._theorems import (
    Check,
    GapCheck,
    RatioCheck,
    check_equation_32,
    check_lemma_a1,
    check_lemma_a2,
    check_lemma_a4,
    check_theorem_3_2,
    check_theorem_3_3,
    check_theorem_3_4,
    count,
    positive,
)
from lln.checks import check_choice
from lln.matching.curves import FORMS, Form

__all__ = [
    "Check",
    "GapCheck",
    "LogMoments",
    "Ratio",
    "RatioCheck",
    "ScoreParts",
    "broad_case",
    "broad_slope",
    "check_decomposition",
    "check_equation_32",
    "check_key_shift",
    "check_lemma_a1",
    "check_lemma_a2",
    "check_lemma_a4",
    "check_theorem_3_2",
    "check_theorem_3_3",
    "check_theorem_3_4",
    "decompose_scores",
    "lln_log_variance",
    "log_normal_sum",
    "moderate_case",
    "narrow_case",
    "softmax_log_moments",
    "softmax_log_moments_refined",
    "spread",
]

# Grid of the one integral here: beyond 12 standard deviations a normal has less than 1e-32 left.
EDGE, CELLS = 12.0, 20_000


@dataclass(frozen=True)
class LogMoments:
    """Mean and variance of the logarithm of a positive random variable."""

    mean: float
    variance: float


@dataclass(frozen=True)
class Ratio:
    """Variances that the paper gives to the numerator and the denominator of P, and to P by eq. 32, their sum."""

    numerator: float
    denominator: float

    @property
    def total(self) -> float:
        """Eq. 32. It takes numerator and denominator as independent, which they are not: see `check_equation_32`."""
        return self.numerator + self.denominator


def softmax_log_moments(score_variance: float, *, num_keys: int) -> LogMoments:
    """Proposition 3.1: ln P of softmax attention has mean -ln N - sigma²/2 and variance sigma² (the score variance).

    Measured at N = 1024 on Gaussian queries and keys: the variance is right to 2 % for sigma² <= 2.25 and 8 % at 8 with
    d = 64, to 3 % for sigma² <= 1 and 20 % at 8 with d = 16; the mean to 0.03 nats for sigma² <= 4, 0.23 at 8.

    Args:
        score_variance: sigma², the variance of the scores.
        num_keys: N.

    Returns:
        Mean and variance of ln P.

    Raises:
        ValueError: a number that is not positive and finite, or a count below 1.

    Example:
        >>> moments = lln.theory.softmax_log_moments(1.0, num_keys=1024)
        >>> round(moments.mean, 3), moments.variance
        (-7.431, 1.0)
    """
    variance, N = positive("score_variance", score_variance), count("num_keys", num_keys)
    return LogMoments(-math.log(N) - variance / 2, variance)


def softmax_log_moments_refined(score_variance: float, *, num_keys: int, head_dim: int | None = None) -> LogMoments:
    """Proposition 3.1 with the terms that it leaves out, sigma_S² being Fenton's variance of ln sum (`log_normal_sum`):

        mean = -ln N - (sigma² - sigma_S²) / 2        variance = sigma² - sigma_S² + sigma⁴ / (2 d)

    sigma_S² enters the variance with a minus: the numerator is one of the denominator's N terms, so that the covariance
    of their logarithms is sigma_S². The last term, for scores that are dot products of d features, is the variance of
    |q|² sigma_k² / (2 d), by which a longer query has a larger denominator.

    Measured: for sigma² <= 1 at N = 64 and sigma² <= 3 at N = 1024 the variance is right to 3.5 % and the mean to 0.02
    nats (d = 16, 64, 256, and independent scores); beyond, sigma_S² is too large and the plain proposition is better.

    Args:
        score_variance: sigma², the variance of the scores.
        num_keys: N.
        head_dim: d; left out, scores are taken as independent.

    Returns:
        Mean and variance of ln P.

    Raises:
        ValueError: a number that is not positive and finite, or a count below 1.

    Example:
        >>> round(lln.theory.softmax_log_moments_refined(1.0, num_keys=1024, head_dim=64).variance, 3)
        1.006
    """
    variance, N = positive("score_variance", score_variance), count("num_keys", num_keys)
    of_sum = log_normal_sum(variance, terms=N).variance
    of_norms = 0.0 if head_dim is None else variance**2 / (2 * count("head_dim", head_dim))
    return LogMoments(-math.log(N) - (variance - of_sum) / 2, variance - of_sum + of_norms)


def log_normal_sum(variance: float, *, terms: int) -> LogMoments:
    """Fenton: ln of a sum of n independent exp(z), z ~ N(0, s²), as if the sum were log-normal with its two moments:

        variance = ln(1 + (exp(s²) - 1) / n)          mean = ln n + (s² - variance) / 2

    Measured for n = 8 to 1024: the variance is right to 3 % for s² <= 0.5 and always too large beyond: in the paper's
    range up to 1.2 by 16 % (n = 8), 12 % (16), 6 % (64), 1 % (256, 1024); at s² = 2 by 39 to 4 %, at 4 by 50 to 130 %.
    The mean is right to 0.02 nats for s² <= 1.2 and too low beyond, by 0.4 (n = 8) to 0.01 (1024) at s² = 4.

    Args:
        variance: s² of each z.
        terms: n.

    Returns:
        Mean and variance of the logarithm of the sum.

    Raises:
        ValueError: a number that is not positive and finite, or a count below 1.

    Example:
        >>> round(lln.theory.log_normal_sum(1.0, terms=64).variance, 4)
        0.0265
    """
    n = count("terms", terms)
    of_sum = math.log1p(math.expm1(positive("variance", variance)) / n)
    return LogMoments(math.log(n) + (variance - of_sum) / 2, of_sum)


def spread(alpha: float, sigma_q: float, beta: float, sigma_k: float) -> float:
    """s² = alpha² sigma_q² + beta² sigma_k² (eq. 26).

    Args:
        alpha, beta: the scales.
        sigma_q, sigma_k: standard deviations of queries and keys.

    Returns:
        s².

    Example:
        >>> lln.theory.spread(2.0, 0.5, 1.0, 1.0)
        2.0
    """
    return (alpha * sigma_q) ** 2 + (beta * sigma_k) ** 2


def narrow_case(spread: float, *, head_dim: int, num_keys: int) -> Ratio:
    """Eq. 27, for s² << 1: d s² and N s². These are not variances of logarithms, which eq. 32 needs.

    d s² is the variance of the numerator itself, a sum of d terms; it is d exp(s²) (exp(s²) - 1) exactly, 16 % more at
    s² = 0.1. That of its logarithm is s²/d, the limit of `moderate_case`. The denominator has N d terms that share a
    query: its variance is N² d alpha² sigma_q² + N d beta² sigma_k², larger than N s² by a factor of about N d / 2.

    Args:
        spread: s².
        head_dim: d.
        num_keys: N.

    Returns:
        The variances that the paper gives to numerator and denominator.

    Raises:
        ValueError: a number that is not positive and finite, or a count below 1.

    Example:
        >>> lln.theory.narrow_case(0.5, head_dim=64, num_keys=1024).total
        544.0
    """
    s2 = positive("spread", spread)
    return Ratio(count("head_dim", head_dim) * s2, count("num_keys", num_keys) * s2)


def moderate_case(spread: float, *, head_dim: int, num_keys: int) -> Ratio:
    """Eq. 28 and 29, for s² up to about 1: `log_normal_sum` with d terms and with N terms.

    The numerator is right where Fenton is. The denominator is not: its terms share the query, and the variance of its
    logarithm is ln(1 + (exp(alpha² sigma_q²) - 1) / d) whatever N is. See `lln_log_variance`.

    Args:
        spread: s².
        head_dim: d.
        num_keys: N.

    Returns:
        The variances that the paper gives to the logarithms of numerator and denominator.

    Raises:
        ValueError: a number that is not positive and finite, or a count below 1.

    Example:
        >>> round(lln.theory.moderate_case(1.0, head_dim=64, num_keys=1024).total, 4)
        0.0282
    """
    return Ratio(
        log_normal_sum(spread, terms=count("head_dim", head_dim)).variance,
        log_normal_sum(spread, terms=count("num_keys", num_keys)).variance,
    )


def broad_case(spread: float, *, a1: float, b1: float, a2: float, b2: float) -> Ratio:
    """Eq. 30 and 31, for s² >> 1: a1 s² + b1 and a2 s² + b2; their sum is eq. 33 with a = a1 + a2 and b = b1 + b2.

    The constants are fits and belong to a range: for the sum of 64 terms (a1, b1) is (0.176, -0.53) over s² of 4 to 20,
    with an error of 33 % at 4, and (0.204, -1.15) over 40 to 400; a1 tends to `broad_slope`. P is near a line, too, but
    not near the sum of the two: over 4 to 20 with d = 64 the numerator's slope is 0.169, the denominator's 0.063, P's
    0.161.

    Args:
        spread: s².
        a1, b1: slope and offset for the numerator.
        a2, b2: those for the denominator.

    Returns:
        The variances that the paper gives to the logarithms of numerator and denominator.

    Raises:
        ValueError: a spread that is not positive and finite.

    Example:
        >>> round(lln.theory.broad_case(10.0, a1=0.176, b1=-0.53, a2=0.063, b2=0.0).total, 2)
        1.86
    """
    s2 = positive("spread", spread)
    return Ratio(a1 * s2 + b1, a2 * s2 + b2)


def broad_slope(terms: int) -> float:
    """The limit of a1 in eq. 30: the variance of the largest of n standard normals, 0.68 for 2, 0.203 for 64.

    For s² -> infinity ln sum exp(s z) is s max(z) plus what stays bounded. Measured for n = 2 to 1024: a line through
    s² = 40 to 400 has this slope to 1 %, one through 4 to 20 is below it by 1 % (n = 2), 13 % (64) and 31 % (1024).

    Args:
        terms: n.

    Returns:
        The variance of the largest of n standard normals.

    Raises:
        ValueError: a count below 1.

    Example:
        >>> round(lln.theory.broad_slope(2), 2), round(lln.theory.broad_slope(64), 3)
        (0.68, 0.203)
    """
    n = count("terms", terms)
    edges = torch.linspace(-EDGE, EDGE, CELLS + 1, dtype=torch.float64)
    weight = (n * torch.special.log_ndtr(edges)).exp().diff()
    middle = (edges[1:] + edges[:-1]) / 2
    mean = (weight * middle).sum()
    return float((weight * (middle - mean).square()).sum())


def lln_log_variance(query_spread: float, key_spread: float, *, head_dim: int, form: Form = "paper") -> float:
    """Var(ln P) of LLN attention for moderate spreads, with u = alpha² sigma_q² and w = beta² sigma_k²:

        ln(1 + (exp(u + w) - 1) / d) - ln(1 + (exp(u) - 1) / d)
                                     - ln(1 + (exp(w) - 1) / d)  in the unbiased form, and the content of the decomposed

    The denominator is nearly a function of the query alone, which the numerator shares: their logarithms' covariance is
    the denominator's variance, so the variances of eq. 32 are subtracted and not added. For s² << 1 this is w / d.

    Measured for u = w, N = 1024 and d = 16, 64, 256: right to 5 % for s² <= 0.5 and 12 % at 1; too large by 11 to 44 %
    at 2, as Fenton is. Eq. 32 with eq. 28 and 29 is too large by a factor of 1.8 to 2.6 in the same range.

    The third term is the variance of the weights of columns, sum_l exp(b_jl), by which the unbiased form divides. For
    s² << 1 it leaves u w (1/d - 1/d²). Measured as above: right to 4 % for d = 64 and 256 and 12 % for d = 16 up to
    s² = 0.5, too large by 4 to 31 % at 1.

    Args:
        query_spread: u.
        key_spread: w.
        head_dim: d.
        form: "paper", "unbiased" or "decomposed".

    Returns:
        Var(ln P).

    Raises:
        ValueError: as `log_normal_sum`, and for an unknown form.

    Example:
        >>> paper = lln.theory.lln_log_variance(0.25, 0.25, head_dim=64)
        >>> unbiased = lln.theory.lln_log_variance(0.25, 0.25, head_dim=64, form="unbiased")
        >>> paper > unbiased > 0
        True
    """
    check_choice("form", form, FORMS)
    u, w = positive("query_spread", query_spread), positive("key_spread", key_spread)
    variance = log_normal_sum(u + w, terms=head_dim).variance - log_normal_sum(u, terms=head_dim).variance
    return variance if form == "paper" else variance - log_normal_sum(w, terms=head_dim).variance
