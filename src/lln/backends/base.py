"""What a backend has to offer, and how its parts are put together."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from lln.checks import is_recorded
from lln.problem import Problem
from lln.recurrence import Advance, Recurrence

Prepared = Callable[[Tensor, Tensor, Tensor], Tensor]


class Backend(ABC):
    """One way to compute attention. Adding one is a subclass and a line in `lln.backends.BACKENDS`."""

    name: ClassVar[str]
    has_lse: ClassVar[bool] = False  # `near_with_lse` and `near_lse` of an `Advance`; plain torch has them otherwise

    @abstractmethod
    def why_not(self, problem: Problem) -> str | None:
        """Why this backend cannot compute a problem.

        Args:
            problem: a validated call.

        Returns:
            The reason, to go on with "no, "; None if it can.

        Example:
            >>> problem = Problem.make(*torch.randn(3, 1, 2, 20, 16), far=True)
            >>> backend = lln.backends.BACKENDS[-1]
            >>> backend.why_not(problem) is None
            True
        """

    @abstractmethod
    def far(self, problem: Problem) -> Tensor:
        """LLN attention, full or causal, with alpha and beta matched where the problem has none.

        Args:
            problem: one with `far` that `why_not` has no reason against.

        Returns:
            (B, H, N, V) in the dtype of the inputs or of the accumulator.

        Example:
            >>> problem = Problem.make(*torch.randn(3, 1, 2, 20, 16), far=True)
            >>> backend = lln.backends.BACKENDS[-1]
            >>> backend.far(problem).shape
            torch.Size([1, 2, 20, 16])
        """

    @abstractmethod
    def near(self, problem: Problem) -> Tensor:
        """Softmax attention among neighbours.

        Args:
            problem: one with `near` that `why_not` has no reason against.

        Returns:
            (B, H, N, V) in the dtype of the inputs or of the accumulator, with zeros for padding.

        Example:
            >>> problem = Problem.make(*torch.randn(3, 1, 2, 20, 16), far=False, near="blocks")
            >>> backend = lln.backends.BACKENDS[-1]
            >>> backend.near(problem).shape
            torch.Size([1, 2, 20, 16])
        """

    def near_with_lse(self, problem: Problem) -> tuple[Tensor, Tensor]:
        """`near`, and the log-sum-exp of its scores.

        Args:
            problem: as for `near`.

        Returns:
            `near` in the dtype of its inputs, and (B, H, N) with zeros for padding.

        Raises:
            NotImplementedError: `has_lse` is False.

        Example:
            >>> problem = Problem.make(*torch.randn(3, 1, 2, 20, 16), far=False, near="blocks")
            >>> backend = lln.backends.BACKENDS[-1]
            >>> backend.near_with_lse(problem)[1].shape
            torch.Size([1, 2, 20])
        """
        raise NotImplementedError

    def average(self, problem: Problem) -> Tensor:
        """The mean of both; a backend that makes one pass over the tokens for it overrides this.

        Args:
            problem: one with `far` and `near` that `why_not` has no reason against.

        Returns:
            (B, H, N, V) in the dtype of the inputs or of the accumulator.

        Example:
            >>> problem = Problem.make(*torch.randn(3, 1, 2, 20, 16), far=True, near="window")
            >>> backend = lln.backends.BACKENDS[-1]
            >>> backend.average(problem).shape
            torch.Size([1, 2, 20, 16])
        """
        return self.far(problem).add(self.near(problem)).mul(0.5)

    def attention(self, problem: Problem) -> Tensor:
        """The attention of a problem: `far`, `near` or `average`.

        Args:
            problem: one that `why_not` has no reason against.

        Returns:
            (B, H, N, V) in the dtype of the inputs.

        Example:
            >>> problem = Problem.make(*torch.randn(3, 1, 2, 20, 16), far=True)
            >>> backend = lln.backends.BACKENDS[-1]
            >>> backend.attention(problem).shape
            torch.Size([1, 2, 20, 16])
        """
        branch = self.near if not problem.far else self.far if problem.near is None else self.average
        return branch(problem).to(problem.query.dtype)

    def prepare(self, problem: Problem) -> Prepared | None:
        """`attention` for query, key and value like those of a problem that has no other tensors but centres.

        They have the same shapes, strides and dtypes, require gradients as those do, and nothing records or transforms
        the operations on them.

        Args:
            problem: a validated call.

        Returns:
            A function of query, key and value; None: such calls are validated like others.

        Example:
            >>> problem = Problem.make(*torch.randn(3, 1, 2, 20, 16), far=True)
            >>> backend = lln.backends.BACKENDS[-1]
            >>> backend.prepare(problem) is None
            True
        """
        return None

    def why_not_advance(self, recurrence: Recurrence) -> str | None:
        """Why this backend cannot compute the next tokens of a state.

        Args:
            recurrence: validated tokens and the memory of the state.

        Returns:
            The reason, to go on with "no, "; None if it can.

        Example:
            >>> backend, state = lln.backends.BACKENDS[-1], lln.LLNState.empty(1, 2, 16)
            >>> tokens = torch.randn(3, 1, 2, 1, 16)
            >>> sums = (state.mass, state.values, state.count, state.query_sums, state.key_sums)
            >>> recurrence = Recurrence(*tokens, lln.recurrence.Memory(*sums))
            >>> backend.why_not_advance(recurrence) is None
            True
        """
        return "it has no states"

    def advance(self, recurrence: Recurrence) -> Advance:
        """The outputs of the next tokens of a state, and its memory after them.

        Args:
            recurrence: one that `why_not_advance` has no reason against.

        Returns:
            Both, with the outputs of the branches apart if the recurrence is to have them.

        Raises:
            NotImplementedError: the backend has no states.

        Example:
            >>> backend, state = lln.backends.BACKENDS[-1], lln.LLNState.empty(1, 2, 16)
            >>> tokens = torch.randn(3, 1, 2, 1, 16)
            >>> sums = (state.mass, state.values, state.count, state.query_sums, state.key_sums)
            >>> recurrence = Recurrence(*tokens, lln.recurrence.Memory(*sums))
            >>> backend.advance(recurrence).output.shape
            torch.Size([1, 2, 1, 16])
        """
        raise NotImplementedError

    def prepare_step(self, recurrence: Recurrence) -> Prepared | None:
        """`advance` in place for one token like that of a recurrence, as `prepare` is `attention`.

        Args:
            recurrence: of one token, with `in_place`.

        Returns:
            A function of query, key and value that gives the output; None: such calls are validated like others.

        Example:
            >>> backend, state = lln.backends.BACKENDS[-1], lln.LLNState.empty(1, 2, 16)
            >>> tokens = torch.randn(3, 1, 2, 1, 16)
            >>> sums = (state.mass, state.values, state.count, state.query_sums, state.key_sums)
            >>> recurrence = Recurrence(*tokens, lln.recurrence.Memory(*sums), in_place=True)
            >>> backend.prepare_step(recurrence) is None
            True
        """
        return None


def transformed_reason(tensors: tuple[Tensor | None, ...]) -> str | None:
    """Why fused code must not run although it could: something else records or transforms the operations."""
    if torch.compiler.is_compiling():
        is_exporting = getattr(torch.compiler, "is_exporting", lambda: False)
        return "torch.export is to give a graph that runs anywhere" if is_exporting() else None
    for x in tensors:
        if type(x) is not Tensor and type(x) is not torch.nn.Parameter and x is not None:
            return "a tensor is of a class of its own"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "torch.func is transforming it"
    if is_recorded():
        return "a tracer or dispatch mode is recording the operations of torch"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode differentiation is on"
    return None


def empty_rows(like: Tensor, width: int) -> Tensor:
    """An empty (B, heads, tokens, width) tensor as fused code writes it, whatever the strides of `like`.

    Rows of features are contiguous and do not overlap; samples, heads and tokens follow each other as they do in
    `like`, so that splitting or joining heads, or packed sequences, needs no copy.
    """
    batch, heads, tokens, _ = like.shape
    sample, head, token, _ = like.stride()
    if head < token:
        return like.new_empty((batch, tokens, heads, width)).transpose(1, 2)
    if sample < head:
        return like.new_empty((heads, batch, tokens, width)).transpose(0, 1)
    return like.new_empty((batch, heads, tokens, width))
