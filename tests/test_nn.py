"""Modules: settings, running statistics, and MultiheadAttention in torch's place."""

import copy

import pytest
import torch
from torch import nn

import lln
from lln import zoo


def test_modules_are_the_functions(tokens):
    q, k, v = tokens(N=33)
    for is_causal in (False, True):
        options = {"key_padding_mask": torch.tensor([33, 20]), "is_causal": is_causal}
        module = lln.LLNAttention(4, 16, matching="entropy")
        torch.testing.assert_close(
            module(q, k, v, **options), lln.lln_attention(q, k, v, matching="entropy", **options)
        )
        module = lln.LLNDiagAttention(4, 16, block_size=8, alpha=1.5)
        expected = lln.lln_diag_attention(q, k, v, block_size=8, alpha=1.5, **options)
        torch.testing.assert_close(module(q, k, v, **options), expected)


@pytest.mark.parametrize("combine", ["average", "ratio", "scale"])
def test_combinations_start_as_the_average_and_learn(tokens, combine):
    q, k, v = tokens(N=33, Dv=5)
    module = lln.LLNDiagAttention(4, 16, block_size=8, combine=combine, value_dim=5).double()
    torch.testing.assert_close(module(q, k, v), lln.lln_diag_attention(q, k, v, block_size=8))
    names = {"average": [], "ratio": ["ratio_logit"], "scale": ["far_scale", "near_scale"]}[combine]
    assert [name for name, _ in module.named_parameters()] == names
    if names:
        module(q, k, v).square().sum().backward()
        for parameter in module.parameters():
            assert (parameter.grad != 0).all()
            nn.init.normal_(parameter)
        far, near = lln.lln_attention(q, k, v), lln.block_diagonal_attention(q, k, v, block_size=8)
        if combine == "ratio":
            share = module.ratio_logit.sigmoid()[:, None, None]
            expected = share * far + (1 - share) * near
        else:
            expected = module.far_scale * far + module.near_scale * near
        torch.testing.assert_close(module(q, k, v), expected)


@pytest.mark.parametrize("combine", ["ratio", "scale"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_a_learned_mixture_starts_with_the_share_that_is_given(tokens, combine, is_causal):
    q, k, v = tokens(N=33)
    keep = torch.tensor([33, 20])
    expected = 0.2 * lln.lln_attention(q, k, v, key_padding_mask=keep, is_causal=is_causal)
    expected += 0.8 * lln.block_diagonal_attention(q, k, v, block_size=8, key_padding_mask=keep, is_causal=is_causal)
    options = {"block_size": 8, "combine": combine, "share": 0.2}
    for module in (
        lln.LLNDiagAttention(4, 16, **options),
        zoo.build("lln_diag", num_heads=4, head_dim=16, **options),
    ):
        made = module.double()(q, k, v, key_padding_mask=keep, is_causal=is_causal)
        torch.testing.assert_close(made, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_running_statistics_are_frozen_in_eval(tokens, is_causal):
    module = lln.LLNAttention(4, 16, statistics="running", momentum=0.2).double()
    batches = [tokens(N=40, scale=scale) for scale in (1.0, 1.5, 2.0)]
    sigma = None
    for q, k, v in batches:
        torch.testing.assert_close(
            module(q, k, v, is_causal=is_causal), lln.lln_attention(q, k, v, is_causal=is_causal)
        )  # in training the input's own statistics count
        new = q.flatten(2).std(2, correction=0).mean(0)
        sigma = new if sigma is None else 0.8 * sigma + 0.2 * new
    torch.testing.assert_close(module.sigma_q, sigma)
    assert module.num_batches_tracked == 3
    module.eval()
    before = copy.deepcopy(module.state_dict())
    q, k, v = batches[0]
    output = module(q, k, v, is_causal=is_causal)
    assert all(torch.equal(before[name], x) for name, x in module.state_dict().items())
    prefix = module(q[:, :, :7], k[:, :, :7], v[:, :, :7], is_causal=True)
    torch.testing.assert_close(prefix, module(q, k, v, is_causal=True)[:, :, :7])
    alpha, beta = module.scales(q, k)
    assert alpha.shape == beta.shape == (4,)
    torch.testing.assert_close(output, lln.lln_attention(q, k, v, alpha=alpha, beta=beta, is_causal=is_causal))
    state = lln.LLNState.empty(2, 4, 16, alpha=alpha, beta=beta, dtype=torch.float64)
    torch.testing.assert_close(state.prefill(q, k, v)[0], module(q, k, v, is_causal=True))
    again = lln.LLNAttention(4, 16, statistics="running").double().eval()
    again.load_state_dict(module.state_dict())
    torch.testing.assert_close(again(q, k, v, is_causal=is_causal), output)


def test_running_statistics_survive_half_precision_and_padding(tokens):
    module = lln.LLNAttention(4, 16, statistics="running", matching="entropy").half()
    assert module.sigma_q.dtype == torch.float32
    q, k, v = (x.half() for x in tokens(N=40))
    for _ in range(3):
        assert module(q * 300, k * 300, v).isfinite().all()
    assert module.row_variance.isfinite().all()
    module.eval()
    alone = module(q, k, v)
    padded = [torch.cat((x, torch.zeros_like(x)), 2) for x in (q, k, v)]
    torch.testing.assert_close(module(*padded, key_padding_mask=torch.tensor([40, 40]))[:, :, :40], alone)


def test_running_statistics_leave_empty_samples_out_and_follow_the_scope(tokens):
    q, k, v = tokens(N=40)
    module = lln.LLNAttention(4, 16, statistics="running").double()
    module(q, k, v, key_padding_mask=torch.tensor([40, 0]))
    torch.testing.assert_close(module.sigma_q, q[0].flatten(1).std(1, correction=0))
    module = lln.LLNAttention(4, 16, statistics="running", scope="batch").double()
    module(q, k, v)
    torch.testing.assert_close(module.sigma_q, q.std().expand(4))


def test_query_padding_of_cross_attention():
    ours = lln.MultiheadAttention(24, 3, batch_first=True, attention="lln").eval()
    x, memory = torch.randn(2, 7, 24), torch.randn(2, 7, 24)
    ignore = torch.arange(7) >= torch.tensor([[7], [4]])
    none = torch.zeros(2, 7, dtype=torch.bool)
    expected = ours(x, memory[:, :6], memory[:, :6], key_padding_mask=ignore[:, :6])[0]  # N != M: clearly cross
    longer = ours(x[1:], memory[1:], memory[1:], key_padding_mask=ignore[1:], query_padding_mask=none[1:])[0]
    torch.testing.assert_close(longer, expected[1:])


def test_looking_at_weights_does_not_count_the_input_twice(tokens):
    ours = lln.MultiheadAttention(24, 3, batch_first=True, statistics="running")
    x = torch.randn(2, 7, 24)
    ours(x, x, x, need_weights=True)
    assert ours.attention.num_batches_tracked == 1


def test_modules_refuse_what_does_not_fit(tokens):
    q, k, v = tokens()
    with pytest.raises(ValueError, match="num_heads=2 and head_dim=16, got query"):
        lln.LLNAttention(2, 16)(q, k, v)
    for options in ({"matching": "x"}, {"scope": "x"}, {"statistics": "x"}, {"momentum": 0.0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            lln.LLNAttention(4, 16, **options)
    with pytest.raises(ValueError, match="combine must be one of"):
        lln.LLNDiagAttention(4, 16, combine="sum")
    with pytest.raises(ValueError, match="share must be between 0 and 1"):
        lln.LLNDiagAttention(4, 16, combine="ratio", share=1.0)
    with pytest.raises(ValueError, match=r"an average has a share of 0\.5"):
        lln.LLNDiagAttention(4, 16, share=0.1)
    with pytest.raises(ValueError, match="block_size"):
        lln.LLNDiagAttention(4, 16, block_size=0)


CONFIGS = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "other widths": {"kdim": 10, "vdim": 6},
}


@pytest.mark.parametrize("config", list(CONFIGS))
@pytest.mark.parametrize("attention", ["lln", "lln_diag"])
def test_multihead_attention_moves_weights_both_ways(config, attention):
    options = CONFIGS[config]
    theirs = nn.MultiheadAttention(24, 3, **options)
    ours = lln.MultiheadAttention(24, 3, attention=attention, **options)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    widths = (24, options.get("kdim", 24), options.get("vdim", 24))
    inputs = [torch.randn(*((2, 11) if options.get("batch_first") else (11, 2)), width) for width in widths]
    for need_weights in (False, True):
        for average in (False, True):
            expected = theirs(*inputs, need_weights=need_weights, average_attn_weights=average)
            got = ours(*inputs, need_weights=need_weights, average_attn_weights=average)
            assert got[0].shape == expected[0].shape
            assert (got[1] is None) == (expected[1] is None)
            if need_weights:
                assert got[1].shape == expected[1].shape
                torch.testing.assert_close(got[1].sum(-1), torch.ones_like(got[1].sum(-1)))


def softmax_limit(**options):
    """Our module made to compute softmax attention: one block, and nothing of the far branch."""
    ours = lln.MultiheadAttention(24, 3, block_size=100, combine="ratio", **options)
    nn.init.constant_(ours.attention.ratio_logit, -100.0)
    return ours


@pytest.mark.parametrize("config", list(CONFIGS))
def test_multihead_attention_projects_as_torch_does(config):
    """With one block and no far branch all that is left to differ is the plumbing: it must not."""
    options = CONFIGS[config]
    theirs, ours = nn.MultiheadAttention(24, 3, **options), softmax_limit(**options)
    ours.load_state_dict(theirs.state_dict(), strict=False)
    widths = (24, options.get("kdim", 24), options.get("vdim", 24))
    inputs = [torch.randn(*((2, 11) if options.get("batch_first") else (11, 2)), width) for width in widths]
    ignore = torch.arange(11) >= torch.tensor([[11], [8]])
    additive = torch.zeros(2, 11).masked_fill(ignore, -torch.inf)
    causal = nn.Transformer.generate_square_subsequent_mask(11)
    real = ~ignore if options.get("batch_first") else ~ignore.T
    for masks in ({}, {"key_padding_mask": ignore}, {"key_padding_mask": additive}, {"attn_mask": causal}):
        expected, weights = theirs(*inputs, **masks)
        got, ours_weights = ours(*inputs, **masks)
        torch.testing.assert_close(got[real], expected[real], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours_weights[~ignore], weights[~ignore], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours(*inputs, is_causal=True)[0], theirs(*inputs, attn_mask=causal)[0])
    unbatched = [x.select(0 if options.get("batch_first") else 1, 0) for x in inputs]
    torch.testing.assert_close(ours(*unbatched)[0], theirs(*unbatched)[0])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_inside_torchs_encoder(training):
    """Also where torch has a fast path of its own, which must not be taken, and hands over nested tensors."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 4, 48, dropout=0.0, batch_first=True), 2)
    for layer in encoder.layers:
        ours = lln.MultiheadAttention(24, 4, batch_first=True, block_size=4)
        ours.load_state_dict(layer.self_attn.state_dict())
        layer.self_attn = ours
    encoder.train(training)
    x = torch.randn(2, 10, 24)
    ignore = torch.arange(10) >= torch.tensor([[10], [6]])

    def by_hand(x, **masks):
        for layer in encoder.layers:
            x = layer.norm1(x + layer.self_attn(x, x, x, need_weights=False, **masks)[0])
            x = layer.norm2(x + layer.linear2(layer.linear1(x).relu()))
        return x

    for no_grad in (False, True):
        with torch.set_grad_enabled(not no_grad):
            torch.testing.assert_close(encoder(x), by_hand(x))
            padded = encoder(x, src_key_padding_mask=ignore)
            torch.testing.assert_close(padded[~ignore], by_hand(x, key_padding_mask=ignore)[~ignore])
            causal = nn.Transformer.generate_square_subsequent_mask(10)
            torch.testing.assert_close(encoder(x, mask=causal, is_causal=True), by_hand(x, is_causal=True))


def test_dropout_drops_value_rows_and_is_off_in_eval():
    ours = lln.MultiheadAttention(24, 3, dropout=0.5, batch_first=True)
    x = torch.randn(1, 30, 24)
    assert not torch.equal(ours(x, x, x)[0], ours(x, x, x)[0])
    ours.eval()
    assert torch.equal(ours(x, x, x)[0], ours(x, x, x)[0])
    mean = torch.stack([ours.train()(x, x, x)[0] for _ in range(400)]).mean(0)
    torch.testing.assert_close(mean, ours.eval()(x, x, x)[0], rtol=0, atol=0.08)


def test_multihead_attention_refuses_what_it_cannot_honour():
    x = torch.randn(5, 2, 24)
    ours = lln.MultiheadAttention(24, 3)
    for option in ("add_bias_kv", "add_zero_attn"):
        with pytest.raises(ValueError, match=option):
            lln.MultiheadAttention(24, 3, **{option: True})
    with pytest.raises(TypeError, match="unexpected keyword argument 'block'"):
        lln.MultiheadAttention(24, 3, block=4)
    with pytest.raises(ValueError, match="only a causal attn_mask"):
        ours(x, x, x, attn_mask=torch.zeros(5, 5))
    with pytest.raises(ValueError, match="only a causal attn_mask"):
        ours(x, x, x, attn_mask=torch.zeros(6, 5, 5))
    with pytest.raises(ValueError, match="only a causal attn_mask"):
        ours(x, x, x, attn_mask=torch.rand(5, 5))
    with pytest.raises(ValueError, match="score bias"):
        ours(x, x, x, key_padding_mask=torch.rand(2, 5))
    with pytest.raises(TypeError, match="True = ignore"):
        ours(x, x, x, key_padding_mask=torch.zeros(2, 5, dtype=torch.long))
    with pytest.raises(ValueError, match=r"\(2, 5\) with True = ignore, got shape \(2, 4\)"):
        ours(x, x, x, key_padding_mask=torch.zeros(2, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="only a causal attn_mask"):
        ours(x, x, x, attn_mask=torch.zeros(5, 5), is_causal=True)
    with pytest.raises(ValueError, match="alpha must be positive"):
        lln.LLNAttention(3, 8, alpha=-1.0)
    with pytest.raises(ValueError, match="block-diagonal attention needs as many queries as keys"):
        ours(x[:3], x, x)
    assert lln.MultiheadAttention(24, 3, attention="lln")(x[:3], x, x)[0].shape == (3, 2, 24)
    with pytest.raises(ValueError, match="need_weights=False"):
        lln.MultiheadAttention(24, 3, combine="scale")(x, x, x)


def test_modules_compile_export_and_train_in_low_precision():
    layer = lln.MultiheadAttention(24, 3, batch_first=True, block_size=8)
    x = torch.randn(2, 20, 24)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, x, x, need_weights=False)[0], layer(x, x, x, need_weights=False)[0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, _ = layer(x, x, x, need_weights=False)
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert layer.in_proj_weight.grad.isfinite().all()
    low = copy.deepcopy(layer).bfloat16()
    assert low(x.bfloat16(), x.bfloat16(), x.bfloat16())[0].dtype == torch.bfloat16


@pytest.mark.parametrize("need_weights", [False, True], ids=["output", "weights"])
@pytest.mark.parametrize(("B", "N"), [(0, 5), (2, 0)], ids=["no sample", "no token"])
@pytest.mark.parametrize("attention", ["lln", "lln_diag"])
def test_multihead_attention_of_nothing_is_as_torch_has_it(attention, B, N, need_weights):
    x = torch.randn(B, N, 32, requires_grad=True)
    ours = lln.MultiheadAttention(32, 4, batch_first=True, attention=attention)
    theirs = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    for got, wanted in zip(*(m(x, x, x, need_weights=need_weights) for m in (ours, theirs)), strict=True):
        assert (got is None) == (wanted is None)
        assert got is None or got.shape == wanted.shape
    ours(x, x, x, need_weights=need_weights)[0].sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))


@pytest.mark.parametrize("statistics", ["live", "running"])
def test_modules_of_an_empty_batch(statistics):
    x = torch.randn(0, 4, 5, 16)
    for kind in (lln.LLNAttention, lln.LLNDiagAttention):
        module = kind(4, 16, statistics=statistics)
        assert module(x, x, x).shape == x.shape
        assert all(buffer.isfinite().all() for buffer in module.buffers())


ATTN_MASKS = {
    "none masked": torch.zeros(20, 20),
    "bool": torch.zeros(20, 20, dtype=torch.bool),
    "anti-causal": torch.full((20, 20), -torch.inf).tril(-1),
    "bias": torch.full((20, 20), -3.0),
}


@pytest.mark.parametrize("mask", ATTN_MASKS)
def test_compiled_multihead_attention_takes_no_mask_for_causal(mask):
    torch._dynamo.reset()
    x = torch.randn(2, 20, 32)
    module = lln.MultiheadAttention(32, 4, batch_first=True)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    causal = torch.nn.Transformer.generate_square_subsequent_mask(20)
    output = compiled(x, x, x, attn_mask=causal, need_weights=False)[0]
    torch.testing.assert_close(output, module(x, x, x, is_causal=True, need_weights=False)[0])
    with pytest.raises(RuntimeError, match="only a causal attn_mask"):
        compiled(x, x, x, attn_mask=ATTN_MASKS[mask], need_weights=False)


def test_compiled_multihead_attention_refuses_a_bias_on_keys():
    torch._dynamo.reset()
    x = torch.randn(2, 20, 32)
    module = lln.MultiheadAttention(32, 4, batch_first=True)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    ignore = torch.zeros(2, 20).masked_fill(torch.rand(2, 20) < 0.3, -torch.inf)
    output = compiled(x, x, x, key_padding_mask=ignore, need_weights=False)[0]
    torch.testing.assert_close(output, module(x, x, x, key_padding_mask=ignore, need_weights=False)[0])
    with pytest.raises(RuntimeError, match="0 for keep and -inf for ignore"):
        compiled(x, x, x, key_padding_mask=torch.full((2, 20), -3.0), need_weights=False)


def test_a_mask_without_values_is_not_taken_for_causal():
    x = torch.randn(2, 20, 32, device="meta")
    module = lln.MultiheadAttention(32, 4, batch_first=True, device="meta")
    assert module(x, x, x, is_causal=True, need_weights=False)[0].shape == x.shape
    with pytest.raises(ValueError, match="meta device"):
        module(x, x, x, attn_mask=torch.zeros(20, 20, device="meta"))
