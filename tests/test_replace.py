"""`combine="replace"`: the weights of neighbours are softmax attention's, those of far tokens LLN attention's alone."""

import math

import pytest
import torch

from lln import LLNDiagAttention, zoo
from lln.neighbors import beyond_neighbors

TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}


def make(near="window", block_size=8, **options):
    torch.manual_seed(0)
    given = {"statistics": "learned", "form": "decomposed", "projection": True, "signed": True, "feature_dim": 6}
    module = LLNDiagAttention(4, 5, near=near, block_size=block_size, combine="replace", **given | options).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def inputs(tokens, batch=2, key_heads=4):
    torch.manual_seed(1)
    shape = (batch, key_heads, tokens, 5)
    query, key = torch.randn(batch, 4, tokens, 5, dtype=torch.double), torch.randn(shape, dtype=torch.double)
    return query, key, torch.randn(*shape[:3], 3, dtype=torch.double)


def near_mask(tokens, near, size):
    place = torch.arange(tokens)
    if near == "blocks":
        return place[:, None] // size == place // size
    distance = place - place[:, None]
    return (distance <= size // 2) & (distance >= size // 2 + 1 - size)


def explicit(module, query, key, value):
    """One sample without padding, by its matrices."""
    groups = query.shape[1] // key.shape[1]
    a, b = module.log_features(query, key)
    weight = module.key_weight(key)
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    logs = (a[:, :, :, None] + b[:, :, None]).logsumexp(dim=-1)
    scores = query @ key.mT * query.shape[3] ** -0.5
    near = near_mask(query.shape[2], module.near, module.block_size)
    far = ~near
    lse = scores.masked_fill(far, -math.inf).logsumexp(dim=-1)
    own = logs.masked_fill(near, -math.inf).logsumexp(-1) - logs.masked_fill(far, -math.inf).logsumexp(-1)
    columns = weight[:, :, None].expand_as(logs).masked_fill(near, -math.inf).logsumexp(-1)
    mix = module.ratio_mix[:, None]
    logit = mix * own + (1 - mix) * (columns - lse) + module.ratio_logit[:, None]
    logit = logit + (query @ module.gate[..., None])[..., 0]
    share = logit.sigmoid().where(far.any(dim=-1), 0.0)[..., None]
    content = logs.masked_fill(near, -math.inf).softmax(dim=-1).where(far.any(dim=-1)[:, None], 0.0)
    return (share * content + (1 - share) * scores.masked_fill(far, -math.inf).softmax(dim=-1)) @ value


@pytest.mark.parametrize("near", ["window", "blocks"])
@pytest.mark.parametrize(("tokens", "block_size"), [(1, 8), (7, 4), (16, 8), (37, 8), (20, 1), (33, 5), (9, 64)])
def test_as_the_explicit_matrices(tokens, block_size, near):
    module = make(near, block_size)
    query, key, value = inputs(tokens)
    torch.testing.assert_close(module(query, key, value), explicit(module, query, key, value), **TOLERANCE)


def test_grouped_heads_and_a_kernel_of_a_hybrid():
    module = make(num_key_heads=2)
    tokens = inputs(21, key_heads=2)
    torch.testing.assert_close(module(*tokens), explicit(module, *tokens), **TOLERANCE)
    hybrid = zoo.build("hybrid", num_heads=4, head_dim=5, far="hedgehog", combine="replace", block_size=8).double()
    query, key, value = inputs(21)
    a, b = hybrid.log_features(query, key)
    found, _ = beyond_neighbors(a, b, value, near="window", block_size=8)
    logs = (a[:, :, :, None] + b[:, :, None]).logsumexp(dim=-1)
    wanted = logs.masked_fill(near_mask(21, "window", 8), -math.inf).softmax(dim=-1) @ value
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)  # the mechanism's own features have an epsilon
    assert hybrid(query, key, value).isfinite().all()


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("near", ["window", "blocks"])
def test_padding_anywhere_and_packing_change_nothing(near, key_heads):
    module = make(near, block_size=6, num_key_heads=key_heads)
    lengths, total = (17, 4, 30), 40
    query, key, value = inputs(total, batch=3, key_heads=key_heads)
    keep = torch.zeros(3, total, dtype=torch.bool)
    rows = []
    for sample, length in enumerate(lengths):
        keep[sample, torch.randperm(total)[:length].sort().values] = True
        rows.append([x[sample : sample + 1, :, keep[sample]] for x in (query, key, value)])
    query, key, value = (x.masked_fill(~keep[:, None, :, None], math.nan) for x in (query, key, value))
    found = module(query, key, value, key_padding_mask=keep)
    starts = torch.tensor([0, 17, 21, 51], dtype=torch.int32)
    packed = module(*(torch.cat(x, dim=2) for x in zip(*rows, strict=True)), cu_seqlens=starts)
    for sample, tokens in enumerate(rows):
        alone = module(*tokens)
        torch.testing.assert_close(found[sample : sample + 1, :, keep[sample]], alone, **TOLERANCE)
        torch.testing.assert_close(packed[:, :, starts[sample] : starts[sample + 1]], alone, **TOLERANCE)


@pytest.mark.parametrize("tokens", [3, 14])
def test_gradients(tokens):
    module = make(block_size=4)
    given = [x.requires_grad_(True) for x in inputs(tokens, batch=1)]
    keep = torch.ones(1, tokens, dtype=torch.bool)
    keep[0, 1] = False
    assert torch.autograd.gradcheck(
        lambda *x: module(*x, key_padding_mask=keep).where(keep[:, None, :, None], 0.0), given
    )
    module(*given, key_padding_mask=keep).where(keep[:, None, :, None], 0.0).sum().backward()
    assert all(x.grad is None or x.grad.isfinite().all() for x in module.parameters())
    assert module.ratio_mix.grad is not None


def test_where_nothing_is_far_the_output_is_softmax_attention_to_the_bit():
    module = make(block_size=64).float()
    query, key, value = (x.float() for x in inputs(32))
    wanted = module.near_branch(query, key, value)[0]
    assert torch.equal(module(query, key, value), wanted)


def test_large_inputs_stay_finite():
    module = make().float()
    query, key, value = (30 * x.float() for x in inputs(40))
    query.requires_grad_(True)
    output = module(query, key, value)
    output.sum().backward()
    assert output.isfinite().all()
    assert query.grad.isfinite().all()
    assert (output.abs().amax() <= value.abs().amax() * 1.001).all()


def test_refused():
    with pytest.raises(ValueError, match='measures all keys of a sequence; causal attention takes "gate"'):
        make()(*inputs(9), is_causal=True)
    with pytest.raises(ValueError, match='is for statistics="learned"'):
        LLNDiagAttention(4, 5, combine="replace")
    with pytest.raises(ValueError, match="whose weights must be products of features"):
        zoo.build("hybrid", num_heads=2, head_dim=4, far="longformer", combine="replace")(*torch.randn(3, 1, 2, 9, 4))
    options = {"key_heads": 4, "value_dim": 3, "dtype": torch.float, "device": torch.device("cpu")}
    assert make().init_state(1, **options) is None


def test_keys_without_weight_far_away_leave_softmax_attention_among_neighbors():
    module = make(block_size=4).float()
    query, key, value = (x.float() for x in inputs(20))
    key[:, :, 10:] *= 1e4
    output = module(query, key, value)
    assert output.isfinite().all()
