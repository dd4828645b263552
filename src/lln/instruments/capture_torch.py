"""Query and key of torch's own attention modules, read from the arguments of their calls (see `capture`).

torch never shows its projections, so those of the chosen sample and heads are computed once more.
Shapes: B batch, N queries, M keys, D features, E width of the model; h chosen heads. torch's masks mean True = ignore.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from lln.instruments.capture import Capture, Choose
from lln.instruments.reading import Options
from lln.precision import accumulator


def from_torch(
    choose: Choose,
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Capture:
    """`torch.nn.MultiheadAttention`: the projections of the chosen heads are computed once more.

    The arguments that are not used here are those of its forward. Its masks mean True = ignore.
    """
    width = module.head_dim
    batched = query.is_nested or query.dim() == 3
    batch = (query.size(0) if module.batch_first else query.shape[1]) if batched else 1
    sample, heads = choose(batch, module.num_heads)

    def tokens(x: Tensor) -> Tensor:
        if not batched:
            return x
        return x.unbind()[sample] if query.is_nested else x[sample] if module.batch_first else x[:, sample]

    def project(x: Tensor, number: int) -> Tensor:  # (h, tokens, D)
        separate = (module.q_proj_weight, module.k_proj_weight)[number]
        weight: Tensor = module.in_proj_weight.chunk(3)[number] if separate is None else separate
        bias = None if module.in_proj_bias is None else module.in_proj_bias.chunk(3)[number]
        weight = weight.reshape(module.num_heads, width, -1)[heads].flatten(0, 1)
        bias = None if bias is None else bias.reshape(-1, width)[heads].flatten()
        projected = linear(x.to(weight.dtype), weight, bias)
        return projected.reshape(len(x), len(heads), width).transpose(0, 1)

    q, k = project(tokens(query), 0), project(tokens(key), 1)
    extra = 0
    if module.bias_k is not None:
        k = torch.cat((k, module.bias_k.reshape(-1, 1, width)[heads]), dim=1)
        extra += 1
    if module.add_zero_attn:
        k = pad(k, (0, 0, 0, 1))
        extra += 1
    keep = None
    if key_padding_mask is not None and not query.is_nested:
        padding = key_padding_mask if batched else key_padding_mask[None]
        keep = pad(_attended(padding)[sample, None], (0, extra), value=True)
    mask = None
    if attn_mask is not None:
        mask = (
            attn_mask[None]
            if attn_mask.dim() == 2
            else attn_mask.reshape(batch, -1, *attn_mask.shape[1:])[sample, heads]
        )
        # Additive masks stay as they are: they may hold a bias.
        mask = pad(
            mask if mask.is_floating_point() else ~mask, (0, extra), value=0.0 if mask.is_floating_point() else True
        )
        mask = mask if keep is None else _and(mask, keep[:, None])
        mask = mask.clone()
    options = Options(kind="softmax")
    if mask is None:
        options["key_padding_mask"] = keep
    return Capture(heads, q[None].to(accumulator(q.dtype)), k[None].to(accumulator(k.dtype)), options, mask)


def from_encoder_layer(
    choose: Choose,
    module: nn.TransformerEncoderLayer,
    src: Tensor,
    src_mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Capture:
    """`torch.nn.TransformerEncoderLayer`, whose fused form never calls its attention module."""
    x = module.norm1(src) if module.norm_first else src
    return from_torch(choose, module.self_attn, x, x, x, src_key_padding_mask, attn_mask=src_mask)


def _attended(padding: Tensor) -> Tensor:
    """True = keep, from torch's masks: bool with True = ignore, or float with a huge negative number."""
    return padding > torch.finfo(padding.dtype).min / 2 if padding.is_floating_point() else ~padding


def _and(mask: Tensor, keep: Tensor) -> Tensor:
    return mask.masked_fill(~keep, -torch.inf) if mask.is_floating_point() else mask & keep
