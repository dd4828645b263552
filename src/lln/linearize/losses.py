"""What each stage of linearising minimises.

Shapes: B batch, H heads, N tokens, R sampled queries, F features, V value width.
"""

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from lln.backends.torch.summary import repeat_heads
from lln.linearize.teacher import Observation
from lln.mechanism import Mechanism


def weights_loss(features: tuple[Tensor, Tensor], seen: Observation, rows: Tensor) -> Tensor:
    """The Kullback-Leibler divergence (H,) of weights P_ij ~ sum_l exp(a_il + b_jl) from those of softmax attention.

    Only the queries `rows` are compared, so that memory is O(R N), and of those the ones that are no padding.
    """
    key = repeat_heads(seen.key, seen.query.shape[1] // seen.key.shape[1])
    scores = seen.query[:, :, rows] @ key.mT * seen.query.shape[3] ** -0.5
    logs = log_products(features[0][:, :, rows], features[1])
    hidden = torch.zeros(1, 1, 1, key.shape[2], dtype=torch.bool, device=rows.device)
    if seen.is_causal:
        hidden = torch.arange(key.shape[2], device=rows.device) > rows[:, None]
    if seen.keep is not None:
        hidden = hidden | ~seen.keep[:, None, None]
    scores, logs = (x.masked_fill(hidden, torch.finfo(x.dtype).min) for x in (scores, logs))
    target, found = scores.log_softmax(dim=-1), logs.log_softmax(dim=-1)
    divergence = (target.exp() * (target - found)).sum(dim=-1)  # (B, H, R)
    if seen.keep is None:
        return divergence.mean(dim=(0, 2))
    keep = seen.keep[:, None, rows]
    mean: Tensor = divergence.where(keep, 0.0).sum(dim=(0, 2)) / keep.sum().clamp(min=1)
    return mean


def log_products(a: Tensor, b: Tensor) -> Tensor:
    """log sum_l exp(a_il + b_jl), (B, H, R, N), from a (B, H, R, F) and b (B, H, N, F)."""
    top_b = b.detach().amax(dim=2, keepdim=True)
    shifted = a + top_b
    top_a = shifted.detach().amax(dim=3, keepdim=True)
    products = (shifted - top_a).exp() @ (b - top_b).exp().mT
    return products.clamp(min=torch.finfo(a.dtype).tiny).log() + top_a


def output_loss(mechanism: Mechanism, seen: Observation) -> Tensor:
    """The squared difference of the outputs of a mechanism and of softmax attention, 1 for outputs of zero."""
    found, wanted = attend(mechanism, seen), seen.output
    if seen.keep is not None:
        found, wanted = (x.transpose(1, 2)[seen.keep] for x in (found, wanted))
    return mse_loss(found, wanted) / wanted.square().mean()


def hidden_loss(student: tuple[Tensor, ...], teacher: tuple[Tensor, ...], keep: Tensor | None = None) -> Tensor:
    """The mean over the layers of the squared difference of hidden states, in units of the teacher's variance.

    Only tokens are compared that `keep` (B, N) names.
    """
    losses = []
    for found, wanted in zip(student[1:], teacher[1:], strict=True):  # the first are the embeddings
        x, y = (found, wanted) if keep is None else (found[keep], wanted[keep])
        x, y = x.float(), y.float()
        losses.append(mse_loss(x, y) / y.var())
    return torch.stack(losses).mean()


def logits_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """The Kullback-Leibler divergence of the student's predictions from the teacher's, their mean.

    Of models that predict one number, the squared difference.
    """
    student, teacher = student.float(), teacher.float()
    if teacher.shape[-1] == 1:
        return mse_loss(student, teacher)
    wanted, found = (x.flatten(0, -2).log_softmax(dim=-1) for x in (teacher, student))
    return (wanted.exp() * (wanted - found)).sum(dim=-1).mean()


def attend(mechanism: Mechanism, seen: Observation) -> Tensor:
    """The output of a mechanism for what softmax attention saw."""
    key, value = seen.key, seen.value
    if not mechanism.takes_grouped_heads:
        key, value = (repeat_heads(x, seen.query.shape[1] // key.shape[1]) for x in (key, value))
    output: Tensor = mechanism(seen.query, key, value, key_padding_mask=seen.keep, is_causal=seen.is_causal)
    return output
