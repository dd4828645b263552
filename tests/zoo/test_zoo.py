"""What every mechanism of the zoo must do, whatever it is: run for all names in the registry."""

from dataclasses import fields
from inspect import signature
from pathlib import Path

import pytest
import torch
from mechanisms import CAUSAL, DIM, NAMES, make, run, tokens
from torch import Tensor

import lln.zoo
from lln.zoo.table import markdown, table

every = pytest.mark.parametrize("name", NAMES)


def same(actual: Tensor, expected: Tensor) -> None:
    """Equal up to the order of float32 sums: 3e-5 of the largest entry."""
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=3e-5 * max(1.0, expected.abs().max().item()))


def ignored(name: str) -> set[str]:
    """Inputs that a mechanism does not use: tnn mixes tokens by their distance, and its queries are a gate."""
    return {"key"} if name == "tnn" else set()


@every
@pytest.mark.parametrize("number", [1, 63, 65])
def test_shape_and_dtype(name: str, number: int) -> None:
    qkv = tokens(number)
    output = run(make(name), *qkv)
    assert output.shape == qkv[0].shape
    assert output.dtype == torch.float32
    assert output.isfinite().all()


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision(name: str, dtype: torch.dtype) -> None:
    module = make(name)
    query, key, value = tokens(65, dtype=dtype)
    output = run(module, query, key, value)
    assert output.dtype == dtype
    # Sums run in float32, so what is lost is the rounding of the result, and that of softmax inside torch's SDPA.
    expected = run(module, query.float(), key.float(), value.float())
    assert (output - expected).norm() <= 0.01 * expected.norm()


@every
@pytest.mark.parametrize("size", [1.0, 1e4, 1e15], ids=["usual", "large", "huge"])
def test_padding_moves_nothing(name: str, size: float) -> None:
    module, qkv = make(name), tokens(65)
    keep = torch.rand(2, 65) > 0.3
    keep[1] = torch.arange(65) < 40
    if not lln.zoo.describe(name).padding:
        with pytest.raises(ValueError, match="padding"):
            run(module, *qkv, key_padding_mask=keep)
        return
    kept = keep[:, None, :, None]
    other = [torch.where(kept, x, size * torch.randn_like(x)) for x in qkv]
    before, after = (run(module, *x, key_padding_mask=keep).where(kept, 0.0) for x in (qkv, other))
    assert before.isfinite().all()
    same(after, before)
    if size == 1.0:  # without the mask it would have
        assert (run(module, *other).where(kept, 0.0) - run(module, *qkv).where(kept, 0.0)).abs().max() > 1e-3


@every
def test_padding_is_as_if_it_were_not_there(name: str) -> None:
    if not lln.zoo.describe(name).padding:
        pytest.skip("refuses padding")
    module, qkv = make(name), tokens(65)
    keep = torch.rand(2, 65) > 0.3
    keep[1] = torch.arange(65) < 40
    output = run(module, *qkv, key_padding_mask=keep)
    for sample in range(2):
        alone = run(module, *(x[sample : sample + 1, :, keep[sample]] for x in qkv))
        same(output[sample : sample + 1, :, keep[sample]], alone)


@every
def test_padding_gets_no_gradient(name: str) -> None:
    if not lln.zoo.describe(name).padding:
        pytest.skip("refuses padding")
    qkv = [x.requires_grad_() for x in tokens(65)]
    keep = torch.arange(65) < torch.tensor([[65], [40]])
    output = run(make(name), *qkv, key_padding_mask=keep)
    output.where(keep[:, None, :, None], 0.0).square().sum().backward()
    for label, x in zip(("query", "key", "value"), qkv, strict=True):
        if label not in ignored(name):
            assert x.grad is not None
            assert x.grad.isfinite().all()
            assert x.grad[1, :, 40:].abs().max() == 0, label


@every
def test_without_any_key_there_is_nothing(name: str) -> None:
    if not lln.zoo.describe(name).padding:
        pytest.skip("refuses padding")
    module, qkv = make(name), [x.requires_grad_() for x in tokens(65)]
    keep = torch.ones(2, 65, dtype=torch.bool)
    full = run(module, *qkv, key_padding_mask=keep)
    keep[1] = False
    output = run(module, *qkv, key_padding_mask=keep)
    assert output[1].abs().max() == 0
    same(output[0], full[0])
    output.sum().backward()
    assert all(x.grad is None or x.grad.isfinite().all() for x in qkv)


@every
@pytest.mark.parametrize("size", [1.0, 1e4], ids=["usual", "large"])
@pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "padded"])
def test_the_future_moves_nothing(name: str, size: float, padded: bool) -> None:
    description = lln.zoo.describe(name)
    module, qkv = make(name), tokens(130)
    if not description.causal:
        with pytest.raises(ValueError, match="causal"):
            run(module, *qkv, is_causal=True)
        return
    keep = torch.rand(2, 130) > 0.3 if padded and description.padding else None
    output = run(module, *qkv, is_causal=True, key_padding_mask=keep)
    assert output.isfinite().all()
    for past in (1, 63, 64, 65, 100):
        other = [torch.cat((x[:, :, :past], size * torch.randn_like(x[:, :, past:])), dim=2) for x in qkv]
        changed = run(module, *other, is_causal=True, key_padding_mask=keep)
        same(changed[:, :, :past], output[:, :, :past])
        assert (changed[:, :, past:] - output[:, :, past:]).abs().max() > 1e-3


@pytest.mark.parametrize("name", CAUSAL)
def test_the_length_of_the_future_moves_nothing(name: str) -> None:
    module, qkv = make(name), tokens(130)
    output = run(module, *qkv, is_causal=True)
    for past in (1, 63, 65):
        same(run(module, *(x[:, :, :past] for x in qkv), is_causal=True), output[:, :, :past])


@every
def test_cross_attention(name: str) -> None:
    query, _, _ = tokens(33)
    _, key, value = tokens(65, seed=3)
    module = make(name)
    if not lln.zoo.describe(name).cross:
        with pytest.raises(ValueError, match="as many queries as keys"):
            run(module, query, key, value)
        return
    for q, k, v in ((query, key, value), (key, query, query)):
        output = run(module, q, k, v)
        assert output.shape == (*q.shape[:3], v.shape[3])
        assert output.isfinite().all()
    if lln.zoo.describe(name).padding:
        keep = torch.arange(65) < torch.tensor([[65], [40]])
        blanked = [torch.where(keep[:, None, :, None], x, 1e4) for x in (key, value)]
        same(run(module, query, *blanked, key_padding_mask=keep), run(module, query, key, value, key_padding_mask=keep))


@every
def test_samples_do_not_meet(name: str) -> None:
    module, qkv = make(name), tokens(65)
    same(run(module, *(x[:1] for x in qkv)), run(module, *qkv)[:1])


@every
def test_fewer_key_heads(name: str) -> None:
    module, (query, key, value) = make(name), tokens(65)
    few = key[:, :1], value[:, :1]
    same(run(module, query, *few), run(module, query, *(x.repeat_interleave(2, dim=1) for x in few)))


@every
def test_wider_values(name: str) -> None:
    """Every mechanism takes values of another width, or declares that it does not."""
    query, key, value = tokens(65)
    wide = torch.cat((value, value[..., :3]), dim=-1)
    module = make(name)
    try:
        output = run(module, query, key, wide)
    except ValueError:
        return
    assert output.shape == wide.shape
    same(output[..., :DIM], run(module, query, key, value))


@every
def test_seeded(name: str) -> None:
    qkv = tokens(65)
    first, again, other = (run(make(name, seed=seed).train(), *qkv) for seed in (0, 0, 5))
    assert torch.equal(first, again)
    if not lln.zoo.describe(name).random and not list(make(name).parameters()):
        assert torch.equal(first, other)


@every
def test_evaluation_is_deterministic(name: str) -> None:
    module, qkv = make(name), tokens(65)
    first = module(*qkv)
    torch.manual_seed(99)
    assert torch.equal(module(*qkv), first)


@every
def test_state_dict(name: str) -> None:
    first, second, qkv = make(name, seed=0), make(name, seed=5), tokens(65)
    second.load_state_dict(first.state_dict())
    assert torch.equal(run(first, *qkv), run(second, *qkv))


@every
def test_gradients_reach_everything(name: str) -> None:
    module = make(name, max_len=65).train()
    inputs = dict(zip(("query", "key", "value"), (x.requires_grad_() for x in tokens(65)), strict=True))
    run(module, *inputs.values()).square().sum().backward()
    for label, x in (*inputs.items(), *module.named_parameters()):
        if label not in ignored(name):
            assert x.grad is not None, label
            assert x.grad.isfinite().all(), label
            assert x.grad.abs().max() > 0, label


# alpha and beta that are matched to the input are constants to autograd (lln.matching.moments), so they are given here.
CONSTANT = {"lln": {"alpha": 0.9, "beta": 1.1}, "lln_diag": {"alpha": 0.9, "beta": 1.1}}
# Random only when they are built.
DETERMINISTIC = [name for name in NAMES if not lln.zoo.describe(name).random or name in ("performer", "rfa")]


@pytest.mark.parametrize("name", DETERMINISTIC)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_gradcheck(name: str, is_causal: bool) -> None:
    description = lln.zoo.describe(name)
    if is_causal and not description.causal:
        pytest.skip("refuses to be causal")
    module = make(name, heads=1, dim=4, max_len=4, **CONSTANT.get(name, {})).double()
    qkv = [x.requires_grad_() for x in tokens(4, batch=1, heads=1, dim=4, dtype=torch.float64)]
    mask = torch.tensor([[True, False, True, True]]) if description.padding else None

    def attention(*inputs: Tensor) -> Tensor:
        query, key, value, *parameters = inputs
        state = dict(zip(dict(module.named_parameters()), parameters, strict=True))
        options = {"is_causal": is_causal, "key_padding_mask": mask}
        output = torch.func.functional_call(module, state, (query, key, value), options)
        return output if mask is None else output[:, :, mask[0]]

    assert torch.autograd.gradcheck(lambda *x: attention(*x, *module.parameters()), qkv)
    if list(module.parameters()):  # in random directions only: a position network has thousands
        fixed = [x.detach() for x in qkv]
        assert torch.autograd.gradcheck(lambda *p: attention(*fixed, *p), tuple(module.parameters()), fast_mode=True)


def test_unknown_names_and_options_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no mechanism is called 'sofmax'; there are: softmax"):
        lln.zoo.build("sofmax", num_heads=1, head_dim=4)
    with pytest.raises(ValueError, match="no mechanism is called"):
        lln.zoo.describe("sofmax")
    with pytest.raises(TypeError, match="performer has no option features; its options are: num_features, seed"):
        lln.zoo.build("performer", num_heads=1, head_dim=4, features=3)
    with pytest.raises(ValueError, match="max_len="):
        lln.zoo.build("linformer", num_heads=1, head_dim=4)


@every
def test_other_heads_and_sizes_are_refused(name: str) -> None:
    module = make(name)
    with pytest.raises(ValueError, match="was built for num_heads=2 and head_dim=8"):
        run(module, *tokens(5, heads=1))
    with pytest.raises(ValueError, match="must be"):
        run(module, *(x[0] for x in tokens(5)))
    if lln.zoo.describe(name).needs_max_len:
        with pytest.raises(ValueError, match="max_len=160 tokens"):
            run(module, *tokens(161))


@every
def test_description_is_complete(name: str) -> None:
    description = lln.zoo.describe(name)
    for field in fields(description):
        if field.name not in ("learned", "left_outside"):  # these may be nothing
            assert getattr(description, field.name) not in ("", None), field.name
    assert description.name == name
    assert ":" in description.paper, "authors: title"
    assert description.year >= 2017
    assert "N" in description.time
    assert "N" in description.memory
    assert description.learned or not list(make(name).parameters())
    assert description.random == ("seed" in signature(type(make(name))).parameters)
    assert (
        any(digit in description.checked_against for digit in "0123456789") or "explicit" in description.checked_against
    )


def test_table_and_documentation() -> None:
    rows = table()
    assert [row["name"] for row in rows] == [f"`{name}`" for name in NAMES]
    assert all(all(cell for cell in row.values()) for row in rows)
    assert markdown().count("\n") == len(rows) + 2
    page = (Path(__file__).parents[2] / "docs" / "zoo.md").read_text(encoding="utf-8")
    assert markdown() in page, "run lln docs"
    prose = page.partition("<!-- zoo: end -->")[2]
    assert [name for name in NAMES if f"**`{name}`**" not in prose] == []
