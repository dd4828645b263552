"""What follows the attention weights, fitted in closed form: the shares of two branches, and the output projections.

A linear attention differs from softmax attention by an error that is partly the same for all tokens. Least squares
remove that part without any training: the output projection of every layer gives, from what the student's heads
give, what the teacher's gives from its own.

Shapes: T tokens, W width of the heads together, F features of the model.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lln.forms import token_mean
from lln.linearize.data import Batch
from lln.linearize.losses import attend
from lln.linearize.teacher import Observation, observing
from lln.masks import fill_padding
from lln.mechanism import JoinedBranches, Mechanism

# The pull of the projection to the teacher's, in units of the mean square of the heads' outputs. Of 0.03, 0.3, 1, 4 and
# a bias alone, 1 and 4 kept most of all-MiniLM-L6-v2 on passages of its training text that nothing was fitted to.
RIDGE = 2.0
SHARE_STEPS = 20
SMALLEST_SHARE = 0.01  # of a branch, where shares are learned afterwards: a share of 0 would have no gradient


@torch.no_grad()
def fit_shares(mechanism: Mechanism, seen: Observation) -> None:
    """Set how much each head takes of its far branch so that its output comes next to softmax attention's.

    First the one number that all queries of a head share, then, where the share depends on the query, all of it.
    """
    if not isinstance(mechanism, JoinedBranches) or mechanism.combine not in ("ratio", "gate", "replace"):
        return
    depends_on_query = mechanism.combine != "ratio"
    if depends_on_query:
        # The score with the mean key stands for those with the keys that are far.
        mean = token_mean(seen.key, seen.keep).mean(dim=0) * seen.key.shape[3] ** -0.5
        mechanism.gate.copy_(mean.repeat_interleave(mechanism.num_heads // len(mean), dim=0))
    options: Any = {"key_padding_mask": seen.keep, "is_causal": seen.is_causal}

    def far_of_all() -> Tensor:
        mechanism.branches = "far"
        try:
            return attend(mechanism, seen)
        finally:
            mechanism.branches = "both"

    def branches() -> tuple[Tensor, Tensor, Tensor | None]:
        return mechanism.joined_branches(far_of_all, seen.query, seen.key, seen.value, **options)

    far, near, ratio = branches()
    between, missing = far - near, seen.output - near
    if seen.keep is not None:
        between, missing = fill_padding(between, seen.keep), fill_padding(missing, seen.keep)
    size, along = between.square().sum(dim=3), (between * missing).sum(dim=3)  # (B, H, N)
    offset = torch.zeros(1, 1, 1) if ratio is None else ratio + (seen.query @ mechanism.gate[..., None])[..., 0]
    mechanism.ratio_logit.copy_(_best_logit(size, along, offset))
    if not depends_on_query:
        return
    assert ratio is not None
    columns = [seen.query, torch.ones_like(seen.query[..., :1])]
    if mechanism.combine == "replace":
        mixed, found = mechanism.ratio_mix.clone(), []
        for mix in (0.0, 1.0):
            mechanism.ratio_mix.fill_(mix)
            found.append(branches()[2])
        ratio, own = found
        assert ratio is not None
        assert own is not None
        columns.append((own - ratio)[..., None])
        mechanism.ratio_mix.copy_(mixed)
    counts = (ratio > -math.inf) & (size > 0)  # nothing is far from the others, or they are not kept
    start = [mechanism.gate, mechanism.ratio_logit[:, None]]
    if mechanism.combine == "replace":
        start.append(mechanism.ratio_mix[:, None])
    best = _fit_logits(
        torch.cat(columns, dim=3).where(counts[..., None], 0.0),
        offset=ratio.where(counts, 0.0),
        size=size.where(counts, 0.0),
        along=along.where(counts, 0.0),
        start=torch.cat(start, dim=1),
    )
    width = mechanism.gate.shape[1]
    mechanism.gate.copy_(best[:, :width])
    mechanism.ratio_logit.copy_(best[:, width])
    if mechanism.combine == "replace":
        mechanism.ratio_mix.copy_(best[:, width + 1])


def _best_logit(size: Tensor, along: Tensor, offset: Tensor) -> Tensor:
    """The number t of each head, (H,), for which the sum of size s^2 - 2 along s, s = sigmoid(offset + t), is least."""
    # The error is a smooth function of one number for each head: a coarse search, then a fine one around its result.
    best = torch.zeros(size.shape[1])
    largest = math.log(1 / SMALLEST_SHARE - 1)
    for reach, step in ((largest, 0.25), (0.25, 0.01)):
        candidates = (best + torch.arange(-reach, reach + step, step)[:, None]).clamp(-largest, largest)  # (C, H)
        errors = [_share_error((logit[:, None] + offset).sigmoid(), size, along) for logit in candidates]
        best = candidates.gather(0, torch.stack(errors).argmin(dim=0, keepdim=True))[0]
    return best


def _fit_logits(columns: Tensor, *, offset: Tensor, size: Tensor, along: Tensor, start: Tensor) -> Tensor:
    """The coefficients t of each head, (H, C), for which the same error, s = sigmoid(offset + columns t), is least.

    Levenberg-Marquardt steps from `start`: a step that makes a head worse is not taken, and the next one is shorter.
    """
    best, damping = start.clone(), torch.full((len(start), 1), 1e-2)

    def shares(coefficients: Tensor) -> Tensor:
        return ((columns * coefficients[:, None]).sum(dim=3) + offset).sigmoid()

    share = shares(best)
    least = _share_error(share, size, along)
    for _ in range(SHARE_STEPS):
        slope = share * (1 - share)
        weighted = columns * (size * slope.square())[..., None]
        curvature = torch.einsum("bhnc,bhnd->hcd", weighted, columns)
        gradient = torch.einsum("bhnc,bhn->hc", columns, (size * share - along) * slope)
        curvature.diagonal(dim1=1, dim2=2).mul_(1 + damping).add_(1e-12)
        tried = best - torch.linalg.solve(curvature, gradient[..., None])[..., 0]
        error = _share_error(new := shares(tried), size, along)
        better = (error < least)[:, None]
        best, least = torch.where(better, tried, best), torch.minimum(error, least)
        share = torch.where(better, new, share)
        damping = torch.where(better, damping / 4, damping * 8).clamp(1e-6, 1e6)
    return best


def _share_error(share: Tensor, size: Tensor, along: Tensor) -> Tensor:
    """The squared error of the output of each head, less what no share changes."""
    return (share.square() * size - 2 * share * along).sum(dim=(0, 2))


def output_layers(teacher: PreTrainedModel, batch: Batch) -> dict[str, str]:
    """The name of the linear layer that takes the output of each attention as it is, by the attention's name.

    They are found by what they are given. An attention whose output is changed on its way (by a gate or a norm) has
    none.
    """
    inputs: dict[str, Tensor] = {}
    layers = {name: x for name, x in teacher.named_modules() if isinstance(x, nn.Linear | Conv1D)}
    hooks = [
        layer.register_forward_pre_hook(lambda _, given, name=name: inputs.__setitem__(name, given[0]))
        for name, layer in layers.items()
    ]
    try:
        with observing(teacher) as found, torch.no_grad():
            teacher(**{name: x[:1] for name, x in batch.items()})
    finally:
        for hook in hooks:
            hook.remove()
    matches = {}
    for attention, calls in found.items():
        if len(calls) != 1:
            raise ValueError(
                f"{attention} attends {len(calls)} times in a pass through {type(teacher).__name__}: layers that share "
                "their weights cannot be linearised one by one; give a model in which each has its own"
            )
        [seen] = calls
        output = seen.output.transpose(1, 2).flatten(2)
        equal = [x for x, given in inputs.items() if given.shape == output.shape and torch.equal(given, output)]
        if len(equal) == 1:
            matches[attention] = equal[0]
    return matches


@torch.no_grad()
def fit_outputs(
    student: PreTrainedModel, teacher: PreTrainedModel, batch: Batch, layers: Mapping[str, str], ridge: float = RIDGE
) -> None:
    """Refit the output projections of a student, first layer to last, each on what the fitted ones before it give.

    Args:
        student: the linear model; its output projections are replaced.
        teacher: the model that it imitates; its projections are what the fit is pulled to.
        batch: text or images to fit on; padding is left out.
        layers: from `output_layers`.
        ridge: the strength of the pull.
    """
    wanted: dict[str, Tensor] = {}
    keep = batch["attention_mask"].bool() if "attention_mask" in batch else None

    def record(name: str) -> Any:
        return lambda _, given, output: wanted.__setitem__(name, output)

    def fit(name: str) -> Any:
        def before(layer: nn.Module, given: tuple[Tensor, ...]) -> None:
            x, y = (tensor if keep is None else tensor[keep] for tensor in (given[0], wanted[name]))
            _fit_layer(getattr(layer, "base_layer", layer), teacher.get_submodule(name), x, y, ridge)

        return before

    names = layers.values()
    _run_with(teacher, batch, [teacher.get_submodule(x).register_forward_hook(record(x)) for x in names])
    _run_with(student, batch, [student.get_submodule(x).register_forward_pre_hook(fit(x)) for x in names])


@torch.no_grad()
def restore_outputs(student: PreTrainedModel, teacher: PreTrainedModel, layers: Mapping[str, str]) -> None:
    """Give the output projections of a student, as `fit_outputs` changes them, the weights of the teacher's."""
    for name in layers.values():
        layer, like = student.get_submodule(name), teacher.get_submodule(name)
        getattr(layer, "base_layer", layer).load_state_dict(like.state_dict())


def _run_with(model: PreTrainedModel, batch: Batch, hooks: list[Any]) -> None:
    try:
        model.base_model(**batch)  # without a head: the logits of a language model would be the largest tensor
    finally:
        for hook in hooks:
            hook.remove()


def _fit_layer(layer: Any, teacher: Any, given: Tensor, wanted: Tensor, ridge: float) -> None:
    """Set `layer` to the least squares of wanted (T, F) on given (T, W), pulled to the weights of `teacher`."""
    has_bias = layer.bias is not None
    x, y = given.flatten(0, -2).double(), wanted.flatten(0, -2).double()
    start = teacher.weight if isinstance(teacher, Conv1D) else teacher.weight.mT
    start = start.double()
    if has_bias:
        x = torch.cat((x, torch.ones_like(x[:, :1])), dim=1)
        start = torch.cat((start, teacher.bias.double()[None]))
    gram = x.mT @ x / len(x)
    pull = gram.diagonal()[: given.shape[-1]].mean().expand(len(gram)).clone() * ridge
    if has_bias:
        pull[-1] = 1e-6  # the bias is free; above 0, so that the system has a solution
    pull = pull.clamp(min=torch.finfo(torch.float32).tiny)
    solved = start + torch.linalg.solve(gram + pull.diag(), x.mT @ (y - x @ start) / len(x))
    weight = solved[: given.shape[-1]]
    layer.weight.copy_(weight if isinstance(layer, Conv1D) else weight.mT)
    if has_bias:
        layer.bias.copy_(solved[-1])
