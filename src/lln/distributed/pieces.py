"""Tokens in the paper's form, some at a time, and gradients on their way back through it.

The unbiased and the decomposed form are the paper's form of other queries and keys. Those of all tokens, and what
autograd keeps of how they were computed, would be more than half of what a process holds. So no more than a piece of
them exists at a time: forward, and again backward.

Shapes: B batch, H heads, H_k key heads, N queries, M keys, D features of a head.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from lln.backends.torch.summary import size_of_pieces
from lln.distributed.merge import Layout, rows_of
from lln.forms import in_paper_form
from lln.masks import fill_padding
from lln.matching.curves import Form
from lln.matching.moments import chunks
from lln.precision import accumulator, sum_dtype
from lln.problem import Problem, Tokens

NAMES = ("query", "key", "value", "alpha", "beta", "key_weight", "center_q", "center_k")  # what may have gradients
OF_TOKENS = {"query", "key", "value"}
OF_QUERIES = {"query", "alpha", "keep_query"}
MEANS = {"query": "center_q", "key": "center_k"}  # the tokens whose means centres may be
NOTHING = slice(0, 0)


class Inputs:
    """The tensors of a problem with alpha, beta and the centres of its form."""

    def __init__(self, form: Form, tensors: Sequence[Tensor | None]) -> None:
        self.form, self.tensors = form, tuple(tensors)
        self.given = dict(zip((*NAMES, "keep_query", "keep_key"), tensors, strict=True))
        query, key, value = tensors[:3]
        assert query is not None
        assert key is not None
        assert value is not None
        self.query, self.key, self.value = query, key, value

    @classmethod
    def of(cls, problem: Problem, query: Tensor | None = None) -> "Inputs":
        """Those of a problem, or with another query."""
        tokens = (problem.query if query is None else query, problem.key, problem.value)
        rest = (problem.alpha, problem.beta, problem.key_weight, *(problem.centers or (None, None)))
        return cls(problem.form, (*tokens, *rest, problem.queries.keep, problem.keys.keep))

    def parts(self, tokens: int) -> Iterator[slice]:
        return chunks(tokens, size_of_pieces(self.key, self.value, self.query.shape[1]))

    def queries(self, part: slice, wanted: Set[str] = frozenset()) -> "Piece":
        """Some queries without keys; see `Piece` for `wanted`."""
        return Piece(self, part, NOTHING, wanted)

    def keys(self, part: slice, wanted: Set[str] = frozenset()) -> "Piece":
        """Some keys without queries."""
        return Piece(self, NOTHING, part, wanted)

    def tokens(self, part: slice, wanted: Set[str] = frozenset()) -> "Piece":
        """Queries and keys of some tokens."""
        return Piece(self, part, part, wanted)

    def place(self, name: str, x: Tensor, queries: slice, keys: slice) -> Tensor:
        """The part of a tensor that belongs to some queries and keys; the whole of what all tokens share."""
        if name in MEANS.values():
            return x
        part, tokens = (queries, self.query.shape[2]) if name in OF_QUERIES else (keys, self.key.shape[2])
        if x.dim() == 2:
            return x[:, part]
        return x[:, :, part] if x.shape[2] == tokens else x


class Piece:
    """Some tokens in the paper's form.

    Args:
        inputs: what they are cut from.
        queries, keys: which of them.
        wanted: the inputs whose gradients are to be computed.
    """

    def __init__(self, inputs: Inputs, queries: slice, keys: slice, wanted: Set[str]) -> None:
        given = inputs.given
        x: Any = {
            name: None if y is None else inputs.place(name, y, queries, keys).detach() for name, y in given.items()
        }
        self.has_form = inputs.form != "paper"
        self.leaves = {name: x[name].requires_grad_() for name in NAMES if name in wanted and self.has_form}
        centers = None if x["center_q"] is None else (x["center_q"], x["center_k"])
        keeps, scales = (Tokens(x["keep_query"]), Tokens(x["keep_key"])), (x["alpha"], x["beta"])
        options: Any = (False, True, None, 0, *scales, "variance", "sample", inputs.form, centers, x["key_weight"])
        with torch.set_grad_enabled(bool(self.leaves)):
            self.problem = in_paper_form(Problem(x["query"], x["key"], x["value"], *keeps, *options))

    def read(self, *names: str) -> list[Any]:
        """Tensors of the paper's form, alpha and beta as (B, H, tokens, 1)."""
        given: dict[str, Tensor | None] = {"keep_key": self.problem.keys.keep}
        found = (given[name] if name in given else getattr(self.problem, name) for name in names)
        return [
            x if x is None else x.detach()[..., None] if name in ("alpha", "beta") else x.detach()
            for name, x in zip(names, found, strict=True)
        ]

    def gradients(self, **found: Tensor | None) -> dict[str, Tensor]:
        """The gradients of the inputs from those of the same names in the paper's form."""
        given = {name: x for name, x in found.items() if x is not None}
        if not self.has_form:
            return given
        back = {name: x for name, x in given.items() if name in ("alpha", "beta", "value")}
        results = {name: getattr(self.problem, name) for name in given if name not in back}
        outputs = {name: x for name, x in results.items() if x.requires_grad}
        if outputs:
            slopes = [given[name].to(x.dtype) for name, x in outputs.items()]
            through = torch.autograd.grad(list(outputs.values()), list(self.leaves.values()), slopes, allow_unused=True)
            for name, x in zip(self.leaves, through, strict=True):
                if x is not None:
                    back[name] = back[name] + x if name in back else x
        return back


class Gradients:
    """The gradients of the inputs, to which those of pieces are added.

    Args:
        inputs: the inputs.
        needs: which of them need gradients, in the order of `NAMES`.
        means: the centres are the means of the tokens that this layout has, through which gradients flow.
    """

    def __init__(self, inputs: Inputs, needs: Sequence[bool], means: Layout | None) -> None:
        self.inputs, self.means = inputs, means
        self.wanted = {name for name, is_needed in zip(NAMES, needs, strict=False) if is_needed}
        if means is not None:
            self.wanted |= {center for tokens, center in MEANS.items() if tokens in self.wanted}
        self.totals = {name: self.new(name) for name in NAMES if name in self.wanted}

    def new(self, name: str) -> Tensor:
        """Zeros for the gradient of an input: of tokens in their dtype, of what they share in the accumulator's."""
        x = self.inputs.given[name]
        assert x is not None
        return torch.zeros_like(x, dtype=x.dtype if name in OF_TOKENS else accumulator(x.dtype))

    def add(self, part: slice, found: Mapping[str, Tensor]) -> None:
        """Add the gradients of a piece of the tokens."""
        for name, x in found.items():
            if name in self.totals:
                place = self.inputs.place(name, self.totals[name], part, part)
                place += x

    def finish(self) -> list[Tensor | None]:
        """The gradients of all inputs of `Inputs.tensors`."""
        if self.means is not None:
            self._add_means(self.means)
        found = [self.totals.get(name) for name in NAMES]
        return [
            None if x is None or y is None else x.to(y.dtype)
            for x, y in zip((*found, None, None), self.inputs.tensors, strict=True)
        ]

    def _add_means(self, layout: Layout) -> None:
        """Each kept token has the gradient of its mean, that of all processes, divided by the number of tokens."""
        names = {name: x for name, x in MEANS.items() if x in self.totals}
        if not names:
            return
        sums = []
        for side, center in enumerate(MEANS.values()):
            if center in names.values():
                x = self.totals.pop(center)
                sums.append(x.to(sum_dtype(x.device)) / layout.total(side).clamp(min=1).to(x)[:, None, None])
        whole = layout.sum(rows_of(sums), layout.together)
        slopes = torch.split(whole, [x[0].numel() for x in sums], dim=1)
        for name, shape, slope in zip(names, sums, slopes, strict=True):
            total, keep = self.totals[name], self.inputs.given[f"keep_{name}"]
            each = slope.view_as(shape)[:, :, None].to(accumulator(total.dtype))
            for part in self.inputs.parts(total.shape[2]):
                place = total[:, :, part]
                place += fill_padding(each.expand_as(place), None if keep is None else keep[:, part])
