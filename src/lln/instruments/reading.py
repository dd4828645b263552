"""From what a user gives to the `Rows` that instruments read: the one place that checks it and takes padding out.

An instrument takes an explicit stochastic matrix (..., N, M), or query and key with the options of
`lln.attention_matrix`.

Shapes: B batch, H heads, N queries, M keys, D features.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypedDict, cast

import torch
from torch import Tensor

from lln.checks import FLOATS, check_block_size, check_choice, check_inputs
from lln.forms import in_paper_form
from lln.functional import KINDS, Kind
from lln.instruments.rows import CHUNK_ENTRIES, CHUNK_ROWS, LLNRows, MatrixRows, MeanRows, Rows, SoftmaxRows
from lln.masks import read_padding, read_paddings
from lln.matching.curves import MATCHINGS, Form, Matching
from lln.matching.moments import SCOPES, Scope, chunks
from lln.precision import accumulator
from lln.problem import NEARS, Centers, FarOptions, Near, Problem

# How far the sum of a row may be from 1, by the precision the matrix was computed in.
SUM_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class Options(TypedDict, total=False):
    """What may follow (query, key): the options of `lln.attention_matrix`. A matrix takes only the two masks.

    `features` are a (B, H, N, F) and b (B, H, M, F) of the kernel exp(a_i) . exp(b_j), where LLN attention has learned
    them: its matching, form and scales do not count then.
    """

    kind: Kind
    block_size: int
    near: Near
    features: tuple[Tensor, Tensor] | None
    key_padding_mask: Tensor | None
    is_causal: bool
    alpha: float | Tensor | None
    beta: float | Tensor | None
    matching: Matching
    scope: Scope
    form: Form
    centers: Centers | None


@torch.no_grad()
def measure(
    instrument: Callable[[Rows], Tensor], attention: Tensor, key: Tensor | None, options: Options, *, fields: int = 1
) -> Tensor:
    """The value of `instrument` for each head: it turns `Rows` into (G, fields), and the result is (leading, fields).

    With one field the instrument gives (G,) and the result has the leading dimensions. NaN where all is padding.
    """
    leading, pieces = read(attention, key, options)
    shape = () if fields == 1 else (fields,)
    results = [
        instrument(piece)
        if piece.num_rows > 0 and piece.num_columns > 0
        else torch.full((piece.heads, *shape), torch.nan, device=attention.device)
        for piece in pieces
    ]
    return torch.cat(results).to(accumulator(attention.dtype)).reshape(leading + shape)


def read(attention: Tensor, key: Tensor | None, options: Options) -> tuple[torch.Size, list[Rows]]:
    """The leading dimensions, and pieces that hold all their heads in order."""
    unknown = set(options) - set(Options.__annotations__)
    if unknown:
        raise TypeError(f"unknown option {', '.join(sorted(unknown))}; there are {', '.join(Options.__annotations__)}")
    if not isinstance(attention, Tensor):
        raise TypeError(f"a torch.Tensor is needed, got {type(attention).__name__}; convert with torch.as_tensor")
    if key is None:
        return _read_matrix(attention, options)
    return attention.shape[:2], list(_read_inputs(attention, key, options))


def _read_matrix(matrix: Tensor, options: Options) -> tuple[torch.Size, list[Rows]]:
    extra = sorted(set(options) - {"key_padding_mask", "is_causal"})
    if extra:
        raise ValueError(f"{', '.join(extra)} is for (query, key); a matrix takes only key_padding_mask and is_causal")
    if matrix.dim() < 2 or 0 in matrix.shape:
        raise ValueError(
            f"a matrix must be (..., N, M) with at least one row and column, got shape {tuple(matrix.shape)}"
        )
    if matrix.dtype not in FLOATS:
        raise TypeError(f"a matrix must be float16, bfloat16, float32 or float64, got {matrix.dtype}")
    is_causal, mask = options.get("is_causal", False), options.get("key_padding_mask")
    rows, columns = matrix.shape[-2:]
    if is_causal and rows != columns:
        raise ValueError(f"is_causal=True needs as many rows as columns, got a matrix of shape {tuple(matrix.shape)}")
    if mask is None:
        groups = [matrix.flatten(0, -3) if matrix.dim() > 2 else matrix[None]]
    else:
        if matrix.dim() != 4:
            raise ValueError(f"key_padding_mask needs a matrix (B, H, N, M), got shape {tuple(matrix.shape)}")
        keep = cast(Tensor, read_padding(mask, matrix.mT))
        groups = [
            (sample[:, kept] if rows == columns else sample)[:, :, kept]
            for sample, kept in zip(matrix, keep, strict=True)
        ]
    for group in groups:
        _check_stochastic(group, is_causal)
    return matrix.shape[:-2], [MatrixRows(group, is_causal=is_causal) for group in groups]


def _check_stochastic(matrix: Tensor, is_causal: bool) -> None:
    """Refuse what is not a right stochastic matrix, with the first entry or row that shows it."""
    if not bool(matrix.isfinite().all()):
        raise ValueError("the attention matrix holds NaN or infinite entries; look for them with P.isfinite()")
    if bool((matrix < 0).any()):
        raise ValueError(f"the attention matrix holds a negative entry, {matrix.min().item():.3g}: weights are >= 0")
    if matrix.shape[-1] > 0:
        sums = matrix.sum(dim=-1, dtype=accumulator(matrix.dtype))
        off = (sums - 1).abs()
        if bool((off > SUM_TOLERANCE[matrix.dtype]).any()):
            worst = sums.flatten()[off.argmax()].item()
            raise ValueError(
                f"the rows of an attention matrix must sum to 1, one sums to {worst:.6g}; divide by the sums, "
                "and leave padding out with key_padding_mask"
            )
    if is_causal and bool(matrix.triu(1).any()):
        raise ValueError("is_causal=True, but the matrix has weight above its diagonal, where the future is")


def _read_inputs(query: Tensor, key: Tensor, options: Options) -> Iterator[Rows]:
    kind, is_causal = options.get("kind", "lln"), options.get("is_causal", False)
    check_choice("kind", kind, KINDS)
    check_choice("matching", options.get("matching", "variance"), MATCHINGS)
    check_choice("scope", options.get("scope", "sample"), SCOPES)
    near = kind in ("block_diagonal", "lln_diag")
    same_length = f"kind={kind!r}" if near else "is_causal=True" if is_causal else None
    check_inputs(query, key, same_length=same_length)
    block_size = options.get("block_size", 64)
    check_block_size(block_size)
    check_choice("near", options.get("near", "blocks"), NEARS)
    if options.get("features") is not None and kind not in ("lln", "lln_diag"):
        raise ValueError(f"features belong to LLN attention, not to kind={kind!r}; leave them out")
    scaled = scaled_inputs(query, key, options) if kind in ("lln", "lln_diag") else None
    if scaled is None and (options.get("alpha") is not None or options.get("beta") is not None):
        raise ValueError(f"alpha and beta belong to LLN attention, not to kind={kind!r}; leave them out")
    keep_query, keep_key = read_paddings(query, key, options.get("key_padding_mask"), None)
    check_finite("query", query, keep_query)
    check_finite("key", key, keep_key)

    def make(q: Tensor, k: Tensor, a: Tensor | None, b: Tensor | None) -> Rows:
        neighbours: dict[str, Any] = {"block_size": block_size, "near": options.get("near", "blocks")} if near else {}
        softmax = SoftmaxRows(q, k, is_causal=is_causal, **neighbours)
        if a is None or b is None:
            return softmax
        far = LLNRows(a, b, is_causal=is_causal)
        return far if kind == "lln" else MeanRows(far, softmax)

    tensors = [query, repeat_heads(key, query), *(scaled or (None, None))]
    sides = [keep_query, keep_key, keep_query, keep_key]
    if keep_key is None:
        groups = [[None if x is None else x.flatten(0, 1) for x in tensors]]
    else:
        groups = [
            [
                None if x is None else x[s] if keep is None else x[s][:, keep[s]]
                for x, keep in zip(tensors, sides, strict=True)
            ]
            for s in range(query.shape[0])
        ]
    for q, k, a, b in groups:
        assert q is not None
        assert k is not None
        # Few heads at a time when rows are long, so that a chunk still has enough rows.
        heads = max(1, CHUNK_ENTRIES // max(k.shape[1] * min(q.shape[1], CHUNK_ROWS), 1))
        for part in chunks(q.shape[0], heads):
            yield make(q[part], k[part], None if a is None else a[part], None if b is None else b[part])


def scaled_inputs(query: Tensor, key: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """a (B, H, N, F) and b (B, H, M, F) of the kernel exp(a_i) . exp(b_j), see `lln.forms`."""
    features = options.get("features")
    if features is not None:
        return features
    problem = in_paper_form(_problem(query, key, options))
    alpha, beta = problem.scales()
    dtype = accumulator(query.dtype)
    a = problem.query.to(dtype) * alpha[..., None]
    b = repeat_heads(problem.key, query).to(dtype) * beta[..., None]
    if problem.key_weight is not None:
        b = b + problem.key_weight[..., None]
    return a, b


def scales_of(query: Tensor, key: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """alpha and beta, given or matched, as tensors that broadcast to (B, H, tokens)."""
    problem = in_paper_form(_problem(query, key, options))
    return problem.scales()


def _problem(query: Tensor, key: Tensor, options: Options) -> Problem:
    given: dict[str, Any] = {name: x for name, x in options.items() if name in FarOptions.__annotations__}
    return Problem.make(query, key, key, far=True, near=None, **given)


def repeat_heads(key: Tensor, query: Tensor) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    return key if groups == 1 else key.repeat_interleave(groups, dim=1)


def check_finite(name: str, x: Tensor, keep: Tensor | None) -> None:
    """Refuse NaN and infinity in kept tokens."""
    if bool(x.sum().isfinite()):  # one number decides it for almost every input
        return
    finite = x.isfinite().all(dim=-1).all(dim=1)  # (B, tokens)
    if not bool((finite if keep is None else finite | ~keep).all()):
        raise ValueError(f"{name} holds NaN or infinite entries; look for them with {name}.isfinite()")
