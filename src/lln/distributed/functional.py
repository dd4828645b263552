"""Attention to a sequence of which every process of a group holds a contiguous part.

    output = lln.distributed.lln_attention(query, key, value, group=mesh["sequence"])

The result is that of `lln.lln_attention` on the whole sequence, in parts: each process has the outputs of its own
queries. Statistics are those of the whole sequence. Parts are in the order of the ranks, may differ in length and may
be empty; batch, heads, features, dtype and options must be the same on all processes.

- `key_padding_mask` as a (B, M) bool tensor is for the tokens of this process; as (B,) lengths, for whole sequences.
- `cu_seqlens` is for the whole row, the same on all processes; sequences may lie across them.
- alpha, beta and centres that are the same for all tokens must be the same on all processes, and alpha, beta and
  `key_weight` of tokens are for those of this process.

Every process must call the function, and its backward pass. The loss is the sum of what the processes compute: each
input gets its whole gradient. What all processes share, as given scales, centres or weights of a model, gets the part
of this process, to be summed over the group, as with all sequence parallelism.
"""

from collections.abc import Callable
from typing import Any, Unpack, get_type_hints

import torch
from torch import Tensor

import lln.functional as local
from lln import neighbors
from lln.backends.torch.summary import repeat_heads
from lln.distributed.core import attend
from lln.distributed.ranks import Group, find_ranks
from lln.problem import Near, NearOptions, Options, QueryOptions, TokenOptions, autocast_like_sdpa


def lln_attention(
    query: Tensor, key: Tensor, value: Tensor, *, group: Group, **options: Unpack[QueryOptions]
) -> Tensor:
    """`lln.lln_attention` of sequences whose parts the processes of a group hold.

    Args:
        query: (B, H, N, D) the part of this process, as key (B, H_k, M, D) and value (B, H_k, M, Dv).
        group: a ProcessGroup, or one dimension of a DeviceMesh.
        **options: those of `lln.lln_attention`.

    Returns:
        (B, H, N, Dv) for the queries of this process.

    Raises:
        ValueError: on every process, where one of them has tokens or options that do not fit.
        lln.distributed.MissingRankError: a process did not take part within the time-out of the group.

    Example:
        >>> mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("sequence",))  # doctest: +SKIP
        >>> output = lln.distributed.lln_attention(query, key, value, group=mesh["sequence"])  # doctest: +SKIP
    """
    return _run(local.lln_attention, QueryOptions, query, key, value, group, far=True, near=None, **options)


def block_diagonal_attention(
    query: Tensor, key: Tensor, value: Tensor, *, group: Group, **options: Unpack[NearOptions]
) -> Tensor:
    """`lln.block_diagonal_attention` of sequences whose parts the processes of a group hold.

    Args:
        query, key, value, group: as in `lln_attention`, with N = M.
        **options: those of `lln.block_diagonal_attention`.

    Returns:
        (B, H, N, Dv) for the queries of this process.

    Raises:
        ValueError: on every process, where one of them has tokens or options that do not fit.
        lln.distributed.MissingRankError: a process did not take part within the time-out of the group.

    Example:
        >>> mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("sequence",))  # doctest: +SKIP
        >>> options = {"block_size": 32, "group": mesh["sequence"]}  # doctest: +SKIP
        >>> output = lln.distributed.block_diagonal_attention(query, key, value, **options)  # doctest: +SKIP
    """
    return _run(
        local.block_diagonal_attention,
        NearOptions,
        query,
        key,
        value,
        group,
        **{"near": "blocks", **options},
        far=False,
    )


def lln_diag_attention(
    query: Tensor, key: Tensor, value: Tensor, *, group: Group, **options: Unpack[Options]
) -> Tensor:
    """`lln.lln_diag_attention` of sequences whose parts the processes of a group hold.

    Args:
        query, key, value, group: as in `lln_attention`, with N = M.
        **options: those of `lln.lln_diag_attention`.

    Returns:
        (B, H, N, Dv) for the queries of this process.

    Raises:
        ValueError: on every process, where one of them has tokens or options that do not fit.
        lln.distributed.MissingRankError: a process did not take part within the time-out of the group.

    Example:
        >>> mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("sequence",))  # doctest: +SKIP
        >>> options = {"is_causal": True, "group": mesh["sequence"]}  # doctest: +SKIP
        >>> output = lln.distributed.lln_diag_attention(query, key, value, **options)  # doctest: +SKIP
    """
    return _run(local.lln_diag_attention, Options, query, key, value, group, **{"near": "blocks", **options}, far=True)


def near_with_mass_ratio(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_weight: Tensor | None = None,
    *,
    group: Group,
    near: Near,
    block_size: int,
    **options: Unpack[TokenOptions],
) -> tuple[Tensor, Tensor]:
    """`lln.neighbors.near_with_mass_ratio` of sequences whose parts the processes of a group hold.

    Args:
        query, key, value, group: as in `lln_attention`, with N = M.
        key_weight: log-weights (B, H, N) of the keys of this process; left out, 0.
        near, block_size: "blocks" or "window", and how many tokens are in one.
        **options: key_padding_mask, cu_seqlens and is_causal, as in `lln.block_diagonal_attention`.

    Returns:
        Softmax attention among neighbours (B, H, N, V), and ln(far / near) of each query (B, H, N), of this process.

    Raises:
        ValueError: on every process, where one of them has tokens or options that do not fit.
        lln.distributed.MissingRankError: a process did not take part within the time-out of the group.

    Example:
        >>> mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("sequence",))  # doctest: +SKIP
        >>> options = {"near": "window", "block_size": 64, "group": mesh["sequence"]}  # doctest: +SKIP
        >>> output, ratio = lln.distributed.near_with_mass_ratio(query, key, value, **options)  # doctest: +SKIP
    """
    ranks = find_ranks(group)
    given: Any = {"near": near, "block_size": block_size, **options, "key_weight": key_weight}
    if ranks.size == 1:
        return neighbors.near_with_mass_ratio(query, key, value, **given)
    names = {*get_type_hints(NearOptions), "key_weight"}

    def run(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        found: Tensor = _attend(
            "near_with_mass_ratio", ranks, query, key, value, far=False, names=names, kind="mass ratio", **given
        )
        return found[..., :-1].to(query.dtype), found[..., -1]

    return autocast_like_sdpa(run, query, key, value)


def beyond_neighbors(
    a: Tensor,
    b: Tensor,
    value: Tensor,
    *,
    group: Group,
    near: Near,
    block_size: int,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`lln.neighbors.beyond_neighbors` of sequences whose parts the processes of a group hold.

    Args:
        a, b: the features (B, H, N, F) of the queries and keys of this process.
        value: (B, H_k, N, V) of this process.
        group: as in `lln_attention`.
        near, block_size: "blocks" or "window", and how many tokens are in one.
        key_padding_mask, cu_seqlens: as in `block_diagonal_attention`.

    Returns:
        Attention to what is not near (B, H, N, V), and ln(far / near) of each query (B, H, N), of this process.

    Raises:
        ValueError: on every process, where one of them has tokens or options that do not fit.
        lln.distributed.MissingRankError: a process did not take part within the time-out of the group.

    Example:
        >>> mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("sequence",))  # doctest: +SKIP
        >>> options = {"near": "window", "block_size": 64, "group": mesh["sequence"]}  # doctest: +SKIP
        >>> output, ratio = lln.distributed.beyond_neighbors(a, b, value, **options)  # doctest: +SKIP
    """
    ranks = find_ranks(group)
    given: Any = {"near": near, "block_size": block_size, "key_padding_mask": key_padding_mask}
    given["cu_seqlens"] = cu_seqlens
    if ranks.size == 1:
        return neighbors.beyond_neighbors(a, b, value, **given)
    with torch.autocast(a.device.type, enabled=False):
        wide = repeat_heads(value.to(a.dtype), a.shape[1] // value.shape[1])
        names = get_type_hints(NearOptions).keys()
        found: Tensor = _attend(
            "beyond_neighbors", ranks, a, b, wide, far=False, names=names, kind="beyond neighbors", **given
        )
        return found[..., :-1].to(value.dtype), found[..., -1]


def _run(
    function: Callable[..., Tensor],
    options: type,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: Group,
    *,
    far: bool,
    near: Any,
    **given: Any,
) -> Tensor:
    ranks = find_ranks(group)
    if ranks.size == 1:
        return function(query, key, value, **given if near is None else {**given, "near": near})
    names = get_type_hints(options).keys()

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output: Tensor = _attend(function.__name__, ranks, query, key, value, far=far, near=near, names=names, **given)
        return output

    return autocast_like_sdpa(run, query, key, value)


_attend: Any = torch.compiler.disable(  # type: ignore[no-untyped-call]
    attend, reason="processes exchange their lengths, which is no part of a graph"
)
