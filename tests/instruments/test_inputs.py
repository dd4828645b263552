"""Instruments on query and key: the same as on the explicit matrix of `lln.reference`, without ever holding one."""

import importlib
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import lln
from lln.instruments import (
    bias,
    branches,
    concentration,
    entropy,
    lognormality,
    reading,
    rows,
    spectral_gap,
    temperature,
    variance,
)
from lln.instruments.rows import SoftmaxRows

KINDS = ("softmax", "lln", "block_diagonal", "lln_diag")
INSTRUMENTS = (entropy, variance, bias, spectral_gap)


def paddings(batch: int, tokens: int) -> dict[str, Tensor | None]:
    keep = torch.ones(batch, tokens, dtype=torch.bool)
    left, holes = keep.clone(), keep.clone()
    left[0, : tokens // 3] = False
    holes[-1, ::4] = False
    return {"none": None, "left": left, "holes": holes}


def block_size(kind: str) -> dict[str, Any]:
    return {"block_size": 7} if "diag" in kind else {}


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("padding", ["none", "left", "holes"])
@pytest.mark.parametrize("kind", KINDS)
def test_same_as_of_the_explicit_matrix(tokens, kind: str, padding: str, is_causal: bool) -> None:
    query, key, _ = tokens(H=4, Hk=2, N=33, D=8)
    masks: dict[str, Any] = {"key_padding_mask": paddings(2, 33)[padding], "is_causal": is_causal}
    matrix = lln.reference.attention_matrix(query, key, kind=kind, **masks, **block_size(kind))
    for instrument in INSTRUMENTS:
        expected = instrument(matrix, **masks)
        result = instrument(query, key, kind=kind, **masks, **block_size(kind))
        torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-10)
    expected, result = lognormality(matrix, **masks), lognormality(query, key, kind=kind, **masks, **block_size(kind))
    for name in ("mean", "variance", "skewness", "excess_kurtosis", "ks_distance", "zeros"):
        torch.testing.assert_close(getattr(result, name), getattr(expected, name), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 200])
@pytest.mark.parametrize("kind", KINDS)
def test_awkward_sizes(tokens, kind: str, n: int) -> None:
    query, key, _ = tokens(B=1, H=3, N=n, D=5)
    matrix = lln.reference.attention_matrix(query, key, kind=kind)
    for instrument in INSTRUMENTS:
        result = instrument(query, key, kind=kind)
        torch.testing.assert_close(result, instrument(matrix), rtol=1e-10, atol=1e-10)


def test_cross_attention_and_padding(tokens) -> None:
    query, key, _ = tokens(N=20, M=30)
    keep = torch.arange(30) < torch.tensor([[30], [11]])
    for kind in ("softmax", "lln"):
        matrix = lln.reference.attention_matrix(query, key, kind=kind, key_padding_mask=keep)
        for instrument in (entropy, variance, bias):
            torch.testing.assert_close(
                instrument(query, key, kind=kind, key_padding_mask=keep),
                instrument(matrix, key_padding_mask=keep),
                rtol=1e-10,
                atol=1e-10,
            )


@pytest.mark.parametrize("kind", KINDS)
def test_padding_never_matters(tokens, kind: str) -> None:
    """Not what stands in it, not even NaN, and not the rest of the batch."""
    query, key, _ = tokens(N=40)
    keep = torch.arange(40) < torch.tensor([[40], [25]])
    query[1, :, 25:], key[1, :, 25:] = math.nan, math.inf
    short = query[1:, :, :25], key[1:, :, :25]
    for instrument in (*INSTRUMENTS, temperature):
        result = instrument(query, key, kind=kind, key_padding_mask=keep)
        torch.testing.assert_close(result[1:], instrument(*short, kind=kind), rtol=1e-10, atol=1e-10)


def test_empty_sample_is_nan(tokens) -> None:
    query, key, _ = tokens(N=10)
    keep = torch.tensor([[True], [False]]).expand(2, 10)
    for kind in KINDS:
        for instrument in INSTRUMENTS:
            result = instrument(query, key, kind=kind, key_padding_mask=keep)
            assert result[0].isfinite().all()
            assert result[1].isnan().all()


def test_temperature_of_softmax_is_that_of_the_scores(tokens) -> None:
    query, key, _ = tokens(B=1, H=2, N=30, D=8)
    scores = (query @ key.mT / math.sqrt(8)).numpy()
    expected = 1 / scores.reshape(2, -1).std(axis=-1)
    np.testing.assert_allclose(temperature(query, key, kind="softmax")[0], expected, rtol=1e-10)
    past = np.tril_indices(30)
    expected = 1 / scores[0][:, past[0], past[1]].std(axis=-1)
    np.testing.assert_allclose(temperature(query, key, kind="softmax", is_causal=True)[0], expected, rtol=1e-10)
    near = scores.reshape(1, 2, 3, 10, 3, 10)[:, :, range(3), :, range(3)].swapaxes(0, 2).reshape(2, -1)
    result = temperature(query, key, kind="block_diagonal", block_size=10)[0]
    np.testing.assert_allclose(result, 1 / near.std(axis=-1), rtol=1e-10)


def test_temperature_of_lln_is_eq_11(tokens) -> None:
    query, key, _ = tokens(B=1, H=2, N=30, D=64)
    a, b = 0.14855178144710912, -0.35487039130661086  # the paper's
    spread = (2.0 * query).var(dim=(2, 3), correction=0) + (3.0 * key).var(dim=(2, 3), correction=0)
    expected = 1 / (a * spread + b).sqrt()
    for kind in ("lln", "lln_diag"):
        torch.testing.assert_close(temperature(query, key, kind=kind, alpha=2.0, beta=3.0), expected)
    one_each = torch.full((1, 2, 30), 2.0, dtype=torch.float64)
    torch.testing.assert_close(temperature(query, key, alpha=one_each, beta=3.0, is_causal=True), expected)


@pytest.mark.parametrize("kind", ["softmax", "lln"])
def test_entropy_and_gap_rise_with_temperature(kind: str) -> None:
    """Theorem 3.2, and what section 3.2.2 concludes for unbiased attention: independent Gaussian inputs."""
    query, key = torch.randn(2, 1, 2, 128, 64, dtype=torch.float64).unbind()
    scales = [2.5, 1.8, 1.2, 0.8, 0.4]
    measured = [
        [f(scale * query, key, kind=kind).mean().item() for f in (temperature, entropy, spectral_gap, variance)]
        for scale in scales
    ]
    taus, entropies, gaps, variances = np.array(measured).T
    assert (np.diff(taus) > 0).all()
    assert (np.diff(entropies) > 0).all()
    assert (np.diff(gaps) > 0).all()
    assert (np.diff(variances) < 0).all()


def test_matched_entropy_curve() -> None:
    """What each matching gives, as LLN's mean entropy minus softmax's, in bits: N 1024, D 64, Gaussian, 6 draws."""
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 6, 1024, 64, generator=generator).unbind()
    differences: dict[str, list[float]] = {"entropy": [], "variance": [], "linear": []}
    for score_variance in (0.25, 1.0, 2.0):
        scale = score_variance**0.25
        softmax = entropy(scale * query, scale * key, kind="softmax").mean()
        for matching, curve in differences.items():
            curve.append((entropy(scale * query, scale * key, matching=matching).mean() - softmax).item())
    assert all(abs(difference) < 0.15 for difference in differences["entropy"])
    # Matching the variance of ln P leaves LLN more concentrated, because its sum over features has a heavier tail.
    for matching in ("variance", "linear"):
        small, one, two = differences[matching]
        assert -0.2 < small < 0
        assert -0.9 < one < -0.4
        assert -1.8 < two < -1.3


class LargestTensor(TorchDispatchMode):
    """The number of entries of the largest tensor that any operation returns."""

    entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            # A view holds nothing of its own.
            if isinstance(x, Tensor) and 0 not in x.stride():
                self.entries = max(self.entries, x.numel())
        return result


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_n_by_n_matrix_is_held(kind: str, is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    n, head_dim, chunk = 300, 8, 2**15
    for module in (rows, reading):
        monkeypatch.setattr(module, "CHUNK_ENTRIES", chunk)
    query, key = torch.randn(2, 1, 1, n, head_dim).unbind()
    expected = [f(query, key, kind=kind, is_causal=is_causal) for f in (*INSTRUMENTS, temperature)]
    with LargestTensor() as largest:
        results = [f(query, key, kind=kind, is_causal=is_causal) for f in (*INSTRUMENTS, temperature)]
    assert largest.entries <= 2 * chunk < n * n
    for result, value in zip(results, expected, strict=True):
        torch.testing.assert_close(result, value)


def test_products_leave_no_memory_behind() -> None:
    """Small results between large chunks once pinned every chunk: as much memory as the matrix, without holding it."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("needs /proc")
    product = importlib.import_module("lln.instruments.spectral_gap")._product
    query, key = torch.randn(2, 1, 8192, 4).unbind()
    piece = SoftmaxRows(query, key, is_causal=False)
    right = torch.ones(8192, dtype=torch.float64)
    torch.zeros(30 * 2**17, dtype=torch.float64)  # 30 MB, freed at once: from now on glibc takes chunks from its heap
    before = int(statm.read_text().split()[1]) * 4096
    for _ in range(2):
        torch.testing.assert_close(product(piece, right), right, rtol=1e-5, atol=1e-5)
    assert int(statm.read_text().split()[1]) * 4096 - before < 200e6  # the matrix would be 537 MB


def test_lln_gap_of_many_tokens() -> None:
    query, key = torch.randn(2, 1, 1, 100_000, 16).unbind()
    start = time.perf_counter()
    with LargestTensor() as largest:
        gap = spectral_gap(query, key, kind="lln")
    assert largest.entries == query.numel()
    assert 0.5 < gap.item() < 1.0
    assert time.perf_counter() - start < 20  # an N x N matrix would take 40 GB


@pytest.mark.parametrize("kind", ["softmax", "lln_diag"])
def test_distance_from_a_histogram(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("lln.instruments.lognormality")
    query, key = torch.randn(2, 1, 2, 150, 8).unbind()
    exact = lognormality(query, key, kind=kind, block_size=50).ks_distance
    monkeypatch.setattr(module, "EXACT_ENTRIES", 0)
    coarse = lognormality(query, key, kind=kind, block_size=50).ks_distance
    assert (coarse <= exact + 1e-5).all()
    assert (coarse >= exact - 0.0004 - 1e-5).all()


def test_rows_may_be_sampled() -> None:
    query, key = torch.randn(2, 2, 50, 8).unbind()
    sampled = SoftmaxRows(query, key, is_causal=True)
    sampled.index = torch.tensor([3, 17, 40])
    matrix = lln.attention_matrix(query[None], key[None], kind="softmax", is_causal=True)[0]
    expected = scipy.stats.entropy(matrix[:, sampled.index].numpy(), base=2, axis=-1).mean(axis=-1)
    from lln.instruments.entropy import row_entropy

    np.testing.assert_allclose(row_entropy(sampled), expected, rtol=1e-5)


def test_bias_distinguishes_biased_from_unbiased() -> None:
    """The same entropy twice: every query has its own key, or all have the same one (section 3.2.2)."""
    features = 6.0 * torch.eye(16)[None, None]
    own = features, features
    same = torch.ones(1, 1, 16, 16), features[:, :, :1].expand(1, 1, 16, 16) * (torch.arange(16) == 0)[:, None]
    own_parts = concentration(*own, kind="softmax")
    same_parts = concentration(4 * same[0], 1.5 * same[1], kind="softmax")
    torch.testing.assert_close(own_parts.entropy, same_parts.entropy, rtol=0.02, atol=0.0)
    assert own_parts.bias_share < 1e-5
    assert same_parts.bias_share > 1 - 1e-5
    assert spectral_gap(*own, kind="softmax") < 0.1 < 0.99 < spectral_gap(4 * same[0], 1.5 * same[1], kind="softmax")


def test_branches(tokens) -> None:
    query, key, value = tokens(N=40, D=8)
    keep = paddings(2, 40)["left"]
    shares = branches(query, key, value, block_size=10, key_padding_mask=keep)
    torch.testing.assert_close(shares.far + shares.near, torch.ones(2, 4, dtype=torch.float64))
    far = lln.reference.lln_attention(query, key, value, key_padding_mask=keep)[1]
    near = lln.reference.block_diagonal_attention(query, key, value, block_size=10, key_padding_mask=keep)[1]
    lengths = far.flatten(1).norm(dim=1), near.flatten(1).norm(dim=1)
    torch.testing.assert_close(shares.far[1], lengths[0] / (lengths[0] + lengths[1]))
    # One block that holds all, and keys without any difference: both branches give the mean value.
    equal = branches(query, torch.ones_like(key), value, block_size=40)
    for share in (equal.far, equal.near):
        torch.testing.assert_close(share, torch.full_like(share, 0.5))
    torch.testing.assert_close(equal.cosine, torch.ones_like(equal.cosine))


def test_gradients_are_not_recorded(tokens) -> None:
    query, key, _ = tokens(N=10, grad=True)
    for instrument in (*INSTRUMENTS, temperature):
        assert not instrument(query, key, kind="lln").requires_grad


class TestRefusals:
    def test_unknown_kind(self, tokens) -> None:
        query, key, _ = tokens()
        for instrument in (*INSTRUMENTS, temperature, lognormality):
            with pytest.raises(ValueError, match=r"kind must be one of 'lln'.*got 'sofmax'"):
                instrument(query, key, kind="sofmax")

    def test_unknown_option(self, tokens) -> None:
        query, key, _ = tokens()
        with pytest.raises(TypeError, match="unknown option mask"):
            entropy(query, key, mask=None)

    def test_not_finite(self, tokens) -> None:
        query, key, _ = tokens()
        key[0, 0, 3, 3] = math.nan
        for kind in KINDS:
            with pytest.raises(ValueError, match="key holds NaN"):
                temperature(query, key, kind=kind)

    def test_alpha_for_softmax(self, tokens) -> None:
        query, key, _ = tokens()
        with pytest.raises(ValueError, match="belong to LLN"):
            entropy(query, key, kind="softmax", alpha=1.0)

    def test_lengths(self, tokens) -> None:
        query, key, _ = tokens(N=4, M=5)
        with pytest.raises(ValueError, match="4 rows and 5 columns"):
            spectral_gap(query, key, kind="lln")
        with pytest.raises(ValueError, match="needs as many queries as keys"):
            entropy(query, key, kind="lln_diag")

    def test_without_scipy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = importlib.import_module("lln.instruments.spectral_gap")
        query, key = torch.randn(2, 1, 1, 200, 4, dtype=torch.float64).unbind()
        expected = spectral_gap(query, key, kind="softmax")
        monkeypatch.setattr(module, "_has_scipy", lambda: False)
        torch.testing.assert_close(spectral_gap(query, key, kind="softmax"), expected)
        monkeypatch.setattr(module, "DENSE_AT_MOST", 100)
        with pytest.raises(ImportError, match="lln-attention\\[instruments\\]"):
            spectral_gap(query, key, kind="softmax")


def test_gap_of_lln_on_one_feature_and_on_equal_keys(tokens) -> None:
    query, key, _ = tokens(N=20, D=1)
    torch.testing.assert_close(spectral_gap(query, key), torch.ones(query.shape[:2], dtype=query.dtype))
    query, key, _ = tokens(N=20, D=8)
    same = spectral_gap(query, torch.zeros_like(key), alpha=1.0, beta=1.0)
    torch.testing.assert_close(same, torch.ones_like(same))


def test_gap_of_lln_on_hard_features() -> None:
    """Feature f of a query matches the key of feature f - 1, so that features form a chain to a fixed point."""
    features = 64
    order = torch.randperm(features, generator=torch.Generator().manual_seed(0))
    query, key = torch.zeros(2, 1, 1, features, features, dtype=torch.float64).unbind()
    for i in range(features):
        key[0, 0, i, order[i]] = 2000.0
        query[0, 0, i, order[max(i - 1, 0)]] = 2000.0
    torch.testing.assert_close(
        spectral_gap(query, key, alpha=1.0, beta=1.0), torch.ones(1, 1, dtype=torch.float64), rtol=0, atol=1e-9
    )


@pytest.mark.parametrize("option", ["matching", "scope"])
@pytest.mark.parametrize("given", [{"kind": "softmax"}, {"kind": "lln", "alpha": 1.0, "beta": 1.0}], ids=str)
def test_choices_are_checked_where_they_are_not_used(tokens, option: str, given: dict[str, Any]) -> None:
    query, key, _ = tokens(N=5, D=4)
    for instrument in (*INSTRUMENTS, temperature):
        with pytest.raises(ValueError, match=option):
            instrument(query, key, **given, **{option: "foo"})
