"""The mechanism: Linear Log-Normal attention (section 4 of the paper), softmax attention inside blocks, and both.

Shapes: B batch, H heads, N queries, M keys, D features of a head, Dv value width. Tensors are (B, H, N, D), as in
`torch.nn.functional.scaled_dot_product_attention`; key and value may have fewer heads, of which H is a multiple (GQA).

`key_padding_mask` is a (B, M) bool tensor with True = keep, or a (B,) integer tensor of lengths. What stands in padding
never reaches a kept token's result, and a sample without any kept key gives zeros. The result has the input's dtype;
sums run in at least float32. Under autocast, inputs and result have its dtype, as with SDPA.

Each function makes a `lln.problem.Problem` of its arguments and gives it to the first backend that can compute it:
see `lln.backends`.
"""

from typing import Any, Literal, Unpack, get_args

import torch
from torch import Tensor

from lln.backends import CALLS, attention
from lln.checks import check_choice, check_inputs
from lln.forms import centered
from lln.matching.curves import Form, Matching
from lln.matching.moments import Scope
from lln.packed import attend_packed
from lln.problem import (
    NEARS,
    Centers,
    FarOptions,
    Near,
    NearOptions,
    Options,
    Problem,
    QueryOptions,
    autocast_like_sdpa,
    with_signature,
)
from lln.repeats import Signature, options_signature, signature_of

Kind = Literal["lln", "lln_diag", "block_diagonal", "softmax"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@with_signature(QueryOptions)
def lln_attention(query: Tensor, key: Tensor, value: Tensor, **options: Unpack[QueryOptions]) -> Tensor:
    """Linear Log-Normal attention in O(N D²) time and O(N D) memory (eq. 8):

        out_i = sum_j P_ij v_j        P_ij = exp(alpha q_i) . exp(beta k_j) / sum_m exp(alpha q_i) . exp(beta k_m)

    alpha and beta follow from the moments of query and key unless they are given (eq. 10), see `lln.match_moments`.

    Args:
        query: (B, H, N, D).
        key: (B, H_k, M, D).
        value: (B, H_k, M, Dv).
        key_padding_mask: (B, M) bool with True = keep, or (B,) lengths.
        cu_seqlens: where packed sequences start and the last ends, for a batch of 1: (sequences + 1,) int32, see
            `lln.packed`.
        query_padding_mask: which queries count in the statistics; by default, when N = M, those of `key_padding_mask`.
        is_causal: query i attends to the keys up to i, and so do its statistics; needs N = M. By default it is not.
        alpha, beta: positive numbers, or tensors of shape (), (H,), (B, H) or (B, H, tokens), which may require
            gradients; by default matched.
        matching: "variance" (the default), "entropy" or "linear", see `lln.match_moments`.
        scope: "sample" (the default) or "batch", see `lln.match_moments`.
        form: "paper" (the default), "unbiased" or "decomposed", see `lln.forms`.
        centers: m_q and m_k of the decomposed form, (H, D) or (B, H, D) and (H_k, D) or (B, H_k, D); by default means
            of the sample.
        key_weight: log-weights of the keys, (B, H, M) with 1 in place of B or H where they share them: added to all
            features of beta k, and not part of what is matched. They must be finite (`key_padding_mask` hides keys)
            and may require gradients.

    Returns:
        (B, H, N, Dv) in the dtype of the input.

    Raises:
        TypeError, ValueError: what cannot be honoured, with what to use instead.

    Example:
        >>> query, key, value = torch.randn(3, 2, 8, 100, 64)
        >>> lln.lln_attention(query, key, value, key_padding_mask=torch.tensor([100, 60])).shape
        torch.Size([2, 8, 100, 64])
    """
    return _attend(query, key, value, True, None, options)


@with_signature(NearOptions)
def block_diagonal_attention(query: Tensor, key: Tensor, value: Tensor, **options: Unpack[NearOptions]) -> Tensor:
    """Softmax attention inside consecutive blocks of `block_size` kept tokens, or in a window around each token.

    Args:
        query, key, value, key_padding_mask, cu_seqlens: as in `lln_attention`, with N = M, which may be any number.
        is_causal: a query attends to no key after its own.
        block_size: tokens of a block or of a window, 64 by default.
        near: "blocks" (the default): a query attends to the keys of its block; "window": the `block_size` kept tokens
            around it, its own included, with `is_causal=True` the last `block_size`.

    Returns:
        (B, H, N, Dv) in the dtype of the input; zeros for a token that is not kept.

    Raises:
        TypeError, ValueError: as `lln_attention`.

    Example:
        >>> query, key, value = torch.randn(3, 2, 8, 100, 64)
        >>> lln.block_diagonal_attention(query, key, value, near="window", block_size=32).shape
        torch.Size([2, 8, 100, 64])
    """
    return _attend(query, key, value, False, "blocks", options)


@with_signature(Options)
def lln_diag_attention(query: Tensor, key: Tensor, value: Tensor, **options: Unpack[Options]) -> Tensor:
    """The paper's layer (figure 3): the average of LLN attention, for what is far, and block-diagonal attention, for
    what is near.

    Args:
        query, key, value: as in `lln_attention`, with N = M.
        **options: those of `lln_attention` but `query_padding_mask`, and those of `block_diagonal_attention`.

    Returns:
        (B, H, N, Dv) in the dtype of the input.

    Raises:
        TypeError, ValueError: as `lln_attention`.

    Example:
        >>> query, key, value = torch.randn(3, 2, 8, 100, 64)
        >>> lln.lln_diag_attention(query, key, value, is_causal=True, block_size=32).shape
        torch.Size([2, 8, 100, 64])
    """
    check_choice("near", options.get("near", "blocks"), NEARS)  # None would leave LLN attention alone
    return _attend(query, key, value, True, "blocks", options)


def attention_matrix(
    query: Tensor, key: Tensor, *, kind: Kind = "lln", block_size: int | None = None, **options: Unpack[FarOptions]
) -> Tensor:
    """The explicit attention matrix (B, H, N, M) of one of our mechanisms or of softmax, for inspection.

    An attention is linear in its values, so its matrix is what it makes of the identity: the mechanism itself runs.
    It needs O(N M) memory; the rows of a sample without any kept key are zero.

    Args:
        query, key: as in `lln_attention`.
        kind: "lln", "lln_diag", "block_diagonal" or "softmax".
        block_size: of the blocks, if the kind has them; 64 by default.
        **options: those of the attention.

    Returns:
        (B, H, N, M) in the dtype of the input; rows sum to 1.

    Raises:
        TypeError, ValueError: as `lln_attention`, and for options that the kind does not have.

    Example:
        >>> query, key = torch.randn(2, 1, 4, 50, 16)
        >>> lln.attention_matrix(query, key, kind="softmax").sum(dim=-1).allclose(torch.ones(1, 4, 50))
        True
    """
    check_choice("kind", kind, KINDS)
    check_inputs(query, key)
    identity = torch.eye(key.shape[2], dtype=key.dtype, device=key.device).expand(*key.shape[:3], key.shape[2])
    blocks: dict[str, Any] = {} if block_size is None else {"block_size": block_size}
    if block_size is not None and kind in ("lln", "softmax"):
        raise ValueError(f"block_size belongs to attention among neighbours, not to kind={kind!r}; leave it out")
    if kind == "lln":
        return lln_attention(query, key, identity, **options)
    if kind == "lln_diag":
        return lln_diag_attention(query, key, identity, **blocks, **options)
    if options.get("alpha") is not None or options.get("beta") is not None:
        raise ValueError(f"alpha and beta belong to LLN attention, not to kind={kind!r}; leave them out")
    given: Any = {name: x for name, x in options.items() if name not in ("alpha", "beta")}
    if kind == "block_diagonal":
        return block_diagonal_attention(query, key, identity, **blocks, **given)
    from lln.reference import softmax_attention

    return softmax_attention(query, key, identity, **given)


def match_moments(
    query: Tensor,
    key: Tensor,
    *,
    matching: Matching = "variance",
    scope: Scope = "sample",
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    is_causal: bool = False,
    form: Form = "paper",
    centers: Centers | None = None,
) -> tuple[Tensor, Tensor]:
    """alpha and beta for LLN attention that behaves like softmax attention on this query and key (eq. 10).

    Constant queries or keys get 0, one token or scores without variance give s = 0 (`linear`: s² = -b/a): uniform
    attention, which is what softmax does with them. Scores of huge variance count as
    `lln.matching.curves.MAX_SCORE_VARIANCE`.

    Args:
        query, key, key_padding_mask, query_padding_mask, is_causal, form, centers: as in `lln_attention`.
        matching: what agrees: "variance" of ln P, "entropy" of the rows, or "linear", the paper's line.
        scope: "sample": statistics of each sample and head over its kept tokens, with the exact variance of the scores;
            "batch": those of the whole batch, as the paper's code has it.

    Returns:
        Two (B, H) tensors, or (B, H, N) with `is_causal=True`: the alpha of each query and the beta of each key, from
        the tokens up to it. They are constants to autograd.

    Raises:
        TypeError, ValueError: as `lln_attention`.

    Example:
        >>> query, key, value = torch.randn(3, 2, 8, 100, 64)
        >>> alpha, beta = lln.match_moments(query, key)
        >>> output = lln.lln_attention(query, key, value, alpha=alpha, beta=beta)
        >>> output.allclose(lln.lln_attention(query, key, value), atol=1e-5)
        True
    """
    problem = Problem.make(
        query,
        key,
        key,
        far=True,
        key_padding_mask=key_padding_mask,
        query_padding_mask=query_padding_mask,
        is_causal=is_causal,
        matching=matching,
        scope=scope,
        form=form,
        centers=centers,
    )
    alpha, beta = centered(problem)[0].scales()
    return (alpha, beta) if is_causal else (alpha[..., 0], beta[..., 0])


def _attend(query: Tensor, key: Tensor, value: Tensor, far: bool, near: Near | None, options: Any) -> Tensor:
    """LLN attention (`far`), attention among neighbours (`near`, unless the options name another), or their mean."""
    given = options_signature(options)
    signature = None if given is None else signature_of(query, key, value, far, near, given)
    prepared = CALLS.find(signature)
    if prepared is not None:
        return prepared(query, key, value)
    options = {"near": near, **options, "far": far, "signature": signature}
    return autocast_like_sdpa(attend, query, key, value, **options)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    signature: Signature | None = None,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Attention of any kind, `far` and `near` as in `Problem.make`, without regard to autocast."""
    if cu_seqlens is not None:
        return attend_packed(attend, query, key, value, cu_seqlens, **options)
    return attention(Problem.make(query, key, value, **options), signature)
