"""The state after a prompt of which every process holds a part.

A process needs the state before its own tokens: the sums of the statistics and the summary of the keys of all processes
before it, two exclusive scans, and the last tokens before its own, a halo. From there on it is `LLNState.prefill`.

Shapes: B batch, H heads, H_k key heads, N tokens of this process, C block size.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lln.backends.torch.advance import centered_inputs, key_weight_of
from lln.distributed import near as near_attention
from lln.distributed.far import summary_of
from lln.distributed.merge import Layout, Merge
from lln.distributed.ranks import Group, find_ranks
from lln.distributed.statistics import moments_after, sums_before
from lln.masks import kept_tokens, read_padding
from lln.matching.curves import Form
from lln.state import LLNState


def state_before(
    state: LLNState,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: Group,
    key_padding_mask: Tensor | None = None,
    near_key: Tensor | None = None,
    key_weight: Tensor | None = None,
) -> LLNState:
    """An empty state after the tokens of the processes before this one, for the tokens of this one.

    Arguments are those of `LLNState.prefill`, which is to follow with all of the tokens of this process.
    """
    ranks = find_ranks(group)
    keep = read_padding(key_padding_mask, key)
    near_key = key if near_key is None else near_key
    description = {
        "batch": query.shape[0],
        "heads": query.shape[1],
        "key heads": key.shape[1],
        "features": query.shape[3],
        "value features": value.shape[3],
        "dtype": value.dtype,
        "block_size": state.block_size,
        "near": state.near,
        "form": state.form,
        "matching": state.matching,
        "scales": "matched" if state.alpha is None or state.beta is None else "given",
    }
    ranks.check("LLNState.prefill", description, (), query.device)
    own = kept_tokens(keep, key).sum(dim=1)
    tokens = ranks.gather(torch.stack((own, own)).to(ranks.header_device(query.device))).cpu()
    layout = Layout(ranks, tokens)
    if state.center_q is not None and state.center_k is not None:
        query, key = query.to(state.mass.dtype), key.to(state.mass.dtype)
        query, key, key_weight = centered_inputs(query, key, key_weight, state.center_q, state.center_k)
    past = sums_before(query, key, keep, layout)
    beta = state.beta[..., None] if state.beta is not None else None
    if beta is None:
        form: Form = "paper" if state.form == "paper" else "unbiased"
        moments = moments_after(query, key, keep, past)
        beta = moments.scales(head_dim=query.shape[3], matching=state.matching, form=form)[1]
    beta = beta[..., None]
    weight = key_weight_of(query, key, keep, beta, key_weight, form=state.form)
    merge = Merge(layout, summary_of(query, key, value, beta, keep, weight), is_causal=True)
    recent: dict[str, Any] = {}
    if state.recent_key is not None and state.recent_value is not None:
        names = ("recent_key", "recent_value")
        recent = dict(zip(names, _recent(near_key, value, keep, layout, state.recent_key.shape[2]), strict=True))
    summary = merge.finish()
    return replace(
        state,
        mass=summary.mass,
        values=summary.values,
        count=past.tokens,
        query_sums=past.query,
        key_sums=past.key,
        **recent,
    )


def _recent(key: Tensor, value: Tensor, keep: Tensor | None, layout: Layout, size: int) -> tuple[Tensor, Tensor]:
    """The last `size` kept tokens before this process, token t at place t % size; zeros where there is none."""
    starts = layout.starts()
    halo = near_attention.find_halo(key, keep, layout, starts - size, starts)
    found = halo.send(key, value).wait()
    start = layout.start(1).to(key.device)
    number = halo.kept.sum(dim=1)  # tokens of the halo, from the first place on
    samples = halo.receive_samples
    slots = (start[samples] - number[samples] + halo.receive_places) % size
    joined = found.new_zeros(key.shape[0], size, key.shape[1], key.shape[3] + value.shape[3])
    joined[samples, slots] = found
    recent_key, recent_value = torch.split(joined.transpose(1, 2), [key.shape[3], value.shape[3]], dim=-1)
    return recent_key.contiguous(), recent_value.contiguous()
