"""Bad input is refused with the argument's name, what it was and what to do."""

import functools

import pytest
import torch

import lln
from lln.problem import Problem

B, H, N, D = 2, 4, 6, 8


def make(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype)


good = functools.partial(make, B, H, N, D)
MISTAKES = {
    "rank": (lambda: (make(B, N, D), good(), good()), {}, ValueError, r"query .*\(2, 6, 8\).*reshape"),
    "value rank": (lambda: (good(), good(), make(B, N, D)), {}, ValueError, r"value .*\(2, 6, 8\)"),
    "not a tensor": (lambda: (good(), [1.0], good()), {}, TypeError, "key must be a torch.Tensor, got list"),
    "heads": (lambda: (good(), make(B, 3, N, D), make(B, 3, N, D)), {}, ValueError, "4 query heads.*3 key heads"),
    "value heads": (
        lambda: (good(), good(), make(B, 2, N, D)),
        {},
        ValueError,
        r"same heads and tokens.*\(2, 2, 6, 8\)",
    ),
    "value tokens": (lambda: (good(), good(), make(B, H, 5, D)), {}, ValueError, r"same heads and tokens"),
    "features": (lambda: (good(), make(B, H, N, 5), good()), {}, ValueError, "same number of features"),
    "batch": (lambda: (good(), make(3, H, N, D), good()), {}, ValueError, "key has batch 3 but query has batch 2"),
    "dtypes": (lambda: (good(), good(dtype=torch.float64), good()), {}, TypeError, "key is torch.float64 but query"),
    "integers": (lambda: tuple(good().long() for _ in "qkv"), {}, TypeError, r"query must be float16.*\.float\(\)"),
    "no features": (lambda: (make(B, H, N, 0), make(B, H, N, 0), good()), {}, ValueError, "one feature"),
    "4D mask": (
        ...,
        {"key_padding_mask": torch.ones(B, 1, N, N, dtype=torch.bool)},
        ValueError,
        r"\(2, 1, 6, 6\).*is_causal",
    ),
    "float mask": (..., {"key_padding_mask": torch.zeros(B, N)}, TypeError, r"torch.float32.*mask == 0"),
    "0/1 mask": (..., {"key_padding_mask": torch.ones(B, N, dtype=torch.long)}, TypeError, r"mask\.bool\(\)"),
    "mask shape": (
        ...,
        {"key_padding_mask": torch.ones(B, 5, dtype=torch.bool)},
        ValueError,
        r"\(2, 6\).*got shape \(2, 5\)",
    ),
    "mask list": (..., {"key_padding_mask": [True] * 6}, TypeError, "got list"),
    "lengths count": (..., {"key_padding_mask": torch.tensor([1, 2, 3])}, ValueError, "3 lengths for a batch of 2"),
    "lengths long": (..., {"key_padding_mask": torch.tensor([1, 7])}, ValueError, r"between 0 and 6, got \[1, 7\]"),
    "lengths negative": (..., {"key_padding_mask": torch.tensor([1, -1])}, ValueError, r"\[1, -1\]"),
}
SCALES = {
    "alpha zero": ({"alpha": 0.0}, ValueError, "alpha must be positive and finite, got 0.0"),
    "alpha negative": ({"alpha": -1}, ValueError, "alpha must be positive"),
    "beta nan": ({"beta": float("nan")}, ValueError, "beta must be positive"),
    "alpha infinite": ({"alpha": float("inf")}, ValueError, "alpha must be positive"),
    "alpha tensor": ({"alpha": torch.tensor([1.0, 1.0, 0.0, 1.0])}, ValueError, "alpha must be positive"),
    "alpha shape": ({"alpha": torch.ones(3)}, ValueError, r"alpha must have shape.*\(4,\).*got \(3,\)"),
    "beta 4D": ({"beta": torch.ones(B, H, N, 1)}, ValueError, r"beta must have shape"),
    "alpha text": ({"alpha": "1"}, TypeError, "alpha must be a number"),
    "alpha integers": ({"alpha": torch.ones(4, dtype=torch.long)}, TypeError, "alpha must be a floating point"),
    "matching": ({"matching": "moments"}, ValueError, "matching must be one of 'linear', 'variance', 'entropy', got"),
    "scope": ({"scope": "head"}, ValueError, "scope must be one of 'sample', 'batch'"),
    "causal batch": ({"scope": "batch", "is_causal": True}, ValueError, 'scope="sample"'),
}
BLOCKS = {
    "zero": (0, ValueError, "block_size must be at least 1, got 0"),
    "negative": (-4, ValueError, "block_size"),
    "float": (8.0, TypeError, "block_size must be an int, got float"),
    "bool": (True, TypeError, "block_size must be an int"),
}


@pytest.mark.parametrize("name", ["lln_attention", "block_diagonal_attention", "lln_diag_attention"])
@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_tensors_and_masks(name, mistake):
    inputs, options, error, text = MISTAKES[mistake]
    with pytest.raises(error, match=text):
        getattr(lln, name)(*((good(), good(), good()) if inputs is ... else inputs()), **options)


@pytest.mark.parametrize("name", ["lln_attention", "lln_diag_attention"])
@pytest.mark.parametrize("mistake", list(SCALES))
def test_settings(name, mistake):
    options, error, text = SCALES[mistake]
    with pytest.raises(error, match=text):
        getattr(lln, name)(good(), good(), good(), **options)


@pytest.mark.parametrize("name", ["block_diagonal_attention", "lln_diag_attention"])
@pytest.mark.parametrize("mistake", list(BLOCKS))
def test_block_size(name, mistake):
    block_size, error, text = BLOCKS[mistake]
    with pytest.raises(error, match=text):
        getattr(lln, name)(good(), good(), good(), block_size=block_size)


def test_what_needs_equal_lengths_names_what_to_use():
    short = make(B, H, 3, D)
    with pytest.raises(ValueError, match=r"block-diagonal attention needs as many queries as keys.*lln_attention"):
        lln.lln_diag_attention(short, good(), good())
    with pytest.raises(ValueError, match="is_causal=True needs as many queries"):
        lln.lln_attention(short, good(), good(), is_causal=True)


def test_unknown_options_are_not_swallowed():
    for option in ({"attn_mask": None}, {"dropout_p": 0.1}, {"scale": 1.0}):
        with pytest.raises(TypeError, match=next(iter(option))):
            lln.lln_attention(good(), good(), good(), **option)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("lln_attention", {"block_size": 32}),
        ("lln_attention", {"near": "window"}),
        ("block_diagonal_attention", {"alpha": 1.0}),
        ("block_diagonal_attention", {"form": "unbiased"}),
        ("block_diagonal_attention", {"matching": "entropy"}),
        ("block_diagonal_attention", {"query_padding_mask": torch.ones(B, N, dtype=torch.bool)}),
        ("lln_diag_attention", {"query_padding_mask": torch.ones(B, N, dtype=torch.bool)}),
    ],
    ids=str,
)
def test_options_of_another_attention_are_refused(name, option):
    with pytest.raises(TypeError, match=f"{name} has no option {next(iter(option))}; its options are: .*is_causal"):
        getattr(lln, name)(good(), good(), good(), **option)


@pytest.mark.parametrize("name", ["block_diagonal_attention", "lln_diag_attention"])
def test_near_cannot_be_left_empty(name):
    with pytest.raises(ValueError, match="near must be one of"):
        getattr(lln, name)(good(), good(), good(), near=None)


def test_a_state_without_neighbours_has_no_window():
    with pytest.raises(ValueError, match="give block_size="):
        lln.LLNState.empty(B, H, D, near="window")


@pytest.mark.parametrize("option", [{"is_casual": True}, {"near": "window"}, {"form": "unbiased"}], ids=str)
def test_a_softmax_matrix_refuses_other_options(option):
    with pytest.raises(TypeError, match=next(iter(option))):
        lln.attention_matrix(good(), good(), kind="softmax", **option)


def test_matrix_and_moments():
    with pytest.raises(ValueError, match="kind must be one of"):
        lln.attention_matrix(good(), good(), kind="linear")
    with pytest.raises(ValueError, match="alpha and beta belong to LLN"):
        lln.attention_matrix(good(), good(), kind="softmax", alpha=1.0)
    with pytest.raises(ValueError, match="matching must be one of"):
        lln.match_moments(good(), good(), matching="none")
    with pytest.raises(ValueError, match="leave query_padding_mask out"):
        lln.match_moments(good(), good(), is_causal=True, query_padding_mask=torch.tensor([6, 6]))


@pytest.mark.parametrize("kind", ["lln", "softmax"])
def test_a_block_size_without_blocks_is_refused(kind):
    with pytest.raises(ValueError, match="block_size belongs"):
        lln.attention_matrix(torch.randn(1, 1, 4, 8), torch.randn(1, 1, 4, 8), kind=kind, block_size=3)


def test_key_heads_of_a_state_must_divide_its_heads():
    with pytest.raises(ValueError, match="multiple of key_heads=3"):
        lln.LLNState.empty(1, 2, 8, key_heads=3, block_size=4)


def test_a_problem_is_validated_once_and_frozen(tokens):
    problem = Problem.make(*tokens(N=8), far=True)
    with pytest.raises(AttributeError):
        problem.is_causal = True
    with pytest.raises(TypeError, match="unexpected keyword"):
        Problem.make(*tokens(N=8), far=True, blok=3)
    for wrong in ({"matching": "moments"}, {"form": "papr"}, {"near": "windows"}, {"scope": "head"}):
        with pytest.raises(ValueError, match="must be one of"):
            Problem.make(*tokens(N=8), far=True, **wrong)
