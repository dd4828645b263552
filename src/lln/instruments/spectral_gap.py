"""How fast attention, as a Markov chain on tokens, becomes independent of its start: 1 - |lambda_2| (section 3.2.2).

Which way lambda_2 is found depends on what is known about the matrix:

    causal            a triangular matrix has its eigenvalues on the diagonal
    LLN               the eigenvalues of P = A B^T are those of the D x D chain B^T A on features: O(N D²)
    blocks            every block is a chain of its own, so with two of them lambda_2 = 1
    up to 128 tokens  all eigenvalues of the explicit matrix
    more              ARPACK, which only multiplies the matrix with vectors, chunk of rows by chunk

Where all eigenvalues are computed, the one nearest to 1 is dropped. ARPACK finds the largest only, so there the pair
(1, uniform vector) is deflated: C P with C = I - 1 1^T / N has the other eigenvalues of P and 0 in place of the 1. The
eigenvectors of the others change with it, and rounding can move the eigenvalues of hard attention far, where most
weights are zero. These are therefore read where each row has one key, and up to 1024 tokens all computed.
"""

import importlib.util
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias, Unpack

import torch
from torch import Tensor

from lln.instruments.reading import Options, measure
from lln.instruments.rows import LLNRows, MatrixRows, Rows, SoftmaxRows
from lln.matching.moments import chunks

if TYPE_CHECKING:
    import numpy as np

Vector: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.float64]]"

# Up to here all eigenvalues of the explicit matrix take less time than an iteration (10 ms), and up to the second limit
# they are affordable (half a minute) where the iteration is not to be had.
DENSE_TOKENS, DENSE_AT_MOST = 128, 2048
# Krylov vectors and restarts: 100 to 200 products for Gaussian inputs, whatever their number.
KRYLOV, RESTARTS = 48, 40
# Beyond this share of zeros attention is hard: all its eigenvalues are computed, if the matrix is held.
HARD = 0.5


def spectral_gap(attention: Tensor, key: Tensor | None = None, **options: Unpack[Options]) -> Tensor:
    """1 - |lambda_2|, from 0 (identity, permutations, separate blocks) to 1 (all rows are the same).

    Needs as many queries as keys. A single token has no second eigenvalue; its gap is given as 1. From query and key
    LLN takes O(N D²) at any length, causal attention one pass over its rows, other kinds beyond 2048 tokens need scipy
    (`pip install "lln-attention[instruments]"`), which also makes them faster from 128 on.

    Args:
        attention, key, options: as in `lln.instruments.entropy`.

    Returns:
        A tensor with the leading dimensions of the input, (B, H) for query and key.

    Raises:
        ValueError: as for `entropy`, or there are other numbers of queries than of keys.

    Example:
        >>> spectral_gap(torch.full((4, 4), 1 / 4))
        tensor(1.)
        >>> query, key = torch.randn(2, 1, 4, 5000, 16)
        >>> spectral_gap(query, key).shape  # of LLN attention
        torch.Size([1, 4])
    """
    return measure(gap, attention, key, options)


def gap(rows: Rows) -> Tensor:
    """The gap of each head, (G,)."""
    if rows.num_rows != rows.num_columns:
        raise ValueError(
            f"a spectral gap needs as many queries as keys, got {rows.num_rows} rows and {rows.num_columns} columns"
        )
    if rows.num_rows == 1:
        return torch.ones(rows.heads, dtype=torch.float64)
    if rows.is_causal:
        second = _second_on_diagonal(rows)
    elif isinstance(rows, LLNRows):
        second = _second_eigenvalue(_feature_chain(rows))
    elif isinstance(rows, SoftmaxRows) and rows.is_separate:
        second = torch.ones(rows.heads, dtype=torch.float64)
    elif rows.num_rows <= (DENSE_TOKENS if _has_scipy() else DENSE_AT_MOST):
        second = _dense(torch.cat([rows.block(index) for index in rows.parts()], dim=1).double())
    elif not _has_scipy():
        raise ImportError(
            f"the spectral gap of {rows.num_rows} tokens needs scipy: pip install 'lln-attention[instruments]'"
        )
    else:
        second = torch.stack([_of_long_head(rows.head(head)) for head in range(rows.heads)])
    return (1 - second).clamp(0.0, 1.0).to(rows.index.device)


def _second_on_diagonal(rows: Rows) -> Tensor:
    """The largest P_ii but that of the first token, which is 1: it attends to itself alone."""
    largest = torch.zeros(rows.heads, dtype=torch.float64, device=rows.index.device)
    for index in rows.parts():
        later = index[index > 0]
        if len(later):
            own = rows.block(later).gather(2, later.expand(rows.heads, -1)[..., None])
            largest = torch.maximum(largest, own.double().amax(dim=(1, 2)))
    return largest


def _feature_chain(rows: LLNRows) -> Tensor:
    """B^T A (G, D, D), a stochastic matrix: from feature to token to feature."""
    chain = torch.zeros((), dtype=torch.float64, device=rows.a.device)
    for part in chunks(rows.num_rows):
        A, B = rows.features(part)
        chain = chain + (B.mT @ A).double()
    return chain


def _dense(matrix: Tensor) -> Tensor:
    """|lambda_2| of explicit matrices (G, N, N)."""
    triangular = _triangular(matrix)
    second = _second_of(matrix)
    if not bool(triangular.all()):
        second[~triangular] = _second_eigenvalue(matrix[~triangular])
    return second


def _of_long_head(rows: Rows) -> Tensor:
    if isinstance(rows, MatrixRows) and bool(_triangular(rows.matrix)):
        return _second_of(rows.matrix)[0]
    return _by_iteration(rows)


def _triangular(matrix: Tensor) -> Tensor:
    """Whether each matrix is: its eigenvalues are read then, because rounding could move computed ones far."""
    return ~(matrix.tril(-1).any(dim=-1).any(dim=-1) & matrix.triu(1).any(dim=-1).any(dim=-1))


def _second_of(matrix: Tensor) -> Tensor:
    """The second largest entry on the diagonal."""
    ordered: Tensor = matrix.diagonal(dim1=-2, dim2=-1).double().sort(dim=-1).values
    return ordered[..., -2]


def _second_eigenvalue(matrix: Tensor) -> Tensor:
    """The largest |lambda| of stochastic matrices (G, D, D) but for the one eigenvalue nearest to 1; 0 if D is 1."""
    with _one_thread():
        try:
            values: Tensor = torch.linalg.eigvals(matrix)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            import numpy as np  # another LAPACK, which may get through

            values = torch.from_numpy(np.linalg.eigvals(matrix.cpu().numpy())).to(matrix.device)
    first = (values - 1).abs().argmin(dim=-1, keepdim=True)
    return values.abs().scatter(-1, first, 0.0).amax(dim=-1)


def _second_of_pointers(target: Tensor) -> float:
    """|lambda_2| of a matrix whose row i has all its weight in column target[i] (N,): eigenvalues are 0, and the roots
    of unity of each cycle. So it is 0 if all rows lead to one fixed point, else 1.
    """
    reached = target
    for _ in range(len(target).bit_length()):  # at least N steps, by doubling: all are on cycles then
        reached = reached[reached]
    return 0.0 if bool((reached == reached[0]).all()) else 1.0


def _by_iteration(rows: Rows) -> Tensor:
    """|lambda_2| of one head from products of its rows with vectors."""
    import numpy as np
    from scipy.sparse.linalg import (  # type: ignore[import-untyped]
        ArpackError,
        ArpackNoConvergence,
        LinearOperator,
        eigs,
    )

    tokens, parts = rows.num_rows, list(rows.parts())
    first = rows.block(parts[0])[0]
    held = first.double() if len(parts) == 1 else None
    if bool((first.amax(dim=1) == 1).all()):
        target = _pointers(rows)
        if target is not None:
            return torch.tensor(_second_of_pointers(target), dtype=torch.float64)
    if held is not None and bool((held == 0).double().mean() > HARD):
        return _dense(held[None])[0]
    tolerance = 1e-12 if first.dtype == torch.float64 else 1e-7

    def multiply(vector: Vector) -> Vector:
        right = torch.from_numpy(vector.reshape(-1)).to(rows.index.device)
        product = held @ right if held is not None else _product(rows, right)
        return (product - product.mean()).cpu().numpy()

    random = np.random.default_rng(0)
    start = multiply(random.standard_normal(tokens))
    if np.linalg.norm(start) <= 1e-13 * tokens**0.5:
        return torch.zeros((), dtype=torch.float64)  # all rows are the same; ARPACK refuses a zero matrix
    operator = LinearOperator((tokens, tokens), matvec=multiply, dtype=np.float64)
    for vector in (start, random.standard_normal(tokens)):
        try:
            values = eigs(
                operator, k=2, ncv=KRYLOV, v0=vector, tol=tolerance, maxiter=RESTARTS, return_eigenvectors=False, rng=0
            )
            return torch.tensor(float(np.abs(values).max()), dtype=torch.float64)
        except ArpackNoConvergence:
            break  # many eigenvalues of nearly the same size, as a permutation has them
        except ArpackError:
            continue  # a vector that the matrix takes to zero, perhaps
    if tokens <= DENSE_AT_MOST:
        return _dense(torch.cat([rows.block(index) for index in parts], dim=1).double())[0]
    return torch.tensor(_growth(multiply, start), dtype=torch.float64)


def _pointers(rows: Rows) -> Tensor | None:
    """The key of each row of one head, if every row has all its weight on one."""
    targets = []
    for index in rows.parts():
        weight, target = rows.block(index)[0].max(dim=1)
        if not bool((weight == 1).all()):
            return None
        targets.append(target)
    return torch.cat(targets)


def _product(rows: Rows, right: Tensor) -> Tensor:
    """P times a vector, for one head.

    Rows are the same each time, so that in float64 this is a linear map to the last bit, as ARPACK expects. The result
    is allocated first: small pieces allocated between large ones would keep each chunk's memory from being reused.
    """
    product = torch.empty(rows.num_rows, dtype=torch.float64, device=right.device)
    for index in rows.parts():
        product[index] = rows.block(index)[0].double() @ right
    return product


def _growth(multiply: Callable[[Vector], Vector], vector: Vector, *, settle: int = 64, steps: int = 64) -> float:
    """The mean factor by which a vector grows: |lambda_2| to about 1 %, also when many eigenvalues are that large."""
    logarithm, length = 0.0, math.sqrt(float(vector @ vector))
    for step in range(settle + steps):
        vector = multiply(vector / length)
        length = math.sqrt(float(vector @ vector))
        if length == 0.0:
            return 0.0
        logarithm += math.log(length) if step >= settle else 0.0
    return math.exp(logarithm / steps)


def _has_scipy() -> bool:
    return importlib.util.find_spec("scipy") is not None


@contextmanager
def _one_thread() -> Iterator[None]:
    """LAPACK's eigenvalues gain nothing from a second thread, and lose a factor of ten when another program has it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
