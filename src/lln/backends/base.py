"""What a backend has to offer, and how its parts are put together."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from torch import Tensor

from lln.problem import Problem
from lln.recurrence import Advance, Recurrence

Prepared = Callable[[Tensor, Tensor, Tensor], Tensor]


class Backend(ABC):
    """One way to compute attention. Adding one is a subclass and a line in `lln.backends.BACKENDS`."""

    name: ClassVar[str]

    @abstractmethod
    def why_not(self, problem: Problem) -> str | None:
        """Why this backend cannot compute a problem; None if it can."""

    @abstractmethod
    def far(self, problem: Problem) -> Tensor:
        """LLN attention (B, H, N, V), full or causal, with alpha and beta matched where the problem has none."""

    @abstractmethod
    def near(self, problem: Problem) -> Tensor:
        """Softmax attention among neighbours (B, H, N, V), with zeros for padding."""

    def average(self, problem: Problem) -> Tensor:
        """The mean of both; a backend that makes one pass over the tokens for it overrides this."""
        return self.far(problem).add(self.near(problem)).mul(0.5)

    def attention(self, problem: Problem) -> Tensor:
        """What the problem asks for, in the dtype of its inputs."""
        branch = self.near if not problem.far else self.far if problem.near is None else self.average
        return branch(problem).to(problem.query.dtype)

    def prepare(self, problem: Problem) -> Prepared | None:
        """`attention` for query, key and value like those of a problem that has no other tensors but centres.

        They have the same shapes, strides and dtypes, require no gradients, and nothing records or transforms the
        operations on them. None: such calls are validated like others.
        """
        return None

    def why_not_advance(self, recurrence: Recurrence) -> str | None:
        """Why this backend cannot compute the next tokens of a state; None if it can."""
        return "it has no states"

    def advance(self, recurrence: Recurrence) -> Advance:
        """The outputs of the next tokens of a state, and its memory after them."""
        raise NotImplementedError

    def prepare_step(self, recurrence: Recurrence) -> Prepared | None:
        """`advance` in place for one token like that of a recurrence, as `prepare` is `attention`."""
        return None
