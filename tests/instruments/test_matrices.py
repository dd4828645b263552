"""Instruments on explicit matrices, against numpy, scipy and closed forms."""

import math

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

from lln.instruments import bias, concentration, entropy, lognormality, spectral_gap, temperature, variance

SIZES = [1, 2, 63, 64, 65, 150]


def softmax_matrix(n: int, m: int, *, spread: float = 1.5, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scores = spread * torch.randn(2, 3, n, m, generator=generator, dtype=torch.float64)
    return torch.softmax(scores, dim=-1)


def assert_close(actual: Tensor, expected: float | np.ndarray | Tensor) -> None:
    torch.testing.assert_close(
        actual, torch.as_tensor(expected, dtype=actual.dtype).expand_as(actual), rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize("n", SIZES)
def test_uniform(n: int) -> None:
    matrix = torch.full((2, n, n), 1 / n, dtype=torch.float64)
    assert_close(entropy(matrix), math.log2(n))
    assert_close(variance(matrix), 0.0)
    assert_close(bias(matrix), 0.0)
    assert_close(spectral_gap(matrix), 1.0)
    assert torch.isinf(temperature(matrix)).all()
    logs = lognormality(matrix)
    assert_close(logs.mean, -math.log(n))
    assert_close(logs.variance, 0.0)
    for undefined in (logs.skewness, logs.excess_kurtosis, logs.ks_distance):
        assert undefined.isnan().all()


@pytest.mark.parametrize("n", [2, 64, 150])
@pytest.mark.parametrize("name", ["identity", "cycle"])
def test_permutations(n: int, name: str) -> None:
    matrix = torch.eye(n, dtype=torch.float64)
    if name == "cycle":
        matrix = matrix.roll(1, dims=0)
    assert_close(entropy(matrix), 0.0)
    assert_close(variance(matrix), 1 / n - 1 / n**2)
    assert_close(bias(matrix), 0.0)
    assert_close(spectral_gap(matrix), 0.0)
    parts = concentration(matrix)
    assert_close(parts.unbiased, math.log2(n))
    assert_close(parts.bias_share, 0.0)
    assert_close(lognormality(matrix).zeros, 1 - 1 / n)


@pytest.mark.parametrize("n", [2, 65, 150])
def test_rank_one(n: int) -> None:
    row = softmax_matrix(1, n)[0, 0, 0]
    matrix = row.expand(n, n)
    assert_close(entropy(matrix), scipy.stats.entropy(row.numpy(), base=2))
    assert_close(variance(matrix), row.numpy().var())
    assert_close(spectral_gap(matrix), 1.0)
    assert_close(bias(matrix), math.log2(n) - scipy.stats.entropy(row.numpy(), base=2))
    assert_close(concentration(matrix).bias_share, 1.0)


def test_one_column_for_all() -> None:
    matrix = torch.zeros(8, 8, dtype=torch.float64)
    matrix[:, 3] = 1.0
    assert_close(bias(matrix), 3.0)
    assert_close(entropy(matrix), 0.0)
    assert_close(spectral_gap(matrix), 1.0)


def test_two_states() -> None:
    """[[1-a, a], [b, 1-b]] has lambda_2 = 1 - a - b."""
    for a, b in [(0.1, 0.3), (0.9, 0.8), (0.5, 0.5)]:
        matrix = torch.tensor([[1 - a, a], [b, 1 - b]], dtype=torch.float64)
        assert_close(spectral_gap(matrix), 1 - abs(1 - a - b))


@pytest.mark.parametrize("n", [2, 63, 64, 65, 129])
def test_gap_is_numpys(n: int) -> None:
    matrix = softmax_matrix(n, n)[:1, :2]
    values = np.linalg.eigvals(matrix.numpy())
    assert_close(spectral_gap(matrix), 1 - np.sort(np.abs(values), axis=-1)[..., -2])


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
def test_gap_by_iteration_is_numpys(spread: float) -> None:
    matrix = softmax_matrix(200, 200, spread=spread)[0, 0]
    values = np.abs(np.linalg.eigvals(matrix.numpy()))
    assert_close(spectral_gap(matrix), 1 - np.sort(values)[-2])


def test_gap_of_large_special_matrices() -> None:
    n = 300
    eye = torch.eye(n, dtype=torch.float64)
    uniform = torch.full((n, n), 1 / n, dtype=torch.float64)
    assert_close(
        spectral_gap(torch.stack([eye, eye.roll(1, 0), uniform, (eye + uniform) / 2])), torch.tensor([0, 0, 1, 0.5])
    )


def test_gap_of_triangular_matrices_is_on_the_diagonal() -> None:
    for n in (20, 200):
        lower = softmax_matrix(n, n, spread=3.0).tril()
        lower = lower / lower.sum(dim=-1, keepdim=True)
        expected = 1 - lower.diagonal(dim1=-2, dim2=-1)[..., 1:].amax(dim=-1)
        assert_close(spectral_gap(lower), expected)
        assert_close(spectral_gap(lower, is_causal=True), expected)
        assert_close(spectral_gap(lower.flip(-1, -2)), expected)


@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (64, 65), (70, 30)], ids=str)
def test_entropy_and_variance_are_scipys(shape: tuple[int, int]) -> None:
    matrix = softmax_matrix(*shape)
    assert_close(entropy(matrix), scipy.stats.entropy(matrix.numpy(), base=2, axis=-1).mean(axis=-1))
    assert_close(variance(matrix), matrix.numpy().var(axis=-1).mean(axis=-1))
    mean = matrix.numpy().mean(axis=-2)
    uniform = np.full_like(mean, 1 / shape[1])
    assert_close(bias(matrix), scipy.stats.entropy(mean, uniform, base=2, axis=-1))


def test_the_parts_of_the_entropy_add_up() -> None:
    matrix = softmax_matrix(40, 60, spread=2.0)
    parts = concentration(matrix)
    assert_close(parts.limit, math.log2(60))
    assert_close(parts.entropy + parts.biased + parts.unbiased, math.log2(60))
    mean = matrix.mean(dim=-2, keepdim=True)
    information = (matrix * (matrix / mean).log2()).sum(dim=-1).mean(dim=-1)  # of query and key, by its definition
    assert_close(parts.unbiased, information)


def test_lognormality_is_scipys() -> None:
    matrix = softmax_matrix(30, 50)
    logs = lognormality(matrix)
    flat = matrix.log().flatten(2).numpy()
    assert_close(logs.mean, flat.mean(axis=-1))
    assert_close(logs.variance, flat.var(axis=-1))
    assert_close(logs.skewness, scipy.stats.skew(flat, axis=-1))
    assert_close(logs.excess_kurtosis, scipy.stats.kurtosis(flat, axis=-1))
    assert_close(logs.zeros, 0.0)
    assert_close(temperature(matrix), flat.std(axis=-1) ** -1)
    for b in range(2):
        for h in range(3):
            x = flat[b, h]
            expected = scipy.stats.kstest(x, scipy.stats.norm(x.mean(), x.std()).cdf).statistic
            assert_close(logs.ks_distance[b, h], expected)


def test_lognormality_distinguishes_lognormal_from_other() -> None:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(400, 400, generator=generator, dtype=torch.float64).softmax(dim=-1)
    flat = torch.rand(400, 400, generator=generator, dtype=torch.float64)
    flat = flat / flat.sum(dim=-1, keepdim=True)
    assert lognormality(normal).ks_distance < 0.01
    assert lognormality(flat).ks_distance > 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision(dtype: torch.dtype) -> None:
    matrix = softmax_matrix(20, 20)
    rounded = matrix.to(dtype)
    tolerance = 20 * torch.finfo(dtype).eps
    for instrument in (entropy, variance, bias, spectral_gap):
        result = instrument(rounded)
        assert result.dtype == torch.float32
        torch.testing.assert_close(result.double(), instrument(matrix), rtol=tolerance, atol=tolerance)


def test_leading_dimensions() -> None:
    matrix = softmax_matrix(6, 6)
    for instrument in (entropy, variance, bias, spectral_gap, temperature):
        result = instrument(matrix)
        assert result.shape == (2, 3)
        assert instrument(matrix[0, 0]).shape == ()
        assert_close(instrument(matrix[0, 0]), result[0, 0])
        assert_close(instrument(matrix[None, None]), result[None, None])
    assert lognormality(matrix).mean.shape == (2, 3)


def test_masks_on_a_matrix() -> None:
    """Padding is left out: the result is that of the small matrix."""
    small = softmax_matrix(5, 5)
    matrix = torch.zeros(2, 3, 8, 8, dtype=torch.float64)
    matrix[:, :, 1:6, 1:6] = small
    keep = torch.zeros(2, 8, dtype=torch.bool)
    keep[:, 1:6] = True
    for instrument in (entropy, variance, bias, spectral_gap, temperature):
        assert_close(instrument(matrix, key_padding_mask=keep), instrument(small))
    keep[1] = False
    result = entropy(matrix, key_padding_mask=keep)
    assert_close(result[0], entropy(small)[0])
    assert result[1].isnan().all()


def test_causal_variance_and_bias_compare_with_uniform_over_the_past() -> None:
    n = 12
    uniform = torch.ones(n, n, dtype=torch.float64).tril()
    uniform = uniform / uniform.sum(dim=-1, keepdim=True)
    assert_close(variance(uniform, is_causal=True), 0.0)
    assert_close(bias(uniform, is_causal=True), 0.0)
    parts = concentration(torch.eye(n, dtype=torch.float64), is_causal=True)
    assert_close(parts.limit, float(np.log2(np.arange(1, n + 1)).mean()))
    first = torch.zeros(n, n, dtype=torch.float64)
    first[:, 0] = 1.0
    assert bias(first, is_causal=True) > 1.0 > parts.biased


class TestRefusals:
    def test_not_stochastic(self) -> None:
        with pytest.raises(ValueError, match="must sum to 1, one sums to 3"):
            entropy(torch.ones(3, 3))

    def test_negative(self) -> None:
        with pytest.raises(ValueError, match=r"negative entry, -0\.5"):
            entropy(torch.tensor([[1.5, -0.5], [0.5, 0.5]]))

    def test_nan(self) -> None:
        with pytest.raises(ValueError, match="NaN or infinite"):
            spectral_gap(torch.tensor([[math.nan, 1.0], [0.5, 0.5]]))

    def test_one_token_is_documented(self) -> None:
        one = torch.ones(1, 1)
        assert (entropy(one), variance(one), bias(one), spectral_gap(one)) == (0.0, 0.0, 0.0, 1.0)

    def test_shape(self) -> None:
        with pytest.raises(ValueError, match=r"\(\.\.\., N, M\).*\(3,\)"):
            entropy(torch.ones(3) / 3)
        with pytest.raises(ValueError, match="at least one row"):
            entropy(torch.ones(2, 0, 3))
        with pytest.raises(ValueError, match="5 rows and 7 columns"):
            spectral_gap(softmax_matrix(5, 7))

    def test_type(self) -> None:
        with pytest.raises(TypeError, match=r"torch\.as_tensor"):
            entropy(np.eye(3))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="int64"):
            entropy(torch.eye(3).long())

    def test_options_of_query_and_key(self) -> None:
        with pytest.raises(ValueError, match="kind is for"):
            entropy(torch.eye(3), kind="softmax")
        with pytest.raises(TypeError, match="unknown option knid"):
            entropy(torch.eye(3), knid="softmax")  # type: ignore[call-arg]

    def test_masks(self) -> None:
        with pytest.raises(ValueError, match="above its diagonal"):
            entropy(softmax_matrix(4, 4), is_causal=True)
        with pytest.raises(ValueError, match="as many rows as columns"):
            entropy(softmax_matrix(4, 5), is_causal=True)
        with pytest.raises(ValueError, match=r"\(B, H, N, M\)"):
            entropy(torch.eye(4), key_padding_mask=torch.ones(1, 4, dtype=torch.bool))


def one_hot_rows(target: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(target, len(target)).double()


def chain_to_a_fixed_point(n: int) -> Tensor:
    """Each token attends to the one before it in a random order, the first to itself."""
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    target = torch.empty(n, dtype=torch.long)
    target[order] = order[torch.arange(n).sub(1).clamp(min=0)]
    return one_hot_rows(target)


@pytest.mark.parametrize("n", [63, 64, 300])
def test_gap_of_equal_rows_and_of_blocks(n: int) -> None:
    """Centred, these matrices are rounding noise, on which LAPACK and ARPACK may fail."""
    row = torch.softmax(torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64), dim=0)
    assert_close(spectral_gap(row.expand(n, n).contiguous()), 1.0)
    blocks = [torch.full((size, size), 1 / size, dtype=torch.float64) for size in (n // 2, n - n // 2)]
    assert_close(spectral_gap(torch.block_diag(*blocks)), 0.0)


@pytest.mark.parametrize("n", [5, 64, 300, 1200])
def test_gap_of_hard_attention(n: int) -> None:
    chain = chain_to_a_fixed_point(n)
    assert_close(spectral_gap(chain), 1.0)
    two = one_hot_rows(torch.randint(2, (n,), generator=torch.Generator().manual_seed(0)))
    two[:2, :2] = torch.eye(2)
    two[:2, 2:] = 0.0
    assert_close(spectral_gap(two), 0.0)
    if n <= 300:  # not all rows are one-hot: the last token of the chain attends to two
        last = int(chain.sum(dim=0).argmin())
        chain[last] = 0.0
        chain[last, (last + 1) % n], chain[last, (last + 2) % n] = 0.5, 0.5
        assert_close(spectral_gap(chain), 1.0)


def test_gap_where_a_solver_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    import scipy.sparse.linalg

    small, large = softmax_matrix(20, 20), softmax_matrix(150, 150)[0, 0]
    expected = spectral_gap(small), spectral_gap(large)
    calls = []

    def refuse(*args: object, v0: np.ndarray, **rest: object) -> None:
        calls.append(v0)
        raise scipy.sparse.linalg.ArpackError(-9)

    def fail(matrix: Tensor) -> Tensor:
        raise torch.linalg.LinAlgError("no convergence")

    monkeypatch.setattr(scipy.sparse.linalg, "eigs", refuse)
    monkeypatch.setattr(torch.linalg, "eigvals", fail)
    assert_close(spectral_gap(small), expected[0])
    torch.testing.assert_close(spectral_gap(large), expected[1], rtol=1e-7, atol=1e-7)
    assert len(calls) == 2
    assert not np.array_equal(calls[0], calls[1])


def test_gap_of_a_triangular_matrix_takes_no_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(matrix: Tensor) -> Tensor:
        raise AssertionError

    monkeypatch.setattr(torch.linalg, "eigvals", fail)
    matrix = softmax_matrix(20, 20)[0, 0].tril()
    matrix = matrix / matrix.sum(dim=1, keepdim=True)
    assert_close(spectral_gap(matrix), 1 - matrix.diagonal()[1:].max())
