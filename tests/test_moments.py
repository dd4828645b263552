"""Statistics and matching: exact where a formula is exact, accurate where a curve was measured."""

import json
import math

import pytest
import torch

import lln
from lln import calibration, curves, reference
from lln.moments import lln_temperature, measure_moments, softmax_temperature


def gaussian(variance, head_dim, *, tokens=1024, draws=8, seed=7):
    generator = torch.Generator().manual_seed(seed)
    shape = (draws, 1, tokens, head_dim)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) * variance**0.25 for _ in range(2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("N", [1, 2, 65])
def test_score_variance_is_that_of_all_scores(tokens, N, dtype):
    q, k, _ = tokens(N=N, Hk=2, dtype=dtype)
    q, k = q * 3 + 50, k + torch.linspace(-4, 4, 16, dtype=dtype)  # far off centre: E[x²] - E[x]² would lose digits
    moments = measure_moments(q, k)
    scores = q.double() @ k.double().repeat_interleave(2, 1).mT / math.sqrt(16)
    tolerance = {"rtol": 1e-3 if dtype == torch.float32 else 1e-10, "atol": 1e-9}
    torch.testing.assert_close(moments.score_variance.double(), scores.flatten(2).var(2, correction=0), **tolerance)
    within_rows = scores.var(3, correction=0).mean(2)
    torch.testing.assert_close(moments.row_variance.double(), within_rows, **tolerance)
    torch.testing.assert_close(moments.sigma_q, q.flatten(2).std(2, correction=0))
    torch.testing.assert_close(moments.sigma_k, k.flatten(2).std(2, correction=0).repeat_interleave(2, 1))


@pytest.mark.parametrize("matching", ["linear", "variance", "entropy"])
def test_what_all_keys_have_in_common_does_not_matter(tokens, matching):
    """Softmax's matrix stays the same when all keys are shifted, and so must LLN's."""
    q, k, _ = tokens(N=60)
    matrix = lln.attention_matrix(q, k, matching=matching)
    torch.testing.assert_close(lln.attention_matrix(q, k + 7.0, matching=matching), matrix, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("mean", [0.0, 10.0, 1000.0])
def test_prefix_statistics_in_float32_do_not_cancel(tokens, mean):
    q, k, _ = tokens(N=300, D=32)
    wide = measure_moments(q + mean, k + mean, is_causal=True)
    narrow = measure_moments((q + mean).float(), (k + mean).float(), is_causal=True)
    for name in ("sigma_q", "sigma_k"):
        torch.testing.assert_close(getattr(narrow, name).double(), getattr(wide, name), rtol=1e-3, atol=0)


def test_masked_and_prefix_statistics_are_those_of_the_chosen_tokens(tokens):
    q, k, _ = tokens(N=30)
    keep = torch.rand(2, 30) > 0.4
    keep[:, 0] = True
    for is_causal in (False, True):
        for ours, theirs in zip(
            lln.match_moments(q, k, key_padding_mask=keep, is_causal=is_causal),
            reference.match_moments(q, k, key_padding_mask=keep, is_causal=is_causal),
            strict=True,
        ):
            assert ours.shape == ((2, 4, 30) if is_causal else (2, 4))
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("head_dim", [8, 16, 32, 40, 64, 96, 128, 256])
def test_variance_matching_gives_the_variance_that_was_asked(head_dim):
    for asked in (0.05, 0.5, 2.0, 9.0):
        q, k = gaussian(asked, head_dim)
        got = lln.attention_matrix(q, k, matching="variance").log().flatten(1).var(1).mean().item()
        assert got == pytest.approx(asked, rel=0.08), f"variance {asked}: {got:.3f}"


@pytest.mark.parametrize("head_dim", [8, 16, 32, 40, 64, 96, 128, 256])
def test_entropy_matching_gives_softmaxs_entropy(head_dim):
    for variance in (0.05, 0.5, 2.0):
        q, k = gaussian(variance, head_dim)
        wanted, got = (
            math.log(1024) + torch.special.xlogy(P, P).sum(-1).mean().item()
            for P in (lln.attention_matrix(q, k, kind="softmax"), lln.attention_matrix(q, k, matching="entropy"))
        )
        assert abs(got - wanted) <= max(0.1 * wanted, 0.05), f"variance {variance}: {got:.4f} for {wanted:.4f} nats"


def test_linear_matching_is_a_line_with_the_published_constants():
    a, b = curves.linear_constants(64)
    assert (a, b) == (curves.PUBLISHED_A, curves.PUBLISHED_B)
    variance = torch.tensor([0.0, 1.0, 4.0], dtype=torch.float64)
    spread = curves.matched_spread(variance, torch.ones(3), head_dim=64, matching="linear")
    torch.testing.assert_close(a * spread + b, variance)
    fit = calibration.fit_line(*calibration.LINEAR_RANGE, head_dim=64)
    assert fit == tuple(curves.TABLE["linear"][curves.TABLE["head_dims"].index(64)])
    assert fit[0] == pytest.approx(a, rel=0.03)
    assert fit[1] == pytest.approx(b, rel=0.05)


@pytest.mark.parametrize("matching", ["variance", "entropy"])
def test_curves_increase_and_have_no_steps(matching):
    variance = torch.logspace(-6, 7, 4000, dtype=torch.float64)
    for head_dim in (4, 8, 40, 64, 200, 256, 512):
        for num_keys in (1, 100, 1024, 10**6):
            keys = torch.full_like(variance, num_keys)
            spread = curves.matched_spread(variance, keys, head_dim=head_dim, matching=matching)
            inside = variance < curves.MAX_SCORE_VARIANCE
            assert (spread[inside].diff() > 0).all()
            assert (spread.log().diff() < 0.05).all()
            assert spread.isfinite().all()


def test_curves_between_dims_lie_between():
    one = torch.ones(1, dtype=torch.float64)
    spreads = [curves.matched_spread(one, one, head_dim=d, matching="variance").item() for d in (32, 40, 48)]
    assert spreads[0] < spreads[1] < spreads[2]


def test_the_shipped_table_is_what_calibration_makes():
    """One head dimension, piece by piece; `lln calibrate` does all of them."""
    assert json.loads(curves.TABLE_PATH.read_text())["seed"] == calibration.SEED
    assert calibration.dump(curves.TABLE) == curves.TABLE_PATH.read_text()
    measured = calibration.measure(
        calibration.lln_probabilities, calibration.log_variance, calibration.SPREADS, head_dim=8, num_keys=1024
    )
    assert calibration.log_spread_at(calibration.SCORE_VARIANCES, measured) == curves.TABLE["variance"][0]
    wanted, curve = (
        calibration.measure(matrix, calibration.entropy_deficit, settings, head_dim=8, num_keys=16)
        for matrix, settings in (
            (calibration.softmax_probabilities, calibration.SCORE_VARIANCES),
            (calibration.lln_probabilities, calibration.SPREADS),
        )
    )
    assert calibration.log_spread_at(wanted, curve) == curves.TABLE["entropy"][0][0]


@pytest.mark.parametrize("matching", ["linear", "variance", "entropy"])
def test_edges_are_finite(tokens, matching):
    q, k, _ = tokens(N=1)
    for inputs in ((q, k), (q * 0, k * 0), (q * 0 + 0.1, k), (q, k * 0 + 3.0), (q * 1e200, k * 1e-200)):
        for is_causal in (False, True):
            for scale in lln.match_moments(*inputs, matching=matching, is_causal=is_causal):
                assert scale.isfinite().all()
                assert (scale >= 0).all()


def test_temperatures():
    q, k = gaussian(2.0, 64, draws=2)
    moments = measure_moments(q, k)
    scores = (q @ k.mT / 8).flatten(1)
    torch.testing.assert_close(softmax_temperature(moments.score_variance)[:, 0], 1 / scores.std(1, correction=0))
    alpha, beta = moments.scales(head_dim=64, matching="linear")
    matched = lln_temperature(alpha, beta, moments.sigma_q, moments.sigma_k, head_dim=64)
    torch.testing.assert_close(matched, softmax_temperature(moments.row_variance))
    assert lln_temperature(alpha * 0, beta * 0, moments.sigma_q, moments.sigma_k, head_dim=64).isinf().all()
