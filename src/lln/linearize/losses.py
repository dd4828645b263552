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

    Only the queries `rows` are compared, so that memory is O(R N).
    """
    key = repeat_heads(seen.key, seen.query.shape[1] // seen.key.shape[1])
    scores = seen.query[:, :, rows] @ key.mT * seen.query.shape[3] ** -0.5
    logs = log_products(features[0][:, :, rows], features[1])
    if seen.is_causal:
        hidden = torch.arange(key.shape[2], device=rows.device) > rows[:, None]
        scores, logs = (x.masked_fill(hidden, torch.finfo(x.dtype).min) for x in (scores, logs))
    target, found = scores.log_softmax(dim=-1), logs.log_softmax(dim=-1)
    divergence: Tensor = (target.exp() * (target - found)).sum(dim=-1).mean(dim=(0, 2))
    return divergence


def log_products(a: Tensor, b: Tensor) -> Tensor:
    """log sum_l exp(a_il + b_jl), (B, H, R, N), from a (B, H, R, F) and b (B, H, N, F)."""
    top_b = b.detach().amax(dim=2, keepdim=True)
    shifted = a + top_b
    top_a = shifted.detach().amax(dim=3, keepdim=True)
    products = (shifted - top_a).exp() @ (b - top_b).exp().mT
    return products.clamp(min=torch.finfo(a.dtype).tiny).log() + top_a


def output_loss(mechanism: Mechanism, seen: Observation) -> Tensor:
    """The squared difference of the outputs of a mechanism and of softmax attention, 1 for outputs of zero."""
    output = attend(mechanism, seen)
    return mse_loss(output, seen.output) / seen.output.square().mean()


def hidden_loss(student: tuple[Tensor, ...], teacher: tuple[Tensor, ...]) -> Tensor:
    """The mean over the layers of the squared difference of hidden states, in units of the teacher's variance."""
    losses = [
        mse_loss(found.to(wanted.dtype), wanted) / wanted.var()
        for found, wanted in zip(student[1:], teacher[1:], strict=True)  # the first are the embeddings
    ]
    return torch.stack(losses).mean()


def logits_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """The Kullback-Leibler divergence of the student's predictions from the teacher's, the mean over tokens."""
    wanted, found = (x.flatten(0, -2).to(teacher.dtype).log_softmax(dim=-1) for x in (teacher, student))
    return (wanted.exp() * (wanted - found)).sum(dim=-1).mean()


def attend(mechanism: Mechanism, seen: Observation) -> Tensor:
    """The output of a mechanism for what softmax attention saw."""
    key, value = seen.key, seen.value
    if not mechanism.takes_grouped_heads:
        key, value = (repeat_heads(x, seen.query.shape[1] // key.shape[1]) for x in (key, value))
    output: Tensor = mechanism(seen.query, key, value, key_padding_mask=seen.keep, is_causal=seen.is_causal)
    return output
