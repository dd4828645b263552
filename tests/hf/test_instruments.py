"""The recorder on converted models: the right mechanism, with its options."""

import math

import pytest
import torch
import transformers

import lln.hf
from lln.instruments import Recorder, entropy

OPTIONS = {
    "lln": {"matching": "entropy"},
    "lln_diag": {"block_size": 5},
    "given": {"alpha": 1.5, "beta": 0.5},
    "batch": {"scope": "batch"},
    "block_diagonal": {"block_size": 5},
}


def record_with_inputs(model, inputs, path):
    """What the recorder writes, and the query and key of each attention, with the scores' scale in the query."""
    observed = []
    name = model.config._attn_implementation
    function = transformers.AttentionInterface._global_mapping[name]

    def observe(module, query, key, *args, scaling, **rest):
        observed.append((query * scaling * query.shape[3] ** 0.5, key))
        return function(module, query, key, *args, scaling=scaling, **rest)

    transformers.AttentionInterface.register(name, observe)
    try:
        with Recorder(model, path, every=1, heads=None, max_overhead=None) as recorder, torch.no_grad():
            model(**inputs)
            return recorder.step(), observed
    finally:
        transformers.AttentionInterface.register(name, function)


@pytest.mark.parametrize(
    ("family", "options"),
    [("roberta", name) for name in OPTIONS] + [("granite", name) for name in OPTIONS if name != "batch"],
)
def test_recorded_as_converted(family, options, make, batch, tmp_path):
    kind = options if options in ("lln", "lln_diag", "block_diagonal") else "lln"
    settings = OPTIONS[options]
    model, inputs = lln.hf.convert(make(family), kind, **settings), batch()
    records, observed = record_with_inputs(model, inputs, tmp_path / "r.jsonl")
    assert {record["kind"] for record in records} == {kind}
    causal, keep = family == "granite", inputs["attention_mask"].bool()
    samples = {tokens: sample for sample, tokens in enumerate(keep.sum(1).tolist())}
    sample = samples[records[0]["tokens"]]
    for layer, (query, key) in enumerate(observed):
        of_layer = records[4 * layer : 4 * layer + 4]
        expected = entropy(query, key, kind=kind, key_padding_mask=keep, is_causal=causal, **settings)[sample]
        torch.testing.assert_close(torch.tensor([r["entropy"] for r in of_layer]), expected, rtol=1e-4, atol=1e-4)
        if kind == "block_diagonal":
            assert all(r["alpha"] is None for r in of_layer)
            continue
        chosen = {name: settings[name] for name in ("matching", "scope") if name in settings}
        matched = lln.match_moments(query, key, key_padding_mask=keep, is_causal=causal, **chosen)
        for name, scale in zip(("alpha", "beta"), matched, strict=True):
            scale = scale.expand(3, *scale.shape[1:])[sample]
            scale = scale[:, keep[sample].nonzero()[-1, 0]] if causal else scale
            wanted = torch.full((4,), settings[name]) if name in settings else scale
            torch.testing.assert_close(torch.tensor([r[name] for r in of_layer]), wanted, rtol=1e-4, atol=1e-5)


def test_a_learned_share_is_recorded_as_it_mixes(make, batch, tmp_path):
    model = lln.hf.convert(make("roberta"), "lln_diag", block_size=5, combine="ratio", share=0.1)
    inputs = batch()
    records, observed = record_with_inputs(model, inputs, tmp_path / "r.jsonl")
    keep = inputs["attention_mask"].bool()
    sample = keep.sum(1).tolist().index(records[0]["tokens"])
    for layer, (query, key) in enumerate(observed):
        far, near = (
            lln.attention_matrix(query, key, key_padding_mask=keep, **settings)[sample][:, keep[sample]]
            for settings in ({"kind": "lln"}, {"kind": "block_diagonal", "block_size": 5})
        )
        mixed = 0.1 * far + 0.9 * near
        expected = -torch.xlogy(mixed, mixed).sum(dim=-1).mean(dim=-1) / math.log(2)
        found = torch.tensor([r["entropy"] for r in records[4 * layer : 4 * layer + 4]])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("attention", "combine", "causal"),
    [
        ("lln", None, False),
        ("lln", None, True),
        ("lln_diag", "gate", False),
        ("lln_diag", "gate", True),
        ("lln_diag", "replace", False),
    ],
)
def test_learned_features_windows_and_gates_are_recorded(attention, combine, causal, make, batch, tmp_path):
    """As the matrix that the mechanism makes of the identity, in place of values."""
    options = {"statistics": "learned", "form": "decomposed", "projection": True, "signed": True, "feature_dim": 11}
    if attention == "lln_diag":
        options |= {"near": "window", "block_size": 6, "combine": combine}
    model = make("llama", "ModelForCausalLM") if causal else make("roberta")
    model = lln.hf.convert(model, attention, **options)
    mechanisms = [module.mechanism for module in model.modules() if hasattr(module, "mechanism")]
    with torch.no_grad():
        for mechanism in mechanisms:
            for parameter in mechanism.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
    inputs = batch()
    records, observed = record_with_inputs(model, inputs, tmp_path / "r.jsonl")
    keep = inputs["attention_mask"].bool()
    sample = keep.sum(1).tolist().index(records[0]["tokens"])
    assert {record["kind"] for record in records} == {attention}
    for layer, (query, key) in enumerate(observed):
        identity = torch.eye(key.shape[2]).expand(*key.shape[:2], -1, -1)
        with torch.no_grad():
            matrix = mechanisms[layer](query, key, identity, key_padding_mask=keep, is_causal=causal)[sample]
            far = mechanisms[layer]._far(query, key, identity, {"key_padding_mask": keep, "is_causal": causal})[sample]
        matrix, far = (x[:, keep[sample]][:, :, keep[sample]] for x in (matrix, far))
        allowed = torch.ones_like(far[0], dtype=torch.bool).tril() if causal else torch.ones_like(far[0]).bool()
        expected = {
            "entropy": -torch.xlogy(matrix, matrix).sum(dim=-1).mean(dim=-1) / math.log(2),
            "temperature": torch.stack([x[allowed].log().var(correction=0).rsqrt() for x in far]),
        }
        of_layer = records[4 * layer : 4 * layer + 4]
        assert all(record["alpha"] is None and record["gap"] is not None for record in of_layer)
        for name, wanted in expected.items():
            found = torch.tensor([record[name] for record in of_layer])
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def test_learned_scales_are_recorded_by_their_lln_branch(make, batch, tmp_path):
    model, inputs = lln.hf.convert(make("roberta"), "lln_diag", block_size=5, combine="scale"), batch()
    records, observed = record_with_inputs(model, inputs, tmp_path / "r.jsonl")
    keep = inputs["attention_mask"].bool()
    sample = keep.sum(1).tolist().index(records[0]["tokens"])
    expected = entropy(*observed[0], kind="lln", key_padding_mask=keep)[sample]
    assert {record["kind"] for record in records} == {"lln"}
    torch.testing.assert_close(torch.tensor([r["entropy"] for r in records[:4]]), expected, rtol=1e-4, atol=1e-4)


def test_by_name(make, batch, tmp_path):
    model = make("bert")
    model.set_attn_implementation("lln_diag")
    records, _ = record_with_inputs(model, batch(), tmp_path / "r.jsonl")
    assert {record["kind"] for record in records} == {"lln_diag"}


@pytest.mark.parametrize("attention", ["flash", "elu"])
def test_other_mechanisms_are_reported_as_not_read(attention, make, batch, tmp_path):
    model = lln.hf.convert(make("bert"), attention)
    with pytest.warns(UserWarning, match=f"'{attention}' is neither softmax nor"):
        assert record_with_inputs(model, batch(), tmp_path / "r.jsonl")[0] == []


def test_a_state_is_reported_as_not_read(make, batch, tmp_path):
    model, inputs = lln.hf.convert(make("llama", "ModelForCausalLM")), batch("left")
    with Recorder(model, tmp_path / "r.jsonl", every=1, max_overhead=None) as recorder, torch.no_grad():
        output = model(**inputs)
        assert {record["kind"] for record in recorder.step()} == {"lln_diag"}
        with pytest.warns(UserWarning, match="continues from a state"):
            model(inputs["input_ids"][:, :1], past_key_values=output.past_key_values)
        assert recorder.step() == []


@pytest.mark.filterwarnings("ignore:the attention of the decoder")
def test_attention_to_an_encoder_is_softmax(make, batch, tmp_path):
    model = lln.hf.convert(make("bart"), "lln")
    with Recorder(model, tmp_path / "r.jsonl", every=1, max_overhead=None) as recorder, torch.no_grad():
        model(**batch(), decoder_input_ids=torch.randint(3, 90, (3, 7)))
        kinds = {record["layer"].split(".")[-1]: record["kind"] for record in recorder.step()}
    assert kinds == {"self_attn": "lln", "encoder_attn": "softmax"}
