"""Statistics and matching: exact where a formula is exact, accurate where a curve was measured."""

import functools
import json
import math

import pytest
import torch

import lln
from lln import reference
from lln.matching import calibration, curves
from lln.matching.moments import lln_temperature, measure_moments, softmax_temperature


def gaussian(variance, head_dim, *, tokens=1024, draws=2, seed=7):
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
def test_variance_matching_gives_the_requested_variance(head_dim):
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


@pytest.mark.parametrize("head_dim", [8, 32, 40, 64, 256])
@pytest.mark.parametrize("form", ["unbiased", "decomposed"])
def test_the_other_forms_are_as_accurate(form, head_dim):
    for asked in (0.05, 0.5, 2.0, 9.0):
        q, k = gaussian(asked, head_dim)
        got = calibration.matched_probabilities(q, k, matching="variance", form=form).log().flatten(1).var(1).mean()
        assert got.item() == pytest.approx(asked, rel=0.08), f"variance {asked}: {got:.3f}"
        if asked == 9.0:
            continue
        softmax = torch.softmax(q @ k.mT / math.sqrt(head_dim), dim=-1)
        matched = calibration.matched_probabilities(q, k, matching="entropy", form=form)
        wanted, got = (math.log(1024) + torch.special.xlogy(P, P).sum(-1).mean().item() for P in (softmax, matched))
        assert abs(got - wanted) <= max(0.1 * wanted, 0.05), f"variance {asked}: {got:.4f} for {wanted:.4f} nats"


@pytest.mark.parametrize("num_keys", [32, 200])
@pytest.mark.parametrize("form", ["unbiased", "decomposed"])
def test_the_other_forms_are_accurate_with_few_keys(form, num_keys):
    """The means of few tokens are not zero, so that part of what the decomposed form matches is exact."""
    for variance in (0.05, 0.5, 2.0):
        q, k = gaussian(variance, 32, tokens=num_keys, draws=64)
        softmax = torch.softmax(q @ k.mT / math.sqrt(32), dim=-1)
        matched = calibration.matched_probabilities(q, k, matching="entropy", form=form)
        wanted, got = (math.log(num_keys) + torch.special.xlogy(P, P).sum(-1).mean().item() for P in (softmax, matched))
        assert got == pytest.approx(wanted, rel=0.1)


def test_entropy_matching_stops_where_the_unbiased_form_cannot_follow():
    """A query of the unbiased form chooses among D features, so that its entropy is at least about ln(N/D)."""
    variance = torch.tensor([0.5, 1.0, 2.0, 8.0, 16.0, 64.0], dtype=torch.float64)
    keys = torch.full_like(variance, 1024)
    spread = curves.matched_spread(variance, keys, head_dim=8, matching="entropy", form="unbiased")
    assert (spread < 100 * variance).all()
    torch.testing.assert_close(spread[-2:] / spread[-3], variance[-2:] / variance[-3], rtol=1e-4, atol=0)
    q, k = gaussian(1.0, 8, draws=1)
    P = calibration.lln_probabilities(q[0, 0], k[0, 0], 1e6, form="unbiased")
    assert calibration.entropy_deficit(P) < math.log(8) + 0.1
    assert calibration.entropy_deficit(calibration.lln_probabilities(q[0, 0], k[0, 0], 1e6)) > 6


def test_the_papers_curves_stay_as_they_are():
    variance = torch.tensor([1e-4, 0.3, 2.0, 100.0], dtype=torch.float64)
    keys = torch.tensor([50, 50, 1000, 10**6])
    expected = {
        "linear": [2.079004846762563, 3.867721226623527, 14.007160525601984, 598.5160142314188],
        "variance": [0.005434852227863362, 4.2657004142184185, 14.171679650596944, 423.349177878596],
        "entropy": [0.0056143537658490525, 3.7072452887994682, 9.4103599369255, 224.97371825885565],
    }
    for matching, values in expected.items():
        spread = curves.matched_spread(variance, keys, head_dim=40, matching=matching)
        assert spread.tolist() == pytest.approx(values, rel=1e-12)


@pytest.mark.parametrize("matching", ["variance", "entropy"])
def test_limits_of_small_variances(matching):
    """Weights of columns are proportional to s², scores to s⁴."""
    variance = torch.tensor([1e-8, 1e-6, 1e-4], dtype=torch.float64)
    spread = curves.matched_spread(variance, torch.ones(3), head_dim=64, matching=matching)
    torch.testing.assert_close(spread / spread[0], variance / variance[0])
    for form in ("unbiased", "decomposed"):
        spread = curves.matched_spread(variance**2, torch.ones(3), head_dim=64, matching=matching, form=form)
        torch.testing.assert_close(spread / spread[0], variance / variance[0], rtol=1e-2, atol=0)
    one = torch.tensor([1e-6], dtype=torch.float64)
    keys = torch.tensor([1024])
    spread = curves.matched_spread(one, keys, head_dim=64, matching=matching, form="unbiased").item()
    assert spread == pytest.approx(2 * math.sqrt(64 * 1e-6), rel=0.01)  # s⁴/(4D) = v


def test_decomposed_has_the_curves_of_unbiased():
    variance = torch.logspace(-4, 3, 9, dtype=torch.float64)
    for matching in curves.MATCHINGS:
        of = functools.partial(curves.matched_spread, variance, torch.full((9,), 100), head_dim=40, matching=matching)
        assert torch.equal(of(form="decomposed"), of(form="unbiased"))
        assert not torch.equal(of(form="paper"), of(form="unbiased"))
    assert curves.linear_constants(64, form="unbiased") == tuple(curves.TABLE["forms"]["unbiased"]["linear"][6])


def test_an_unknown_matching_or_form_is_refused():
    one = torch.ones(1)
    with pytest.raises(ValueError, match="matching must be one of 'linear', 'variance', 'entropy', got 'best'"):
        curves.matched_spread(one, one, head_dim=64, matching="best")
    for matching in curves.MATCHINGS:
        with pytest.raises(ValueError, match="form must be one of 'paper', 'unbiased', 'decomposed', got 'exact'"):
            curves.matched_spread(one, one, head_dim=64, matching=matching, form="exact")
    with pytest.raises(ValueError, match="form must be one of"):
        curves.linear_constants(64, form="exact")
    with pytest.raises(ValueError, match="matching must be one of 'variance', 'entropy', got 'linear'"):
        curves.curve_rows(64, "linear")
    with pytest.raises(ValueError, match="form must be one of 'paper', 'unbiased', got 'decomposed'"):
        calibration.lln_probabilities(torch.ones(2, 8), torch.ones(2, 8), 1.0, form="decomposed")


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


@pytest.mark.parametrize("form", ["paper", "unbiased"])
@pytest.mark.parametrize("matching", ["variance", "entropy"])
def test_curves_increase_and_have_no_steps(matching, form):
    variance = torch.logspace(-6, 7, 4000, dtype=torch.float64)
    for head_dim in (4, 8, 40, 64, 200, 256, 512):
        for num_keys in (1, 100, 1024, 10**6):
            keys = torch.full_like(variance, num_keys)
            spread = curves.matched_spread(variance, keys, head_dim=head_dim, matching=matching, form=form)
            inside = variance < curves.MAX_SCORE_VARIANCE
            assert (spread[inside].diff() > 0).all()
            assert (spread.log().diff() < 0.05).all()
            assert spread.isfinite().all()


def test_curves_between_dims_lie_between():
    one = torch.ones(1, dtype=torch.float64)
    spreads = [curves.matched_spread(one, one, head_dim=d, matching="variance").item() for d in (32, 40, 48)]
    assert spreads[0] < spreads[1] < spreads[2]


@pytest.mark.parametrize("form", calibration.CALIBRATED_FORMS)
def test_the_shipped_table_is_what_calibration_makes(form):
    """One head dimension, piece by piece; `lln calibrate` does all of them."""
    matrix = functools.partial(calibration.lln_probabilities, form=form)
    table = curves.form_table(form)
    assert json.loads(curves.TABLE_PATH.read_text())["seed"] == calibration.SEED
    assert calibration.dump(curves.TABLE) == curves.TABLE_PATH.read_text()
    measured = calibration.measure(matrix, calibration.log_variance, calibration.SPREADS, head_dim=8, num_keys=1024)
    assert calibration.log_spread_at(calibration.SCORE_VARIANCES, measured) == table["variance"][0]
    wanted, curve = (
        calibration.measure(matrix, calibration.entropy_deficit, settings, head_dim=8, num_keys=16)
        for matrix, settings in (
            (calibration.softmax_probabilities, calibration.SCORE_VARIANCES),
            (matrix, calibration.SPREADS),
        )
    )
    reach = calibration.REACH[form]
    assert calibration.log_spread_at(wanted, curve, reach=reach) == table["entropy"][0][0]


def test_calibrate_makes_the_table_of_every_form(monkeypatch):
    """With few draws, so that the numbers are others; the progress that the command shows counts these steps."""
    for name, value in (("DRAWS", 1), ("HEAD_DIMS", (8, 16)), ("NUM_KEYS", (16, 64))):
        monkeypatch.setattr(calibration, name, value)
    steps = []
    table = calibration.calibrate(lambda: steps.append(None))
    assert len(steps) == 2 * (2 + 2)
    assert list(table) == list(curves.TABLE)
    assert list(table["forms"]) == list(curves.TABLE["forms"]) == ["unbiased"]
    for curve in (table, table["forms"]["unbiased"]):
        assert [len(curve[name]) for name in curves.MATCHINGS] == [2, 2, 2]
        assert [len(x) for x in curve["entropy"]] == [2, 2]
    assert table["variance"] != table["forms"]["unbiased"]["variance"]
    assert json.loads(calibration.dump(table)) == table


def test_matching_errors_cover_every_form(monkeypatch):
    for name, value in (("ERROR_HEAD_DIMS", (8,)), ("ERROR_VARIANCES", (0.5,)), ("ERROR_DRAWS", 2)):
        monkeypatch.setattr(calibration, name, value)
    rows = calibration.matching_errors()
    assert len(rows) == 3 * 3 * 2
    for row in rows:
        is_matched = (row["matching"], row["quantity"]) in (("variance", "log-variance"), ("entropy", "entropy"))
        assert not is_matched or abs(row["errors"][0]) < 0.1, row


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


def test_prefixes_of_equal_entries_have_no_variance():
    """Float32 must find what float64 finds: tokens whose entries are equal, though other tokens have others."""
    key = torch.randn(2, 2, 50, 1).expand(2, 2, 50, 16).contiguous()
    _, beta = lln.match_moments(torch.randn(2, 2, 50, 16), key, is_causal=True)
    assert (beta[..., 0] == 0).all()
