"""The recorder: it reads what the attention of a model does, and refuses what it cannot read."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recorded_models import FAMILIES, SIZES, entropy_of, hugging_face, inputs_of, record, transformers
from torch import Tensor, nn

import lln
from lln.instruments import Recorder, read_records, spectral_gap, write_table
from lln.instruments.capture import Capture
from lln.instruments.heads import SCALARS
from lln.nn import LLNAttention, LLNDiagAttention


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", [*FAMILIES, "scaled gpt2"])
def test_hugging_face_heads_are_those_of_its_own_weights(family: str, implementation: str, tmp_path: Path) -> None:
    model = hugging_face(family, implementation).eval()
    inputs = inputs_of(family)
    records = record(model, lambda: model(**inputs), tmp_path / "r.jsonl")
    assert len(records) == 2 * 4
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(**inputs, output_attentions=True).attentions
    sample = records[0]["tokens"] == 9  # the padded one was chosen
    kept = slice(3, None) if sample else slice(None)
    for r in records:
        layer = int(next(part for part in r["layer"].split(".") if part.isdigit()))
        matrix = weights[layer][0 if sample else 1, r["head"], kept, kept].double()
        if family == "vit":
            candidates = [weights[layer][s, r["head"]].double() for s in range(2)]
            matrix = min(candidates, key=lambda m: abs(entropy_of(m) - r["entropy"]))
        assert r["entropy"] == pytest.approx(entropy_of(matrix), abs=1e-4)
        values = np.sort(np.abs(np.linalg.eigvals(matrix.numpy())))
        if family in ("gpt2", "scaled gpt2", "llama"):
            values = np.sort(matrix.diagonal().numpy())
        assert r["gap"] == pytest.approx(1 - values[-2], abs=1e-4)
        assert r["kind"] == "softmax"
        assert r["alpha"] is None


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("mask", ["none", "padding", "causal", "both", "per head"])
def test_torch_heads_are_those_of_its_own_weights(batch_first: bool, mask: str, tmp_path: Path) -> None:
    module = nn.MultiheadAttention(16, 4, batch_first=batch_first).double().eval()
    nn.init.normal_(module.in_proj_weight)
    x = torch.randn(1, 9, 16, dtype=torch.float64)
    given: dict[str, Any] = {}
    if mask in ("padding", "both"):
        given["key_padding_mask"] = torch.arange(9)[None] >= 7
    if mask in ("causal", "both"):
        given["attn_mask"] = torch.ones(9, 9, dtype=torch.bool).triu(1)
    if mask == "per head":
        given["attn_mask"] = torch.randn(4, 9, 9, dtype=torch.float64)
    x = x if batch_first else x.transpose(0, 1)
    records = record(module, lambda: module(x, x, x, **given), tmp_path / "r.jsonl")
    _, weights = module(x, x, x, **given, average_attn_weights=False)
    kept = slice(0, 7) if "key_padding_mask" in given else slice(None)
    for r in records:
        matrix = weights[0, r["head"], kept, kept].detach()
        assert r["entropy"] == pytest.approx(entropy_of(matrix), abs=1e-10)
        assert r["gap"] == pytest.approx(spectral_gap(matrix).item(), abs=1e-10)


def test_torch_module_with_all_its_options(tmp_path: Path) -> None:
    module = nn.MultiheadAttention(16, 4, kdim=5, vdim=6, add_bias_kv=True, add_zero_attn=True).double().eval()
    q, k, v = (torch.randn(*shape, dtype=torch.float64) for shape in ((7, 2, 16), (9, 2, 5), (9, 2, 6)))
    records = record(module, lambda: module(q, k, v), tmp_path / "r.jsonl")
    _, weights = module(q, k, v, average_attn_weights=False)
    for r in records:
        assert min(abs(entropy_of(weights[s, r["head"]].detach()) - r["entropy"]) for s in range(2)) < 1e-10
        assert (r["tokens"], r["keys"], r["gap"]) == (7, 11, None)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_torch_encoder_on_its_fused_path(norm_first: bool, padded: bool, tmp_path: Path) -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=norm_first)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x, padding = torch.randn(3, 8, 16), torch.arange(8) >= torch.tensor([[8], [6], [5]])
    given = {"src_key_padding_mask": padding} if padded else {}
    with torch.no_grad():
        alone = encoder(x, **given)
        with Recorder(encoder, tmp_path / "r.jsonl", every=1, max_overhead=None) as recorder:
            assert torch.equal(encoder(x, **given), alone)
            records = recorder.step()
    assert [r["layer"] for r in records] == ["layers.0.self_attn"] * 4 + ["layers.1.self_attn"] * 4
    y = encoder.layers[0].norm1(x) if norm_first else x
    _, weights = encoder.layers[0].self_attn(
        y, y, y, key_padding_mask=given.get("src_key_padding_mask"), average_attn_weights=False
    )
    n = records[0]["tokens"]
    sample = [8, 6, 5].index(n) if padded else None
    for r in records[:4]:
        matrices = [weights[s, r["head"], :n, :n].detach() for s in range(3) if sample in (None, s)]
        assert min(abs(entropy_of(m) - r["entropy"]) for m in matrices) < 1e-5


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", ["lln", "lln_diag"])
def test_our_modules(kind: str, is_causal: bool, tmp_path: Path) -> None:
    module = LLNAttention(4, 8, matching="entropy") if kind == "lln" else LLNDiagAttention(4, 8, block_size=5)
    query, key = torch.randn(2, 1, 4, 20, 8, dtype=torch.float64).unbind()
    keep = torch.arange(20)[None] < 17
    records = record(
        module, lambda: module(query, key, key, key_padding_mask=keep, is_causal=is_causal), tmp_path / "r.jsonl"
    )
    settings: dict[str, Any] = {"matching": "entropy"} if kind == "lln" else {"block_size": 5}
    matrix = lln.reference.attention_matrix(
        query, key, kind=kind, key_padding_mask=keep, is_causal=is_causal, **settings
    )
    alpha, beta = lln.match_moments(
        query, key, key_padding_mask=keep, is_causal=is_causal, matching=settings.get("matching", "variance")
    )
    for r in records:
        own = matrix[0, r["head"], :17, :17]
        assert r["kind"] == kind
        assert r["entropy"] == pytest.approx(entropy_of(own), abs=1e-10)
        assert r["gap"] == pytest.approx(spectral_gap(own).item(), abs=1e-10)
        last = (0, r["head"], 16) if is_causal else (0, r["head"])
        assert (r["alpha"], r["beta"]) == (pytest.approx(alpha[last].item()), pytest.approx(beta[last].item()))
        assert r["temperature"] > 0


def test_our_module_with_a_learned_ratio_and_running_statistics(tmp_path: Path) -> None:
    module = LLNDiagAttention(2, 8, block_size=5, combine="ratio", statistics="running").double()
    module.ratio_logit.data = torch.tensor([2.0, -1.0], dtype=torch.float64)
    query, key = torch.randn(2, 1, 2, 20, 8, dtype=torch.float64).unbind()
    module(2 * query, key, key)
    tracked = module.num_batches_tracked.item()
    module.eval()
    records = record(module, lambda: module(query, key, key), tmp_path / "r.jsonl")
    assert module.num_batches_tracked.item() == tracked
    alpha, beta = module.scales(query, key)
    far = lln.attention_matrix(query, key, kind="lln", alpha=alpha, beta=beta)
    near = lln.attention_matrix(query, key, kind="block_diagonal", block_size=5)
    matrix = module.join(far, near, query=query).detach()
    for r in records:
        assert r["alpha"] == pytest.approx(alpha[r["head"]].item())
        assert r["entropy"] == pytest.approx(entropy_of(matrix[0, r["head"]]), abs=1e-10)


def test_sampling(tmp_path: Path) -> None:
    """Every k-th step, heads in turn; rows are sampled, each over all its keys."""
    module = nn.MultiheadAttention(16, 4, batch_first=True)
    x = torch.randn(1, 60, 16)
    with Recorder(
        module, tmp_path / "r.jsonl", every=3, heads=2, tokens=20, max_overhead=None, first_step=7
    ) as recorder:
        for _ in range(10):
            module(x, x, x)
            recorder.step()
        table = recorder.table()
    assert [(r["step"], r["head"]) for r in table] == [(9, 0), (9, 1), (12, 2), (12, 3), (15, 0), (15, 1)]
    _, weights = module(x, x, x, average_attn_weights=False)
    for r in table:
        matrix = weights[0, r["head"]].detach().double()
        assert (r["tokens"], r["keys"]) == (60, 60)
        assert r["entropy"] == pytest.approx(entropy_of(matrix), abs=0.15)
        assert r["entropy"] != pytest.approx(entropy_of(matrix), abs=1e-9)
        assert 0 < r["gap"] < 1


def test_table_and_json(tmp_path: Path) -> None:
    module = nn.MultiheadAttention(16, 2, batch_first=True)
    zeros = torch.zeros(1, 5, 16)
    records = record(module, lambda: module(zeros, zeros, zeros), tmp_path / "r.jsonl")
    assert records[0]["temperature"] is None
    assert records == read_records(tmp_path / "r.jsonl")
    lines = (tmp_path / "r.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["temperature"] is None
    text = write_table(records, tmp_path / "table.csv").read_text().splitlines()
    assert text[0].startswith(",".join(("step,layer,kind,head,tokens,keys,limit", *SCALARS)))
    assert len(text) == 3


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    module = nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(1, 5, 16)
    record(module, lambda: module(x, x, x), tmp_path / "r.jsonl", tensorboard=tmp_path / "board")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    value = events.Scalars("entropy//head1")[0].value
    assert value == pytest.approx(read_records(tmp_path / "r.jsonl")[1]["entropy"], rel=1e-6)


def test_not_finite_is_null(tmp_path: Path) -> None:
    module = nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.full((1, 5, 16), float("nan"))
    for r in record(module, lambda: module(x, x, x), tmp_path / "r.jsonl"):
        assert r["entropy"] is r["gap"] is r["temperature"] is None


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Linear has no attention"):
        Recorder(nn.Linear(2, 2), tmp_path / "r.jsonl")
    module = nn.MultiheadAttention(16, 2)
    for settings in ({"every": 0}, {"heads": -1}, {"tokens": 1.5}, {"max_overhead": 0.0}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            Recorder(module, tmp_path / "r.jsonl", **settings)  # type: ignore[arg-type]


def test_unknown_hugging_face_attention_is_reported(tmp_path: Path) -> None:
    def values_alone(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **rest: Any) -> Any:
        return value.transpose(1, 2), None

    transformers.AttentionInterface.register("values_alone", values_alone)
    model = hugging_face("bert", "values_alone")
    with pytest.warns(UserWarning, match="is not recorded: attention implementation 'values_alone'"):
        assert record(model, lambda: model(**inputs_of("bert")), tmp_path / "r.jsonl") == []


def test_hugging_face_attention_that_declares_its_kind(tmp_path: Path) -> None:
    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **rest: Any) -> Any:
        return lln.lln_attention(query, key, value, key_padding_mask=mask).transpose(1, 2), None

    attend.kind = "lln"  # type: ignore[attr-defined]
    transformers.AttentionInterface.register("tested_lln", attend)
    transformers.AttentionMaskInterface.register("tested_lln", lambda attention_mask=None, **rest: attention_mask)
    model = hugging_face("bert", "tested_lln").eval()
    records = record(model, lambda: model(**inputs_of("bert")), tmp_path / "r.jsonl")
    assert {r["kind"] for r in records} == {"lln"}
    assert all(r["alpha"] > 0 and r["tokens"] in (9, 12) for r in records)


@pytest.mark.parametrize("name", ["softcap", "position_bias", "s_aux"])
def test_hugging_face_attention_that_needs_more_is_not_recorded(name: str, tmp_path: Path) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def values_alone(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **rest: Any) -> Any:
        return value.transpose(1, 2), None

    model = hugging_face("bert")
    attention = model.encoder.layer[0].attention.self
    x = torch.randn(1, 4, 5, 8)
    with Recorder(model, tmp_path / "r.jsonl", every=1, max_overhead=None) as recorder:
        attend = ALL_ATTENTION_FUNCTIONS.get_interface("eager", values_alone)
        with pytest.warns(UserWarning, match=rf"not recorded: it uses .* \({name}\)"):
            attend(attention, x, x, x, None, **{name: torch.tensor(30.0)})
        assert recorder.step() == []
        attend(attention, x, x, x, None, **{name: None})
        assert len(recorder.step()) == 4


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_model_without_attention_is_warned_of_once(tmp_path: Path) -> None:
    model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model("deberta-v2", **SIZES, vocab_size=90))
    with Recorder(model, tmp_path / "r.jsonl", every=2, max_overhead=None) as recorder:
        model(torch.randint(3, 90, (1, 6)))
        with pytest.warns(UserWarning, match="no attention of DebertaV2Model was recorded"):
            assert recorder.step() == []
        for _ in range(4):
            assert recorder.step() == []


def test_sampled_tokens_that_do_not_attend_to_each_other_have_no_gap(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(16, 4, batch_first=True)
    module.in_proj_weight.data[:16] *= 900.0  # only of one head, so that the others keep their gap
    module.in_proj_weight.data[4:16] /= 900.0
    x = torch.randn(1, 1024, 16)
    records = record(module, lambda: module(x, x, x), tmp_path / "r.jsonl", tokens=64)
    assert [r["gap"] is None for r in records] == [True, False, False, False]
    assert all(r["entropy"] is not None for r in records)
    assert records == read_records(tmp_path / "r.jsonl")


def test_tokens_that_are_left_with_nothing_are_taken_out() -> None:
    """Token 3 attends to nothing and is padding; token 2 attends to token 3 alone, and without it to nothing."""
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[3] = False
    mask[2] = torch.arange(5) == 3
    query, key = torch.randn(2, 1, 1, 5, 4).unbind()
    (rows,) = Capture([0], query, key, {"kind": "softmax"}, mask[None]).rows()
    assert (rows.num_rows, rows.num_columns) == (3, 3)
    assert rows.block(rows.index).isfinite().all()


def test_padding_of_queries_alone_is_not_recorded(tmp_path: Path) -> None:
    module = LLNAttention(2, 4)
    x, keep = torch.randn(1, 2, 6, 4), torch.arange(6)[None] < 4
    both = record(
        module, lambda: module(x, x, x, key_padding_mask=keep, query_padding_mask=keep.clone()), tmp_path / "1.jsonl"
    )
    assert both == record(module, lambda: module(x, x, x, key_padding_mask=keep), tmp_path / "2.jsonl")
    with pytest.warns(UserWarning, match="a padding of their own"):
        assert record(module, lambda: module(x, x, x, query_padding_mask=keep), tmp_path / "3.jsonl") == []
