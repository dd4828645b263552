"""Learned inputs of LLN attention."""

import pytest
import torch

import lln
from lln.features import HeadFeatures, balanced_basis
from lln.neighbors import near_with_mass_ratio

FORMS = ("paper", "unbiased", "decomposed")


def heads(tokens=37, *, key_heads=2, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(3, 4, tokens, 8, generator=generator, dtype=dtype) + 0.5
    key, value = (torch.randn(3, key_heads, tokens, 8, generator=generator, dtype=dtype) for _ in range(2))
    return query, key - 0.3, value


def make(form="decomposed", *, projection=True, signed=True, key_heads=2, cls=lln.LLNAttention, **options):
    torch.manual_seed(1)
    shape = {"num_key_heads": key_heads, "statistics": "learned", "form": form}
    module = cls(4, 8, **shape, projection=projection, signed=signed, **options).double()
    with torch.no_grad():
        for parameter in module.features.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def explicit(module, query, key, value, *, keep=None, is_causal=False):
    """The formula of `lln.features`, head by head and pair by pair."""
    f = module.features
    output = torch.zeros(*query.shape[:3], value.shape[3], dtype=query.dtype)
    groups = query.shape[1] // key.shape[1]
    for sample in range(query.shape[0]):
        for head in range(query.shape[1]):
            q, k, v = query[sample, head], key[sample, head // groups], value[sample, head // groups]
            a, b = q, k
            if f.form == "decomposed":
                a, b = a - f.center_q[head], b - f.center_k[head // groups]
            if f.projection:
                a, b = a @ f.project_q[head], b @ f.project_k[head // groups]
            a, b = a * f.log_alpha[head].exp(), b * f.log_beta[head // groups].exp()
            if f.signed:
                a, b = torch.cat((a, -a), -1), torch.cat((b, -b), -1)
            weights = a.exp() @ b.exp().T
            if f.form != "paper":
                weights = weights / b.exp().sum(-1)
            if f.form == "decomposed":
                weights = weights * (k @ f.column[head]).exp()
            if is_causal:
                weights = weights.tril()
            if keep is not None:
                weights = weights * keep[sample]
            output[sample, head] = weights / weights.sum(-1, keepdim=True) @ v
    return output


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"projection": False, "signed": False},
        {"projection": True, "signed": False},
        {"projection": True, "signed": True},
        {"projection": True, "signed": True, "feature_dim": 19},
        {"projection": True, "signed": False, "feature_dim": 5},
    ],
    ids=lambda options: "-".join(f"{name}={value}" for name, value in options.items()),
)
@pytest.mark.parametrize("form", FORMS)
def test_is_the_formula(form, options, is_causal):
    module, inputs = make(form, **options), heads()
    expected = explicit(module, *inputs, is_causal=is_causal)
    torch.testing.assert_close(module(*inputs, is_causal=is_causal), expected, rtol=1e-9, atol=1e-9)
    single = module.float()(*(x.float() for x in inputs), is_causal=is_causal)
    torch.testing.assert_close(single.double(), expected, rtol=1e-4, atol=1e-5)


def test_padding_does_not_matter_even_where_it_is_not_finite():
    module, (query, key, value) = make(), heads()
    keep = torch.ones(3, 37, dtype=torch.bool)
    keep[1, 20:], keep[2, :9] = False, False
    expected = explicit(module, query, key, value, keep=keep)
    for x in (query, key, value):
        x[~keep[:, None].expand(x.shape[:3])] = torch.nan
    output = module(query, key, value, key_padding_mask=keep)
    kept = keep[:, None, :, None].expand_as(output)
    torch.testing.assert_close(output[kept], expected[kept])
    output[kept].sum().backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in module.features.parameters())


def test_gradients_of_all_parameters():
    module, inputs = make(), [x[:1] for x in heads(4)]
    parameters = tuple(module.features.parameters())
    torch.autograd.gradcheck(lambda *_: module(*inputs, is_causal=True), parameters)


def test_a_balanced_basis_keeps_products_and_has_one_diagonal_covariance():
    query, key, _ = heads(400, key_heads=4)
    query, key = (x - x.mean(dim=(0, 2), keepdim=True) for x in (query, key))
    query = query @ torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    to_q, to_k = balanced_basis(query, key)
    new_q, new_k = query @ to_q, key @ to_k
    torch.testing.assert_close(new_q @ new_k.mT, query @ key.mT, rtol=1e-6, atol=1e-6)
    for x, other in ((new_q, new_k), (new_k, new_q)):
        covariance, wanted = _covariance(x), _covariance(other)
        torch.testing.assert_close(covariance, wanted, rtol=1e-3, atol=1e-3)
        assert float((covariance - torch.diag_embed(covariance.diagonal(dim1=1, dim2=2))).abs().max()) < 1e-3


def _covariance(x):
    rows = x.transpose(0, 1).flatten(1, 2)
    return rows.mT @ rows / rows.shape[1]


def test_calibration_measures_centres_and_matches_the_scales():
    query, key, _ = heads(300, dtype=torch.float32)
    features = HeadFeatures(4, 8, num_key_heads=2, form="decomposed", projection=False, signed=False)
    features.calibrate(query, key, matching="variance", spread=0.5)
    torch.testing.assert_close(features.center_q, query.mean(dim=(0, 2)))
    torch.testing.assert_close(features.column, query.mean(dim=(0, 2)) * 8**-0.5)
    centred = query - features.center_q[:, None], key - features.center_k[:, None]
    alpha, _ = lln.match_moments(*centred, form="unbiased")
    torch.testing.assert_close(features.log_alpha.exp(), 0.5 * alpha.mean(dim=0), rtol=1e-4, atol=0)


def test_wider_projections_begin_as_rotations_of_the_balanced_basis():
    """Each block of head_dim features then has products of query and key as the head itself."""
    query, key, _ = heads(300, dtype=torch.float32)
    options = {"num_key_heads": 2, "form": "unbiased", "projection": True, "signed": True}
    features = HeadFeatures(4, 8, **options, feature_dim=24)
    features.calibrate(query, key, matching="variance")
    scale = (features.log_alpha.exp() * features.log_beta.exp().repeat_interleave(2))[:, None, None]
    a, b, _ = features(query, key)
    assert a.shape[-1] == features.num_features == 48
    exact = query @ key.repeat_interleave(2, dim=1).mT * scale
    for start in (0, 8, 16):
        block = a[..., start : start + 8] @ b[..., start : start + 8].repeat_interleave(2, dim=1).mT
        torch.testing.assert_close(block, exact, rtol=1e-3, atol=1e-3)
    blocks = features.project_q.detach()[0].split(8, dim=1)
    assert float((blocks[0] - blocks[1]).abs().max()) > 0.1
    assert float((blocks[1] - blocks[2]).abs().max()) > 0.1


def test_what_does_not_go_together_is_refused():
    with pytest.raises(ValueError, match="set projection=True"):
        lln.LLNAttention(2, 8, statistics="learned", feature_dim=16)
    with pytest.raises(ValueError, match="feature_dim"):
        lln.LLNAttention(2, 8, statistics="learned", projection=True, feature_dim=0)
    with pytest.raises(ValueError, match="learned"):
        lln.LLNAttention(2, 8, projection=True)
    with pytest.raises(ValueError, match="alpha and beta are parameters"):
        lln.LLNAttention(2, 8, statistics="learned", alpha=1.0)


@pytest.mark.parametrize("combine", ["average", "ratio", "scale"])
def test_both_branches(combine):
    module = make(cls=lln.LLNDiagAttention, combine=combine, near="window", block_size=6)
    query, key, value = heads()
    far = explicit(module, query, key, value)
    near = lln.block_diagonal_attention(query, key, value, block_size=6, near="window")
    torch.testing.assert_close(module(query, key, value), (far + near) / 2, rtol=1e-6, atol=1e-6)


def test_a_gate_depends_on_the_query_and_on_what_is_far():
    module = make(cls=lln.LLNDiagAttention, combine="gate", share=0.2, near="window", block_size=6)
    with torch.no_grad():
        module.gate.normal_()
    query, key, value = heads()
    logit = (query * module.gate[:, None]).sum(-1, keepdim=True) + torch.log(torch.tensor(0.25))
    _, ratio = near_with_mass_ratio(query, key, key, module.key_weight(key), near="window", block_size=6)
    share = torch.sigmoid(logit + ratio[..., None])
    near = lln.block_diagonal_attention(query, key, value, near="window", block_size=6)
    expected = share * explicit(module, query, key, value) + (1 - share) * near
    torch.testing.assert_close(module(query, key, value), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("near", ["blocks", "window"])
def test_a_gate_leaves_softmax_attention_where_nothing_is_far(near, is_causal):
    module = make(cls=lln.LLNDiagAttention, combine="gate", near=near, block_size=80).float()
    query, key, value = (x.float().requires_grad_() for x in heads())
    output = module(query, key, value, is_causal=is_causal)
    attend = torch.nn.functional.scaled_dot_product_attention
    expected = attend(query, key, value, is_causal=is_causal, enable_gqa=True)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    output.sum().backward()
    assert all(bool(x.grad.isfinite().all()) for x in (query, key, value, module.gate, module.ratio_logit))
    assert float(module.gate.grad.abs().max()) == 0.0


def test_a_gate_reads_each_sequence_alone():
    """Padding and packing leave every sequence with what it gets by itself."""
    module = make(cls=lln.LLNDiagAttention, combine="gate", near="window", block_size=6)
    with torch.no_grad():
        module.gate.normal_()
    query, key, value = heads()
    lengths = [9, 37, 1]
    alone = [module(*(x[i : i + 1, :, :n] for x in (query, key, value)))[0] for i, n in enumerate(lengths)]
    padded = module(query, key, value, key_padding_mask=torch.tensor(lengths))
    row = [torch.cat([x[i, :, :n] for i, n in enumerate(lengths)], dim=1)[None] for x in (query, key, value)]
    packed = module(*row, cu_seqlens=torch.tensor([0, 9, 46, 47], dtype=torch.int32))
    for i, n in enumerate(lengths):
        torch.testing.assert_close(padded[i, :, :n], alone[i], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(packed[0], torch.cat(alone, dim=1), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("form", FORMS)
def test_a_state_gives_what_causal_attention_gives(form, dtype):
    """Far features of another number than the head's, and softmax attention of the query and key themselves."""
    options = {"near": "window", "block_size": 5, "combine": "gate", "feature_dim": 11}
    module = make(form, cls=lln.LLNDiagAttention, **options).to(dtype).eval()
    with torch.no_grad():
        module.gate.normal_()
    query, key, value = (x.to(dtype) for x in heads())
    state = module.init_state(3, key_heads=2, value_dim=8, dtype=dtype, device=torch.device("cpu"))
    outputs = []
    with torch.no_grad():
        for start, end in ((0, 11), (11, 12), (12, 37)):
            q, k, v = (x[:, :, start:end] for x in (query, key, value))
            a, b, weight = module.far_inputs(q, k)
            far_mass = module.log_far_mass(k, None, state)
            far, near, lse, state = state.branches(a, b, v, near_query=q, near_key=k, key_weight=weight)
            outputs.append(module.join(far, near, far_mass - lse, query=q))
        expected = module(query, key, value, is_causal=True)
    tolerance = 1e-9 if dtype == torch.float64 else 2e-5
    torch.testing.assert_close(torch.cat(outputs, dim=2).to(dtype), expected, rtol=tolerance, atol=tolerance)
