"""`lln bench forms` on tiny random models, against the reference and what converted models compute."""

import math

import pytest
import torch
import transformers
from typer.testing import CliRunner

import lln.hf
from lln import reference
from lln.bench import forms
from lln.bench.forms import Calibration, Candidate, Comparison, LayerComparison
from lln.cli import app
from lln.matching.curves import matched_spread
from lln.results import read_results

TEXT = "The quick brown fox jumps over the lazy dog; " * 8
OTHER = "A text of other letters, and of other words: 0123456789. " * 4


@pytest.fixture
def saved(make, tmp_path):
    def save(family, head="Model", **settings):
        make(family, head, **settings).save_pretrained(tmp_path / family)
        return str(tmp_path / family)

    return save


@pytest.fixture
def inputs():
    """Query, key and value of 6 and 3 heads, and those of another text."""
    generator = torch.Generator().manual_seed(0)

    def draw(heads):
        return 1.5 * torch.randn(1, heads, 13, 5, generator=generator, dtype=torch.float64) + 0.3

    return [draw(heads) for heads in (6, 3, 3)], Calibration(draw(6), draw(3))


def expected_matrix(candidate, query, key, is_causal, other):
    known = other if candidate.calibrated else Calibration(query, key)
    options = {"form": candidate.form, "matching": candidate.matching}
    causal = is_causal and not candidate.calibrated
    scales = reference.match_moments(known.query, known.key, is_causal=causal, **options)
    alpha, beta = (x * math.sqrt(candidate.spread) for x in scales)
    centers = (known.query.mean(2), known.key.mean(2)) if candidate.form == "decomposed" else None
    options = {"alpha": alpha, "beta": beta, "form": candidate.form, "centers": centers, "is_causal": is_causal}
    return reference.attention_matrix(query, key, **options)


@pytest.mark.parametrize(
    ("candidate", "is_causal"),
    [
        (Candidate(), False),
        (Candidate(form="decomposed", spread=0.25), False),
        (Candidate(form="unbiased", matching="entropy"), True),
        (Candidate(form="decomposed", spread=0.5, calibrated=True), True),
    ],
    ids=lambda value: value.label if isinstance(value, Candidate) else f"causal={value}",
)
def test_measures_are_the_explicit_formulas(candidate, is_causal, inputs):
    (query, key, value), other = inputs
    row = LayerComparison(query, key, value, is_causal, block_size=4).measure(candidate, other)
    p = expected_matrix(candidate, query, key, is_causal, other)[0]
    s = reference.attention_matrix(query, key, kind="softmax", is_causal=is_causal)[0]
    allowed = torch.ones(13, 13).tril().bool() if is_causal else torch.ones(13, 13).bool()
    uniform = (allowed / allowed.sum(1, keepdim=True)).double()
    v = value[0].repeat_interleave(2, dim=0)
    unit = (uniform @ v - s @ v).norm()
    assert row["error"] == pytest.approx(((p @ v - s @ v).norm() / unit).item())
    for near in ("blocks", "window"):
        options = {"block_size": 4, "near": near, "is_causal": is_causal}
        close = reference.block_diagonal_attention(query, key, value, **options)[0]
        joined = (p @ v + close) / 2
        assert row[f"error_{near}"] == pytest.approx(((joined - s @ v).norm() / unit).item())
    divergences, entropies, correlations = [], [], []
    for one, wanted in zip(p, s, strict=True):
        pairs = [(one[i, seen], wanted[i, seen]) for i, seen in enumerate(allowed)]
        divergences += [(b * (b / a).log2()).sum() for a, b in pairs]
        entropies += [-(a * a.log2()).sum() for a, _ in pairs]
        x, y = (torch.cat([pair[k].log() - pair[k].log().mean() for pair in pairs]) for k in (0, 1))
        correlations.append(torch.corrcoef(torch.stack((x, y)))[0, 1])
    for name, values in (("divergence", divergences), ("entropy", entropies), ("correlation", correlations)):
        assert row[name] == pytest.approx(torch.stack(values).mean().item()), name


@pytest.mark.parametrize("form", ["unbiased", "decomposed"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_signed_features_are_hyperbolic_cosines(form, is_causal, inputs):
    """exp(x) exp(y) + exp(-x) exp(-y) = 2 cosh(x + y)."""
    (query, key, _), other = inputs
    known = other if is_causal else Calibration(query, key)
    key, known_key = (x.repeat_interleave(2, dim=1) for x in (key, known.key))
    m_q, m_k = (x.mean(2, keepdim=True) * (form == "decomposed") for x in (known.query, known_key))
    scores = (known.query - m_q) @ (known_key - m_k).mT / math.sqrt(5)
    variance = (scores - scores.mean(3, keepdim=True)).square().mean((2, 3))
    spread = matched_spread(variance, torch.full_like(variance, 13), head_dim=10, matching="variance", form="unbiased")
    alpha, beta = (
        (spread / 2).sqrt() / x.flatten(2).std(2, correction=0) for x in (known.query - m_q, known_key - m_k)
    )
    x, y = alpha[..., None, None] * (query - m_q), beta[..., None, None] * (key - m_k)
    kernel = (x[:, :, :, None] + y[:, :, None]).cosh().sum(-1) / y.cosh().sum(-1)[:, :, None]
    kernel = kernel * ((m_q * key).sum(-1) / math.sqrt(5)).exp()[:, :, None]
    kernel = kernel.tril() if is_causal else kernel
    identity = torch.eye(13, dtype=torch.float64).expand(1, 6, 13, 13)
    candidate = Candidate(form=form, signed=True, calibrated=is_causal)
    found = forms.attend(candidate, query, key, identity, is_causal, Calibration(known.query, known_key))
    torch.testing.assert_close(found, kernel / kernel.sum(-1, keepdim=True))


def test_losses_are_those_of_converted_models(saved, tmp_path):
    folder, out = saved("llama", "ModelForCausalLM"), tmp_path / "forms.jsonl"
    for name, text in (("text", TEXT), ("other", OTHER)):
        (tmp_path / name).write_text(text)
    arguments = ["--text", str(tmp_path / "text"), "--calibration", str(tmp_path / "other"), "--out", str(out)]
    arguments += ["--length", "24", "--sequences", "1", "--block-size", "5", "--loss"]
    result = CliRunner().invoke(app, ["bench", "forms", folder, *arguments], catch_exceptions=False)
    assert "Loss of the whole model: llama, 1 x 24 tokens, 2 layers" in result.stdout
    (record,) = read_results(out, made_by="lln bench forms").values()
    command = record.origin["command"]
    assert command.startswith(f"lln bench forms {folder} --text")
    assert command.endswith("--length 24 --sequences 1 --block-size 5 --loss")
    rows = {row["label"]: row for row in record.rows}
    assert [rows["Softmax attention"][name] for name in ("error", "correlation", "divergence")] == [0.0, 1.0, 0.0]
    assert rows["uniform, companion alone"]["error"] == 1.0
    assert all(len(row["error_of_layers"]) == 2 for row in rows.values())
    ids = torch.tensor([[byte % 90 for byte in TEXT.encode()[:24]]])
    network = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for label, near, attention, options in (
        ("Softmax attention", "", "softmax", {}),
        ("uniform, companion alone", "_blocks", "block_diagonal", {"block_size": 5}),
        ("LLN", "", "lln", {}),
        ("unbiased", "_window", "lln_diag", {"form": "unbiased", "near": "window", "block_size": 5}),
        ("Linear Transformer (ELU)", "", "elu", {}),
    ):
        lln.hf.convert(network, attention, **options)
        with torch.no_grad():
            loss = network(input_ids=ids, labels=ids, use_cache=False).loss.item()
        assert rows[label][f"loss{near}"] == pytest.approx(loss, abs=1e-4), label


def test_an_encoder_has_statistics_of_each_sample(saved):
    comparison = Comparison(saved("bert", num_hidden_layers=1), TEXT, length=20, sequences=2, block_size=5)
    steps = []
    rows = {row["label"]: row for row in comparison.run(lambda: steps.append(1))}
    assert len(steps) == comparison.steps == 2
    assert not any(row["calibrated"] for row in rows.values())
    assert 0 < rows["decomposed"]["error"] < rows["LLN"]["error"]
    assert "loss" not in rows["LLN"]


def test_what_cannot_be_measured_is_refused(saved, tmp_path):
    bert, llama = saved("bert"), saved("llama", "ModelForCausalLM")
    with pytest.raises(ValueError, match="bert is not causal, so it has no loss"):
        Comparison(bert, TEXT, length=20, loss=True)
    with pytest.raises(ValueError, match="leave --calibration out"):
        Comparison(bert, TEXT, calibration=OTHER, length=20)
    with pytest.raises(ValueError, match=r"too short for 2 x 60 tokens, .*; give more text"):
        Comparison(bert, TEXT[:100], length=60)
    with pytest.raises(ValueError, match="the calibration text is too short for 1 x 60"):
        Comparison(llama, TEXT, calibration=OTHER[:50], length=60)
    with pytest.raises(ValueError, match="fewer positions"):
        Comparison(bert, TEXT, length=71)
    with pytest.raises(ValueError, match="length must be at least 2"):
        Comparison(bert, TEXT, length=1)
    network = transformers.AutoModel.from_pretrained(bert)
    lln.hf.convert(network, "lln").save_pretrained(tmp_path / "converted")
    with pytest.raises(ValueError, match="was converted, so its attention is not softmax"):
        Comparison(str(tmp_path / "converted"), TEXT, length=20)
    result = CliRunner().invoke(app, ["bench", "forms", bert, "--text", str(tmp_path / "none")])
    assert "--text must be a text file, there is none at" in str(result.exception) + result.output
