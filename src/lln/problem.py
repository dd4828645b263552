"""A call becomes a `Problem`: validated once, here, with every option; everything below takes that and nothing else.

Shapes: B batch, H heads, a multiple of H_k key heads, N queries, M keys, D features of a head, V value width.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar, cast, get_args, get_type_hints

import torch
from torch import Tensor

from lln.checks import check_block_size, check_choice, check_inputs, check_scale
from lln.masks import read_paddings
from lln.matching.curves import FORMS, MATCHINGS, Form, Matching
from lln.matching.moments import SCOPES, Scope, check_causal_options, moments_of
from lln.precision import accumulator, autocast_is_on

Near = Literal["blocks", "window"]
NEARS: tuple[Near, ...] = get_args(Near)
Centers = tuple[Tensor, Tensor]


class TokenOptions(TypedDict, total=False):
    """Which tokens there are, and which of them attend to which."""

    key_padding_mask: Tensor | None  # (B, M) bool with True = keep, or (B,) lengths
    cu_seqlens: (
        Tensor | None
    )  # where packed sequences start and the last ends: (sequences + 1,) int32, for a batch of 1
    is_causal: bool  # query i attends to the keys up to i, and so do its statistics; needs N = M


class FarOptions(TokenOptions, total=False):
    """How LLN attention weighs its keys."""

    alpha: float | Tensor | None  # positive numbers or tensors (), (H,), (B, H) or (B, H, tokens); None: matched
    beta: float | Tensor | None
    matching: Matching  # what is matched, see `lln.match_moments`
    scope: Scope  # over which tokens statistics are taken
    form: Form  # "paper", "unbiased" or "decomposed", see `lln.forms`
    centers: Centers | None  # of "decomposed": (H, D) or (B, H, D) for queries, (H_k, D) or (B, H_k, D) for keys
    key_weight: Tensor | None  # log-weights of the keys, (B, H, M), (B, 1, M), (1, H, M) or (1, 1, M)


class QueryOptions(FarOptions, total=False):
    """LLN attention alone may have queries of their own."""

    query_padding_mask: Tensor | None  # which queries count in statistics; by default, when N = M, those of the keys


class NearOptions(TokenOptions, total=False):
    """The softmax attention among neighbours."""

    block_size: int
    near: Near  # "blocks": consecutive blocks of kept tokens; "window": the `block_size` kept tokens around each


class Options(FarOptions, NearOptions, total=False):
    """LLN attention and softmax attention among neighbours."""


DEFAULTS: dict[str, Any] = {
    "key_padding_mask": None,
    "query_padding_mask": None,
    "cu_seqlens": None,
    "is_causal": False,
    "alpha": None,
    "beta": None,
    "matching": "variance",
    "scope": "sample",
    "form": "paper",
    "centers": None,
    "key_weight": None,
    "block_size": 64,
    "near": "blocks",
}


class Tokens(NamedTuple):
    """Which tokens of each sequence count: (B, tokens) bool, or None if all do."""

    keep: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """What is to be computed: LLN attention (`far`), softmax attention among neighbours (`near`), or their mean."""

    query: Tensor  # (B, H, N, D)
    key: Tensor  # (B, H_k, M, D)
    value: Tensor  # (B, H_k, M, V)
    queries: Tokens
    keys: Tokens
    is_causal: bool
    far: bool
    near: Near | None
    block_size: int  # of `near`; 0 without
    alpha: Tensor | None  # broadcasts to (B, H, tokens), in the accumulator's dtype; None: to be matched
    beta: Tensor | None
    matching: Matching
    scope: Scope
    form: Form = "paper"
    centers: Centers | None = None  # each (1 or B, heads, D)
    key_weight: Tensor | None = None  # (B, H, M) log-weights of the keys, added to all features of beta k

    @classmethod
    def make(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        far: bool,
        near: Near | None = None,
        key_padding_mask: Tensor | None = None,
        query_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        alpha: float | Tensor | None = None,
        beta: float | Tensor | None = None,
        matching: Matching = "variance",
        scope: Scope = "sample",
        form: Form = "paper",
        centers: Centers | None = None,
        key_weight: Tensor | None = None,
        block_size: int = 64,
    ) -> "Problem":
        """Validate a call.

        Raises:
            TypeError, ValueError: an argument is not what it should be; the message names it and what to do.
        """
        if far and near is None:
            block_size = 0
        else:
            check_choice("near", str(near), NEARS)
            check_block_size(block_size)
        needs_same_length = "block-diagonal attention" if near else "is_causal=True" if is_causal else None
        check_inputs(query, key, value, same_length=needs_same_length)
        check_choice("matching", matching, MATCHINGS)
        check_choice("scope", scope, SCOPES)
        check_choice("form", form, FORMS)
        check_causal_options(is_causal, scope, query_padding_mask)
        keep_query, keep_key = read_paddings(query, key, key_padding_mask, query_padding_mask)
        return cls(
            query,
            key,
            value,
            Tokens(keep_query),
            Tokens(keep_key),
            is_causal,
            far,
            near,
            block_size,
            None if alpha is None else read_scale("alpha", alpha, query, heads=query.shape[1]),
            None if beta is None else read_scale("beta", beta, key, heads=query.shape[1]),
            matching,
            scope,
            form,
            read_centers(centers, query, key, form=form, is_causal=is_causal),
            None if key_weight is None else read_key_weight(key_weight, query, key, far=far),
        )

    def scales(self) -> tuple[Tensor, Tensor]:
        """alpha and beta, given or else matched, as tensors that broadcast to (B, H, tokens)."""
        if self.alpha is not None and self.beta is not None:
            return self.alpha, self.beta
        moments = moments_of(
            self.query, self.key, self.queries.keep, self.keys.keep, scope=self.scope, is_causal=self.is_causal
        )
        alpha, beta = moments.scales(head_dim=self.query.shape[3], matching=self.matching, form=self.form)
        if not self.is_causal:
            alpha, beta = alpha[..., None], beta[..., None]
        return (alpha if self.alpha is None else self.alpha), (beta if self.beta is None else self.beta)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute: no sample, no query, no key or no value feature."""
        (batch, _, queries, _), (_, _, keys, width) = self.query.shape, self.value.shape
        return batch == 0 or queries == 0 or keys == 0 or width == 0

    def output_of_nothing(self) -> Tensor:
        """The output where there is nothing to compute: zeros (B, H, N, V), with gradients of zero for all inputs."""
        tensors = (self.query, self.key, self.value, self.alpha, self.beta, self.key_weight)
        inputs = (x for x in tensors if x is not None)
        zero = sum(x[..., :0].sum().to(self.query.dtype) for x in inputs)  # sums of nothing: without NaN
        return self.query.new_zeros(*self.query.shape[:3], self.value.shape[3]) + zero


def read_scale(name: str, scale: float | Tensor, tokens: Tensor, *, heads: int) -> Tensor:
    """A given alpha or beta as a tensor that broadcasts to (B, H, tokens)."""
    check_scale(name, scale, batch=tokens.shape[0], heads=heads, tokens=tokens.shape[2])
    x = torch.as_tensor(scale, dtype=accumulator(tokens.dtype), device=tokens.device)
    if x.dim() == 3:
        return x
    return (x if x.dim() == 2 else x.reshape(1, -1))[..., None]


def read_key_weight(key_weight: Tensor, query: Tensor, key: Tensor, *, far: bool = True) -> Tensor:
    """Given log-weights of the keys as (B, H, M), in the accumulator's dtype."""
    if not far:
        raise ValueError(
            "key_weight belongs to LLN attention; softmax attention among neighbours has none, leave it out"
        )
    if not isinstance(key_weight, Tensor) or not key_weight.is_floating_point():
        what = key_weight.dtype if isinstance(key_weight, Tensor) else type(key_weight).__name__
        raise TypeError(f"key_weight must be a floating point tensor, got {what}")
    batch, heads, keys = query.shape[0], query.shape[1], key.shape[2]
    shape = key_weight.shape
    if len(shape) != 3 or shape[0] not in (1, batch) or shape[1] not in (1, heads) or shape[2] != keys:
        raise ValueError(
            f"key_weight must have shape ({batch}, {heads}, {keys}), with 1 for batch or heads where they share it, "
            f"got {tuple(shape)}"
        )
    if key_weight.device != query.device:
        raise ValueError(f"key_weight is on {key_weight.device} but the tokens are on {query.device}; move it there")
    return key_weight.to(accumulator(query.dtype)).expand(batch, heads, keys)


def read_centers(centers: Centers | None, query: Tensor, key: Tensor, *, form: Form, is_causal: bool) -> Centers | None:
    """Given centres of the decomposed form, each (1 or B, heads, D); None for means of the sample and other forms."""
    if centers is None:
        if form == "decomposed" and is_causal:
            raise ValueError(
                'form="decomposed" with is_causal=True cannot use means of the sample, which depend on later tokens; '
                'give centers=, or statistics="running" (or "learned") to a module or to lln.hf.convert, which take no '
                "centers="
            )
        return None
    if form != "decomposed":
        raise ValueError(f'centers belong to form="decomposed", not to form={form!r}; leave them out')
    if not isinstance(centers, tuple) or len(centers) != 2:
        raise TypeError(f"centers must be a tuple of two tensors, (m_q, m_k), got {type(centers).__name__}")
    return _read_center("m_q", centers[0], query), _read_center("m_k", centers[1], key)


def _read_center(name: str, center: Tensor, like: Tensor) -> Tensor:
    if not isinstance(center, Tensor) or not center.is_floating_point():
        what = center.dtype if isinstance(center, Tensor) else type(center).__name__
        raise TypeError(f"{name} of centers must be a floating point tensor, got {what}")
    batch, heads, _, head_dim = like.shape
    if center.shape not in ((heads, head_dim), (batch, heads, head_dim)):
        raise ValueError(
            f"{name} of centers must have shape ({heads}, {head_dim}) or ({batch}, {heads}, {head_dim}), "
            f"got {tuple(center.shape)}"
        )
    if center.device != like.device:
        raise ValueError(f"{name} of centers is on {center.device} but the tokens are on {like.device}; move it there")
    return center.reshape(-1, heads, head_dim)


Result = TypeVar("Result")
Function = TypeVar("Function", bound=Callable[..., Any])


def with_signature(options: type) -> Callable[[Function], Function]:
    """Decorator: the options of a TypedDict are those of a function, with their defaults in its signature.

    Others are refused, also those of another attention, which would have no effect.
    """
    names = get_type_hints(options).keys()

    def show(function: Function) -> Function:
        @functools.wraps(function)
        def checked(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Any:
            if not given.keys() <= names:
                unknown = ", ".join(sorted(given.keys() - names))
                raise TypeError(f"{function.__name__} has no option {unknown}; its options are: {', '.join(names)}")
            return function(query, key, value, **given)

        signature = inspect.signature(function)
        tensors = [x for x in signature.parameters.values() if x.kind is not x.VAR_KEYWORD]
        keywords = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=DEFAULTS[name], annotation=annotation)
            for name, annotation in get_type_hints(options).items()
        ]
        checked.__signature__ = signature.replace(parameters=[*tensors, *keywords])  # type: ignore[attr-defined]
        return cast(Function, checked)

    return show


def autocast_like_sdpa(
    function: Callable[..., Result], query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> Result:
    """Call a function of query, key and value as SDPA is called under autocast.

    Float inputs are cast to the dtype of an active autocast; what is computed of them has the dtypes chosen there.
    """
    if not isinstance(query, Tensor) or not autocast_is_on(query.device.type):
        return function(query, key, value, **options)
    device, dtype = query.device.type, torch.get_autocast_dtype(query.device.type)
    inputs = (
        x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x
        for x in (query, key, value)
    )
    with torch.autocast(device, enabled=False):
        return function(*inputs, **options)
