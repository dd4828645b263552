"""How fast attention, seen as a Markov chain on tokens, forgets where it started: 1 - |lambda_2| (section 3.2.2).

Which way lambda_2 is found depends on what is known about the matrix:

    causal            a triangular matrix has its eigenvalues on the diagonal
    LLN               the eigenvalues of P = A B^T are those of the D x D chain B^T A on features: O(N D²)
    blocks            every block is a chain of its own, so with two of them lambda_2 = 1
    up to 128 tokens  all eigenvalues of the explicit matrix
    more              ARPACK, which only multiplies the matrix with vectors, chunk of rows by chunk

In the last two the pair (1, uniform vector) is deflated: C P with C = I - 1 1^T / N has the other eigenvalues of P and
0 in place of the 1, so that lambda_2 is its largest. No conditioning is lost, because C is an orthogonal projection.
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
from lln.moments import chunks

if TYPE_CHECKING:
    import numpy as np

Vector: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.float64]]"

# Up to here all eigenvalues of the explicit matrix take less time than an iteration (10 ms), and up to the second limit
# they are affordable (half a minute) where the iteration is not to be had.
DENSE_TOKENS, DENSE_AT_MOST = 128, 2048
# Krylov vectors and restarts: 100 to 200 products for Gaussian inputs, whatever their number.
KRYLOV, RESTARTS = 48, 40


def spectral_gap(attention: Tensor, key: Tensor | None = None, **options: Unpack[Options]) -> Tensor:
    """1 - |lambda_2|, from 0 (identity, permutations, separate blocks) to 1 (all rows are the same).

    Needs as many queries as keys. A single token has no second eigenvalue; its gap is given as 1. From query and key
    LLN takes O(N D²) at any length, causal attention one pass over its rows, other kinds beyond 2048 tokens need scipy
    (`pip install "lln-attention[instruments]"`), which also makes them faster from 128 on.
    Input and result as in `entropy`.
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
        second = _largest(_centre(_feature_chain(rows)))
    elif isinstance(rows, SoftmaxRows) and rows.block_size is not None and rows.num_rows > rows.block_size:
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
    """The largest P_ii but that of the first token, which is 1: it sees itself alone."""
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
    return torch.where(_triangular(matrix), _second_of(matrix), _largest(_centre(matrix)))


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


def _centre(matrix: Tensor) -> Tensor:
    """C P: from each column its mean."""
    return matrix - matrix.mean(dim=-2, keepdim=True)


def _largest(matrix: Tensor) -> Tensor:
    with _one_thread():
        values: Tensor = torch.linalg.eigvals(matrix)
    return values.abs().amax(dim=-1)


def _by_iteration(rows: Rows) -> Tensor:
    """|lambda_2| of one head from products of its rows with vectors."""
    import numpy as np
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigs  # type: ignore[import-untyped]

    tokens, parts = rows.num_rows, list(rows.parts())
    first = rows.block(parts[0])[0]
    held = first.double() if len(parts) == 1 else None
    tolerance = 1e-12 if first.dtype == torch.float64 else 1e-7

    def multiply(vector: Vector) -> Vector:
        right = torch.from_numpy(vector.reshape(-1)).to(rows.index.device)
        product = held @ right if held is not None else _product(rows, right)
        return (product - product.mean()).cpu().numpy()

    start = multiply(np.random.default_rng(0).standard_normal(tokens))
    if np.linalg.norm(start) <= 1e-13 * tokens**0.5:
        return torch.zeros((), dtype=torch.float64)  # all rows are the same; ARPACK refuses a zero matrix
    operator = LinearOperator((tokens, tokens), matvec=multiply, dtype=np.float64)
    try:
        values = eigs(
            operator, k=2, ncv=KRYLOV, v0=start, tol=tolerance, maxiter=RESTARTS, return_eigenvectors=False, rng=0
        )
        largest = float(np.abs(values).max())
    except ArpackNoConvergence:
        # Many eigenvalues of nearly the same size, as a permutation has them.
        if tokens <= DENSE_AT_MOST:
            return _dense(torch.cat([rows.block(index) for index in parts], dim=1).double())[0]
        largest = _growth(multiply, start)
    return torch.tensor(largest, dtype=torch.float64)


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
