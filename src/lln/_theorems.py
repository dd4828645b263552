"""Numerical checks of the paper's theorems and lemmas; `lln.theory` is where to import them from.

A check computes both sides of a statement independently, in float64, and gives what was claimed and what was measured.
Letters: x (..., N) rows of scores, tau the temperature, p = softmax(x / tau) (eq. 19), mu the sum of p_i x_i.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Rounding of float64 in sums over a few thousand terms; both sides of an identity must agree to this.
RELATIVE, ABSOLUTE = 1e-8, 1e-12
# Numbers held at a time by what would need N M d of them: 32 MB.
TRIPLES = 2**22


@dataclass(frozen=True)
class Check:
    """A statement, what it claims, what was measured, and where it holds: one value for each row or matrix.

    Where whole matrices are compared, `claimed` and `measured` are these, and `holds` has one value for each of them.
    """

    statement: str
    claimed: Tensor
    measured: Tensor
    holds: Tensor


@dataclass(frozen=True)
class GapCheck(Check):
    """Theorem 3.3: measured is |lambda_2|², claimed the variance along the major principal component."""

    bounded: Tensor  # |lambda_2|² <= claimed, which every stochastic matrix obeys
    along_eigenvector: Tensor  # the variance along lambda_2's own eigenvector, always |lambda_2|²
    departure: Tensor  # |P P^T - P^T P| / |P|² in Frobenius norms; 0 for a normal matrix


@dataclass(frozen=True)
class RatioCheck(Check):
    """Eq. 32: measured is Var(ln P), claimed Var(ln numerator) + Var(ln denominator)."""

    numerator: Tensor
    denominator: Tensor
    covariance: Tensor  # of ln numerator and ln denominator; claimed - 2 covariance = measured


def check_lemma_a1(rows: Tensor, temperature: float) -> Check:
    """Sum of p_i (x_i - mu) is 0, with mu the sum of p_i x_i, for rows x (..., N).

    Args:
        rows: x, (..., N).
        temperature: tau.

    Returns:
        What is claimed, what was measured, and whether they agree, for each row.

    Raises:
        ValueError: rows that are not finite or empty, or a temperature that is not positive.

    Example:
        >>> bool(lln.theory.check_lemma_a1(torch.randn(5, 64), 0.7).holds.all())
        True
    """
    x, p, delta = _softmax(rows, temperature)
    measured = (p * delta).sum(dim=-1)
    return Check("sum p (x - mu) = 0", torch.zeros_like(measured), measured, measured.abs() <= ABSOLUTE * _size(x))


def check_lemma_a2(rows: Tensor, temperature: float) -> Check:
    """Sum of p_i² (x_i - mu) is at least 0 (up to rounding): 0 for a constant row, and for no other.

    Args:
        rows: x, (..., N).
        temperature: tau.

    Returns:
        What is claimed, what was measured, and whether they agree, for each row.

    Raises:
        ValueError: rows that are not finite or empty, or a temperature that is not positive.

    Example:
        >>> bool(lln.theory.check_lemma_a2(torch.randn(5, 64), 0.7).holds.all())
        True
    """
    x, p, delta = _softmax(rows, temperature)
    measured = (p.square() * delta).sum(dim=-1)
    holds = measured >= -ABSOLUTE * _size(x)
    return Check("sum p² (x - mu) >= 0, and 0 only if x is constant", torch.zeros_like(measured), measured, holds)


def check_lemma_a4(rows: Tensor, temperature: float) -> Check:
    """Sum of p_i x_i² less mu² is the sum of p_i (x_i - mu)².

    Args:
        rows: x, (..., N).
        temperature: tau.

    Returns:
        What is claimed, what was measured, and whether they agree, for each row.

    Raises:
        ValueError: rows that are not finite or empty, or a temperature that is not positive.

    Example:
        >>> bool(lln.theory.check_lemma_a4(torch.randn(5, 64), 0.7).holds.all())
        True
    """
    x, p, delta = _softmax(rows, temperature)
    claimed, measured = (p * delta.square()).sum(dim=-1), (p * x.square()).sum(dim=-1) - (p * x).sum(dim=-1).square()
    return Check("sum p x² - mu² = sum p (x - mu)²", claimed, measured, close(claimed, measured, _size(x) ** 2))


def check_theorem_3_2(rows: Tensor, temperature: float) -> Check:
    """The entropy of softmax(x / tau) in bits increases with tau: dH/dtau = sum p (x - mu)² / (tau³ ln 2).

    A.4.1 has no ln 2: it puts x / tau, in nats, for a logarithm to base 2, so its derivative is 0.693 of the one
    measured here (by autograd). The sign, and with it the theorem, is right; it is 0 for a constant row.

    Args:
        rows: x, (..., N).
        temperature: tau.

    Returns:
        What is claimed, what was measured, and whether they agree, for each row.

    Raises:
        ValueError: rows that are not finite or empty, or a temperature that is not positive.

    Example:
        >>> bool(lln.theory.check_theorem_3_2(torch.randn(5, 64), 0.7).holds.all())
        True
    """
    x, p, delta = _softmax(rows, temperature)
    claimed = (p * delta.square()).sum(dim=-1) / (temperature**3 * math.log(2))
    measured = _slope(lambda log_p: -(log_p.exp() * log_p).sum(dim=-1) / math.log(2), x, temperature)
    holds = close(claimed, measured, _size(x) ** 2 / temperature**3) & (claimed >= 0)
    return Check("dH/dtau > 0, or 0 if x is constant", claimed, measured, holds)


def check_theorem_3_4(rows: Tensor, temperature: float) -> Check:
    """The variance of a row (eq. 21) falls with tau (A.3): its derivative is -2 / (N tau²) sum p² (x - mu).

    Strictly only if the row is not constant, where A.3 writes < 0 for a sum that is >= 0 by lemma A.2.

    Args:
        rows: x, (..., N).
        temperature: tau.

    Returns:
        What is claimed, what was measured, and whether they agree, for each row.

    Raises:
        ValueError: rows that are not finite or empty, or a temperature that is not positive.

    Example:
        >>> bool(lln.theory.check_theorem_3_4(torch.randn(5, 64), 0.7).holds.all())
        True
    """
    x, p, delta = _softmax(rows, temperature)
    claimed = -2 / (x.shape[-1] * temperature**2) * (p.square() * delta).sum(dim=-1)
    measured = _slope(lambda log_p: log_p.exp().var(dim=-1, correction=0), x, temperature)
    size = _size(x) / temperature**2
    holds = close(claimed, measured, size) & (claimed <= ABSOLUTE * size)
    return Check("dVar/dtau < 0, or 0 if x is constant", claimed, measured, holds)


@torch.no_grad()
def check_theorem_3_3(matrix: Tensor) -> GapCheck:
    """lambda_2² is the variance along the major principal component of the centred P, as the theorem states it.

    It holds for normal matrices, which are doubly stochastic, so never for a biased one. For others the proof takes
    eigenvectors of the centred P for its principal components; what it shows is that the variance along lambda_2's own
    eigenvector is |lambda_2|², and |lambda_2| is at most the largest singular value of the centred P. (Both are
    sums over rows, not means, and lambda_2 may be complex: |lambda_2|² is meant.)

    Measured on softmax attention with N = 128 and 512, d = 16 and 64, score variance 0.1 to 9: with independent queries
    and keys |lambda_2| is 0.14 to 0.55 of the singular value, so that |lambda_2|² is 2 to 31 % of the variance; with
    query = key it is 0.998 or more of it for d = 64 and 0.72 to 1 for d = 16.

    Args:
        matrix: P, (..., N, N), with rows that sum to 1.

    Returns:
        Both sides of the theorem, and what the proof does show.

    Raises:
        ValueError: a matrix that is not square or not stochastic.

    Example:
        >>> check = lln.theory.check_theorem_3_3(torch.softmax(torch.randn(32, 32), dim=-1))
        >>> bool(check.holds), bool(check.bounded)
        (False, True)
    """
    P = _stochastic(matrix)
    centred = P - P.mean(dim=-2, keepdim=True)
    values, vectors = torch.linalg.eig(centred)
    largest = values.abs().argmax(dim=-1, keepdim=True)
    vector = vectors.gather(-1, largest[..., None, :].expand(*vectors.shape[:-1], 1))
    measured = values.abs().gather(-1, largest)[..., 0].square()
    claimed = torch.linalg.matrix_norm(centred, 2).square()
    along = torch.linalg.vector_norm(centred.to(vector.dtype) @ vector, dim=(-2, -1)).square()
    departure = torch.linalg.matrix_norm(P @ P.mT - P.mT @ P) / torch.linalg.matrix_norm(P).square()
    return GapCheck(
        "lambda_2² = variance along the major principal component",
        claimed,
        measured,
        close(claimed, measured, 1.0),
        bounded=measured <= claimed * (1 + RELATIVE) + ABSOLUTE,
        along_eigenvector=along,
        departure=departure,
    )


@torch.no_grad()
def check_equation_32(query: Tensor, key: Tensor, *, alpha: float = 1.0, beta: float = 1.0) -> RatioCheck:
    """Var(ln P) = Var(ln numerator) + Var(ln denominator) for LLN attention on query (..., N, d) and key (..., M, d).

    Numerator and denominator share the query. Measured on Gaussian input with N = 1024 and d = 64, the sum is 2.3 times
    Var(ln P) at s² = 1, 1.7 times at 4 and 1.46 times at 20: the covariance is about the denominator's variance.

    Args:
        query: (..., N, d).
        key: (..., M, d).
        alpha, beta: the scales.

    Returns:
        Both sides of the equation, and the covariance that it leaves out.

    Raises:
        ValueError: tokens that are not finite or do not belong together.

    Example:
        >>> check = lln.theory.check_equation_32(torch.randn(64, 16), torch.randn(64, 16))
        >>> bool(check.holds), bool(check.covariance > 0)
        (False, True)
    """
    query, key = finite_tokens(query, key)
    a, b = positive("alpha", alpha) * query, positive("beta", beta) * key
    # All triples of query, key and feature, where a product of exponentials would underflow; some rows at a time.
    parts = torch.split(a, max(1, TRIPLES // max(1, b.numel())), dim=-2)
    above = torch.cat([torch.logsumexp(part[..., :, None, :] + b[..., None, :, :], dim=-1) for part in parts], dim=-2)
    below = torch.logsumexp(above, dim=-1, keepdim=True).expand_as(above)
    numerator, denominator, measured = (x.var(dim=(-2, -1), correction=0) for x in (above, below, above - below))
    claimed = numerator + denominator
    return RatioCheck(
        "Var(ln P) = Var(ln numerator) + Var(ln denominator)",
        claimed,
        measured,
        close(claimed, measured, 0.0),
        numerator=numerator,
        denominator=denominator,
        covariance=(claimed - measured) / 2,
    )


def finite_tokens(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Query (..., N, d) and key (..., M, d) in float64."""
    for name, x in (("query", query), ("key", key)):
        if x.dim() < 2 or not x.is_floating_point() or not bool(x.isfinite().all()):
            raise ValueError(
                f"{name} must be a finite floating point tensor (..., tokens, features), got {described(x)}"
            )
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"query and key must have the same number of features, got {described(query)} and {described(key)}"
        )
    return query.double(), key.double()


def _softmax(rows: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Rows x in float64, p = softmax(x / tau) and x - mu."""
    if not isinstance(rows, Tensor) or not rows.is_floating_point() or rows.dim() == 0 or rows.shape[-1] == 0:
        raise ValueError(f"rows must be a floating point tensor (..., N) with N >= 1, got {described(rows)}")
    if not bool(rows.isfinite().all()):
        raise ValueError("rows must be finite: leave masked scores out instead of giving -inf")
    x = rows.detach().double()
    p = torch.softmax(x / positive("temperature", temperature), dim=-1)
    return x, p, x - (p * x).sum(dim=-1, keepdim=True)


def _slope(statistic: Callable[[Tensor], Tensor], x: Tensor, temperature: float) -> Tensor:
    """Derivative by temperature of a statistic of ln softmax(x / tau), for each row, by autograd."""
    with torch.enable_grad():
        tau = torch.full((*x.shape[:-1], 1), temperature, dtype=x.dtype, device=x.device, requires_grad=True)
        (slope,) = torch.autograd.grad(statistic(torch.log_softmax(x / tau, dim=-1)).sum(), tau)
    return slope[..., 0]


def _stochastic(matrix: Tensor) -> Tensor:
    if (
        not isinstance(matrix, Tensor)
        or matrix.dim() < 2
        or matrix.shape[-1] != matrix.shape[-2]
        or matrix.shape[-1] < 2
    ):
        raise ValueError(f"matrix must be square, (..., N, N) with N >= 2, got {described(matrix)}")
    P = matrix.detach().double()
    if not bool((P >= 0).all()) or not bool(((P.sum(dim=-1) - 1).abs() < 1e-5).all()):
        raise ValueError("matrix must be stochastic: no negative or NaN entry, and rows divided by their sums")
    return P


def close(claimed: Tensor, measured: Tensor, size: Tensor | float) -> Tensor:
    return (claimed - measured).abs() <= RELATIVE * claimed.abs() + ABSOLUTE * size


def _size(x: Tensor) -> Tensor:
    return x.abs().amax(dim=-1)


def positive(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive finite number, got {value!r}")
    return value


def count(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an int of at least 1, got {value!r}")
    return value


def described(x: object) -> str:
    return f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
