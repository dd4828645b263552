"""Models of transformers whose tokens are split over processes.

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    model = lln.hf.convert(model, "lln_diag")
    model = lln.distributed.parallelize(model, mesh["sequence"])
    model = DistributedDataParallel(model)                       # or fully_shard(model): over all processes
    loss = model(input_ids=ids, labels=labels).loss              # whole sequences go in, on every process alike

Every process of the sequence dimension is given the same whole batch and takes its part of the tokens, with the
positions that they have in the whole. The loss is that of the whole batch on all of them; its gradients are scaled so
that the mean over all processes, which data parallelism and FSDP take, is the gradient of the mean of the losses.
"""

import inspect
import math
import re
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from lln.distributed.functional import (
    beyond_neighbors,
    block_diagonal_attention,
    lln_attention,
    lln_diag_attention,
    near_with_mass_ratio,
)
from lln.distributed.merge import refuse_second_order
from lln.distributed.ranks import Group, Ranks, find_ranks
from lln.distributed.state import state_before
from lln.nn import LLNAttention

Model = TypeVar("Model", bound=nn.Module)
IGNORED = -100  # label of tokens that do not count, as in transformers
TOKEN_HEADS = re.compile(r"(ForMaskedLM|ForCausalLM|LMHeadModel|ForTokenClassification)$")
MASK_POSITIONS = re.compile(
    r"cumsum\(\s*attention_mask|attention_mask\.(long\(\)\.)?cumsum|torch\.cumsum\(attention_mask"
)


class Parallel:
    """The functions that a mechanism calls in place of those of one process."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.lln_attention = partial(lln_attention, group=group)
        self.lln_diag_attention = partial(lln_diag_attention, group=group)
        self.block_diagonal_attention = partial(block_diagonal_attention, group=group)
        self.near_with_mass_ratio = partial(near_with_mass_ratio, group=group)
        self.beyond_neighbors = partial(beyond_neighbors, group=group)
        self.state_before = partial(state_before, group=group)


def parallelize(model: Model, mesh: Group | None) -> Model:
    """Split the tokens of a converted model over the processes of a group, in place.

    The model is called with whole sequences, the same on every process of the group; tensors (batch, tokens, ...) among
    its arguments are split. `logits` and hidden states are those of the part of this process, see `split_tokens`;
    `loss` is the mean over the labels of the whole batch, or their sum divided by `num_items_in_batch`.

    Args:
        model: a transformers model of self-attention with `lln.hf.convert(model, "lln")` or "lln_diag": a model of
            hidden states, or one with a head for each token (masked or causal language model, token classes).
        mesh: a ProcessGroup, or one dimension of a DeviceMesh; None makes the model whole again.

    Returns:
        The model.

    Raises:
        ValueError: the model, or what it is called with, cannot be split.

    Example:
        >>> mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("sequence",))  # doctest: +SKIP
        >>> model = lln.distributed.parallelize(lln.hf.convert(model, "lln"), mesh["sequence"])  # doctest: +SKIP
        >>> model(input_ids=ids, labels=labels).loss.backward()  # doctest: +SKIP
    """
    from lln.hf.convert import attention_modules

    _restore(model)
    if mesh is None:
        return model
    ranks = find_ranks(mesh)
    modules = attention_modules(model)
    _check(model, modules)
    for module in modules.values():
        module.mechanism.parallel = Parallel(ranks.group)
    parts = _Parts(ranks, model, [module.mechanism for module in modules.values()])
    parts.handles = [
        model.register_forward_pre_hook(parts.split, with_kwargs=True),
        model.register_forward_hook(parts.join, with_kwargs=True),
    ]
    model.sequence_parts = parts  # type: ignore[assignment]
    return model


def split_tokens(model: nn.Module, x: Tensor, dim: int = 1) -> Tensor:
    """The part of a tensor of whole sequences that belongs to the tokens of this process in a parallelized model.

    Args:
        model: one that `parallelize` returned.
        x: a tensor of whole sequences.
        dim: the dimension of the tokens.

    Returns:
        A view of the tensor.

    Raises:
        ValueError: the model is not split over processes.

    Example:
        >>> logits = model(input_ids=ids).logits  # doctest: +SKIP
        >>> wrong = logits.argmax(dim=-1) != lln.distributed.split_tokens(model, labels)  # doctest: +SKIP
    """
    return x[(slice(None),) * dim + (_parts_of(model).bounds(x.shape[dim]),)]


@torch.no_grad()
def prefill(model: Any, input_ids: Tensor, attention_mask: Tensor | None = None, *, mesh: Group, **inputs: Any) -> Any:
    """Read a prompt with several processes, for `generate` in one of them.

    The cache holds all tokens but the last one, which `generate` reads itself. Its size does not depend on the prompt.

    Args:
        model: a causal model converted to "lln" or "lln_diag".
        input_ids, attention_mask: (batch, tokens), the same on every process.
        mesh: the processes, as in `parallelize`.
        **inputs: further arguments of the model.

    Returns:
        The cache, on every process.

    Raises:
        ValueError: the prompt has one token, or the model cannot be split or keeps no state of constant size.

    Example:
        >>> cache = lln.distributed.prefill(model, ids, mesh=mesh)  # doctest: +SKIP
        >>> if torch.distributed.get_rank() == 0:  # doctest: +SKIP
        ...     text = model.generate(ids, past_key_values=cache)
    """
    from transformers import DynamicCache

    if input_ids.shape[1] < 2:
        raise ValueError("a prompt of one token leaves nothing to prefill; call generate alone")
    before = getattr(model, "sequence_parts", None)
    parallelize(model, mesh)
    ranks = find_ranks(mesh)
    cache: Any = DynamicCache(config=model.config)
    if attention_mask is not None:
        inputs["attention_mask"] = attention_mask[:, :-1]
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        inputs["logits_to_keep"] = 1
    try:
        model(input_ids=input_ids[:, :-1], past_key_values=cache, use_cache=True, **inputs)
    finally:
        parallelize(model, None if before is None else before.ranks.group)
    for layer in cache.layers:
        state = getattr(layer, "state", None)
        if state is None:
            raise ValueError(f"{type(model).__name__} keeps no state of constant size, so it has nothing to share")
        layer.state = type(state).from_dict({name: ranks.broadcast(x) for name, x in state.to_dict().items()})
        layer.length = input_ids.shape[1] - 1
    return cache


class _Parts:
    """What the hooks of a parallelized model share."""

    def __init__(self, ranks: Ranks, model: nn.Module, mechanisms: list[Any]) -> None:
        self.ranks, self.mechanisms = ranks, mechanisms
        self.handles: list[Any] = []
        self.forward = inspect.signature(model.forward)
        self.names = self.forward.parameters.keys()
        self.is_causal = any(getattr(x, "attends_causally", False) for x in model.modules())
        # Parts that are whole blocks need no halo.
        self.unit = math.lcm(*(getattr(x, "block_size", 1) for x in mechanisms))
        self.loss: tuple[Tensor, Any] | None = None

    def bounds(self, tokens: int) -> slice:
        """Which tokens of a sequence belong to this process."""
        size, rank = self.ranks.size, self.ranks.rank
        unit = self.unit if tokens > self.unit * (size - 1) else 1
        units = -(-tokens // unit)
        each, more = divmod(units, size)
        first = rank * each + min(rank, more)
        return slice(min(first * unit, tokens), min((first + each + (rank < more)) * unit, tokens))

    def split(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = dict(self.forward.bind_partial(*args).arguments) | kwargs
        whole = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
        name = f"{type(model).__name__}.forward"
        if not isinstance(whole, Tensor):  # perhaps on this process alone, so all are informed
            device = next(model.parameters()).device
            self.ranks.check(name, {"error": "ValueError: it needs input_ids or inputs_embeds"}, (), device)
            raise AssertionError
        batch, tokens = whole.shape[:2]
        cache = given.get("past_key_values")
        description = {
            "batch": batch,
            "tokens": tokens,
            "tokens in the cache": 0 if cache is None else cache.get_seq_length(),
            "arguments": sorted(name for name, x in given.items() if x is not None),
            **{name: x for name, x in given.items() if isinstance(x, (bool, int, float, str))},
            "gradients": torch.is_grad_enabled(),
            **{f"kind of {name}": _kind(x) for name, x in given.items() if isinstance(x, Tensor)},
            **{
                name: _digest(x)
                for name, x in given.items()
                if isinstance(x, Tensor) and x.is_cpu and not x.is_floating_point()
            },
        }
        self.ranks.check(name, description, (), whole.device)
        if tokens < self.ranks.size:
            raise ValueError(f"{tokens} tokens cannot be split over {self.ranks.size} processes; use fewer of them")
        mask = given.get("attention_mask")
        if mask is not None and tuple(mask.shape) != (batch, tokens):
            raise ValueError(
                f"attention_mask must be {(batch, tokens)} for tokens that are split, got {tuple(mask.shape)}"
            )
        if cache is not None and cache.get_seq_length() > 0:
            raise ValueError("several processes cannot continue from a cache; see lln.distributed.prefill")
        rows = _packed_rows(given, batch, tokens)
        for mechanism in self.mechanisms:
            mechanism.packed_rows = rows  # up to the next call: a checkpoint computes the layers again
        for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"):
            given.pop(name, None)
        given["position_ids"] = _positions(model, given, whole)
        self.loss = None
        labels = given.pop("labels", None)
        if labels is not None:
            if given.get("return_dict") is False:
                raise ValueError("a loss over several processes needs outputs by name; leave return_dict=False out")
            if self.is_causal:
                labels = pad(labels[:, 1:], (0, 1), value=IGNORED)
            count = given.get("num_items_in_batch")
            count = (labels != IGNORED).sum().clamp(min=1) if count is None else count
            own = labels[:, self.bounds(tokens)]
            self.loss = own, count
            if "num_items_in_batch" in self.names:  # it computes the part of the loss of its own tokens
                given["labels"], given["num_items_in_batch"] = labels, count
            else:
                given.pop("num_items_in_batch", None)
        own = self.bounds(tokens)
        for name, x in given.items():
            if isinstance(x, Tensor) and x.dim() >= 2 and x.shape[1] == tokens and x.shape[0] in (1, batch):
                given[name] = x[:, own]
        return (), given

    def join(self, model: Any, args: Any, kwargs: Any, outputs: Any) -> Any:
        if self.loss is None:
            return outputs
        labels, count = self.loss
        self.loss = None
        name = f"the loss of {type(model).__name__}"
        if "num_items_in_batch" in self.names:
            self.ranks.check(name, {}, (), labels.device)
            outputs["loss"] = _WholeLoss.apply(self.ranks, outputs["loss"])  # type: ignore[no-untyped-call]
            return outputs
        logits = outputs["logits"].flatten(0, 1).float()
        description: dict[str, str] = {}
        try:
            loss = cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum") / count
        except (IndexError, RuntimeError, ValueError) as error:  # of a label in the part of this process alone
            description = {"error": f"{type(error).__name__}: {error}"}
        self.ranks.check(name, description, (), labels.device)
        whole: Tensor = _WholeLoss.apply(self.ranks, loss)  # type: ignore[no-untyped-call]
        return type(outputs)(loss=whole, **outputs)


class _WholeLoss(torch.autograd.Function):
    """The sum of the parts of a loss. Each process has the whole gradient of its own part, times their number."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, loss: Tensor) -> Tensor:
        ctx.size = ranks.size
        return ranks.gather(loss.reshape(1)).sum().to(loss.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        refuse_second_order()
        return None, gradient * ctx.size


def _check(model: Any, modules: dict[str, Any]) -> None:
    name = type(model).__name__
    if not modules:
        raise ValueError(f"{name} has no attention of transformers; convert a transformers model with lln.hf.convert")
    others = [
        place
        for place, module in modules.items()
        if getattr(module, "stays_softmax", False) or not isinstance(getattr(module, "mechanism", None), LLNAttention)
    ]
    if others:
        raise ValueError(
            f'{", ".join(others[:3])} of {name} is not "lln" or "lln_diag" attention of a sequence to itself; use '
            'lln.hf.convert(model, "lln_diag") on a model of self-attention'
        )
    if any(getattr(module.mechanism, "combine", None) == "mass" for module in modules.values()):
        raise ValueError(
            f'combine="mass" of {name} needs the moments of keys that other processes hold; use "gate" or "replace"'
        )
    is_base = getattr(model, "base_model", model) is model
    if not is_base and not TOKEN_HEADS.search(name):
        raise ValueError(
            f"{name} has a head that is not for each token, and tokens are split; use a masked or causal language "
            "model, token classes, or the model of hidden states inside it"
        )
    if is_base and getattr(model, "pooler", None) is not None:
        raise ValueError(f"the pooler of {name} needs the first token on all processes; use add_pooling_layer=False")
    if "position_ids" not in inspect.signature(getattr(model, "base_model", model).forward).parameters:
        raise ValueError(f"{name} takes no position_ids, which parts of a sequence need")


def _positions(model: Any, given: dict[str, Any], whole: Tensor) -> Tensor:
    """The positions of whole sequences, as the model would count them."""
    positions = given.get("position_ids")
    if positions is not None:
        found: Tensor = positions
        return found
    ids, tokens = given.get("input_ids"), whole.shape[1]
    for module in model.modules():
        count = getattr(module, "create_position_ids_from_input_ids", None)
        if count is not None and getattr(module, "padding_idx", None) is not None:
            if ids is None:
                raise ValueError(f"{type(model).__name__} counts positions from input_ids; give position_ids= too")
            return count(ids, module.padding_idx)  # type: ignore[no-any-return]
    if given.get("attention_mask") is not None and _counts_by_mask(model):
        raise ValueError(f"{type(model).__name__} counts positions from its mask; give position_ids= too")
    return torch.arange(tokens, device=whole.device).unsqueeze(0)


def _counts_by_mask(model: nn.Module) -> bool:
    from lln.hf import source

    kinds: set[Any] = {type(x) for x in model.modules()}
    return any(MASK_POSITIONS.search(source.read(kind)) for kind in kinds)


def _packed_rows(given: dict[str, Any], batch: int, tokens: int) -> list[Tensor] | None:
    """Where the sequences of each row start, if rows hold several; transformers marks this in one of three ways."""
    starts, numbers, positions = (given.get(x) for x in ("cu_seq_lens_q", "seq_idx", "position_ids"))
    if starts is not None:
        if batch != 1:
            raise ValueError(f"cu_seq_lens_q is for a batch of 1 where tokens are split, got {batch}; use seq_idx")
        return [starts.cpu()]
    if numbers is not None:
        changes = numbers.diff(dim=1) != 0
    elif positions is not None and positions.dim() == 2 and given.get("attention_mask") is None:
        changes = (positions.diff(dim=1) != 1).expand(batch, -1)
    else:
        return None
    if not bool(changes.any()):
        return None
    if given.get("attention_mask") is not None and not bool(given["attention_mask"].all()):
        raise ValueError("packed sequences leave no padding; leave attention_mask out, or pad each in a row of its own")
    ends = torch.tensor([tokens])
    return [torch.cat((torch.zeros(1, dtype=torch.int64), row.nonzero()[:, 0].cpu() + 1, ends)) for row in changes]


def _kind(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"


def _digest(ids: Tensor) -> int:
    """A number by which two batches differ."""
    flat = ids.flatten().long()
    return int((flat * (torch.arange(flat.numel()) % 1_000_003 + 1)).sum())


def _parts_of(model: nn.Module) -> _Parts:
    for module in model.modules():
        if isinstance(found := getattr(module, "sequence_parts", None), _Parts):
            return found
    raise ValueError("this model is not split over processes; call lln.distributed.parallelize first")


def _restore(model: Any) -> None:
    """Make a model whole again."""
    parts = model.__dict__.pop("sequence_parts", None)
    if parts is None:
        return
    for handle in parts.handles:
        handle.remove()
    for mechanism in parts.mechanisms:
        mechanism.parallel, mechanism.packed_rows = None, None
