"""One interface and one registry for all mechanisms.

A mechanism is a module on (query, key, value), each (B, H, tokens, D), described by a `Description`, which is what the
documentation, the command line and the error messages are made from, so it is the one place that states what a
mechanism can do; `PeerMechanism.forward` refuses the rest, and reads masks in the one place that reads masks.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

from torch import Tensor

from lln.checks import check_inputs
from lln.masks import read_padding
from lln.mechanism import Mechanism
from lln.packed import attend_packed


@dataclass(frozen=True)
class Description:
    """What describes a mechanism, to choose it by."""

    name: str
    title: str  # as in the tables, e.g. "Nyströmformer"
    paper: str  # authors and title
    year: int
    time: str  # e.g. "N D²", in N tokens, D features and the mechanism's own options
    memory: str
    causal: bool
    padding: bool
    cross: bool  # other numbers of queries than of keys
    learned: str = ""  # its own parameters, "" if none
    random: bool = False  # draws random numbers, other than to initialise parameters
    checked_against: str = "the explicit matrix of the formula"  # or an independent implementation
    left_outside: str = ""  # parts of the published layer that are not token mixing
    needs_max_len: bool = False

    @property
    def linear(self) -> bool:
        """Whether time and memory are claimed to grow linearly with the number of tokens."""
        return "N²" not in self.time + self.memory and "N log" not in self.time


class PeerMechanism(Mechanism):
    """Base of published mechanisms: they implement `attend` on checked input, with equally many heads everywhere.

    Args:
        num_heads: heads of the query.
        head_dim: features of a head.
        max_len: the largest number of tokens, of mechanisms that have parameters for each position.
    """

    description: ClassVar[Description]

    def __init__(self, *, num_heads: int, head_dim: int, max_len: int | None = None) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.max_len = num_heads, head_dim, max_len

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Attention.

        Args:
            query: (B, H, N, D).
            key: (B, H_k, M, D); its heads divide those of the query.
            value: (B, H_k, M, V).
            key_padding_mask: (B, M) bool with True = keep, or (B,) lengths.
            cu_seqlens: bounds of packed sequences, (S + 1,), in inputs with B = 1.
            is_causal: query i attends to the keys up to i.

        Returns:
            The output (B, H, N, V), with zeros for padding where queries are keys.

        Raises:
            ValueError: the input does not fit what the mechanism was built for, or needs what it cannot do.
        """
        description = self.description
        if cu_seqlens is not None:
            masks = {"key_padding_mask": key_padding_mask}
            return attend_packed(self, query, key, value, cu_seqlens, is_causal=is_causal, **masks)
        check_inputs(query, key, value)
        if query.shape[1] != self.num_heads or query.shape[3] != self.head_dim:
            raise ValueError(
                f"{description.name} was built for num_heads={self.num_heads} and head_dim={self.head_dim}, "
                f"got query {tuple(query.shape)}"
            )
        if is_causal and not description.causal:
            raise ValueError(f"{description.name} cannot be causal; these can: {_with('causal')}")
        if key_padding_mask is not None and not description.padding:
            raise ValueError(f"{description.name} cannot leave padding out; these can: {_with('padding')}")
        if query.shape[2] != key.shape[2] and (is_causal or not description.cross):
            reason = "causal attention" if is_causal else description.name
            raise ValueError(
                f"{reason} needs as many queries as keys, got {query.shape[2]} and {key.shape[2]}; "
                f"for cross attention there are: {_with('cross')}"
            )
        if self.max_len is not None and description.needs_max_len and key.shape[2] > self.max_len:
            raise ValueError(
                f"{description.name} was built for max_len={self.max_len} tokens, got {key.shape[2]}; build it for more"
            )
        keep = read_padding(key_padding_mask, key)
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        return self.attend(query, key, value, keep, is_causal)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, is_causal: bool) -> Tensor:
        """Attention on checked input.

        Args:
            query: (B, H, N, D).
            key: (B, H, M, D).
            value: (B, H, M, V).
            keep: (B, M) bool with True = keep; None if all are kept.
            is_causal: query i attends to the keys up to i.

        Returns:
            The output (B, H, N, V).
        """
        raise NotImplementedError


M = TypeVar("M", bound=type[Mechanism])
_REGISTRY: dict[str, type[Mechanism]] = {}


def register(**description: Any) -> Callable[[M], M]:
    """Class decorator: describe a mechanism and enter it under its name."""

    def enter(mechanism: M) -> M:
        entry = Description(**description)
        assert entry.name not in _REGISTRY, entry.name
        mechanism.description = entry
        _REGISTRY[entry.name] = mechanism
        return mechanism

    return enter


def names() -> list[str]:
    """The names of all mechanisms that `build` can make, in the order of the tables.

    Returns:
        A list of names.

    Example:
        >>> "lln_diag" in names()
        True
    """
    return list(_REGISTRY)


def describe(name: str) -> Description:
    """The description of a mechanism.

    Args:
        name: one of `names()`.

    Returns:
        Its `Description`: paper, costs, and what it can do.

    Raises:
        ValueError: there is no such mechanism.

    Example:
        >>> describe("performer").causal
        True
    """
    found: Description = _lookup(name).description
    return found


def build(name: str, *, num_heads: int, head_dim: int, max_len: int | None = None, **options: Any) -> Mechanism:
    """Build a mechanism by name.

    Args:
        name: one of `names()`.
        num_heads: heads of the query; a key may have fewer, if they divide.
        head_dim: features of a head.
        max_len: the largest number of tokens, for mechanisms that have parameters for each position.
        options: the keyword arguments of the mechanism's class; `lln zoo NAME` lists them.

    Returns:
        A module that is called as `module(query, key, value, key_padding_mask=None, is_causal=False)`, each input
        (B, H, tokens, D).

    Raises:
        ValueError: there is no such mechanism, it needs `max_len`, or it refuses the value of an option.
        TypeError: it has no such option.

    Example:
        >>> module = build("performer", num_heads=4, head_dim=16, num_features=32)
        >>> module(*torch.randn(3, 1, 4, 100, 16), is_causal=True).shape
        torch.Size([1, 4, 100, 16])
    """
    mechanism: Any = _lookup(name)
    if mechanism.description.needs_max_len and max_len is None:
        raise ValueError(f"{name} has parameters for each position: give max_len=, the largest number of tokens")
    parameters = option_parameters(name)
    unknown = sorted(options.keys() - parameters.keys())
    if unknown:
        raise TypeError(
            f"{name} has no option {', '.join(unknown)}; its options are: {', '.join(parameters) or 'none'}"
        )
    if "max_len" in inspect.signature(mechanism).parameters:
        options["max_len"] = max_len
    built: Mechanism = mechanism(num_heads=num_heads, head_dim=head_dim, **options)
    return built


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Refuse options, as a user has typed them, that a mechanism does not have, and values of another type.

    Raises:
        ValueError: names the option, and the options that there are with their types and defaults.
    """
    parameters = option_parameters(name)
    for option, value in options.items():
        if option not in parameters:
            listed = "; ".join(map(str, parameters.values())) or "none"
            raise ValueError(f"{name} has no option {option}; its options are: {listed}")
        if not _fits(value, parameters[option].annotation):
            raise ValueError(f"the option {option} of {name} cannot be {value!r}; expected {parameters[option]}")


def options_of(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of some options that a mechanism has; a name that is not in the zoo has none."""
    if name not in _REGISTRY:
        return {}
    known = option_parameters(name)
    return {option: value for option, value in options.items() if option in known}


def check_shared_options(mechanisms: Sequence[str], options: Mapping[str, Any]) -> None:
    """Refuse options for several mechanisms that none of them has, and values of another type.

    Raises:
        ValueError: names the option.
    """
    for option in options:
        if not any(option in options_of(name, options) for name in mechanisms):
            raise ValueError(f"none of {', '.join(mechanisms)} has an option {option}; `lln zoo NAME` lists options")
    for name in mechanisms:
        if own := options_of(name, options):
            check_options(name, own)


def _lookup(name: str) -> type[Mechanism]:
    if name not in _REGISTRY:
        raise ValueError(f"no mechanism is called {name!r}; there are: {', '.join(names())}")
    return _REGISTRY[name]


def option_parameters(name: str) -> dict[str, inspect.Parameter]:
    """The options of a mechanism, with their types and defaults."""
    parameters = inspect.signature(_lookup(name), eval_str=True).parameters
    return {key: value for key, value in parameters.items() if key not in ("num_heads", "head_dim", "max_len")}


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value is of an annotated type. A whole number is a float too, but True is no number."""
    if get_origin(kind) in (Union, UnionType):
        return any(_fits(value, one) for one in get_args(kind))
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    kind = get_origin(kind) or kind
    if not isinstance(kind, type):
        return True  # such as Any
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _with(ability: str) -> str:
    return ", ".join(name for name in _REGISTRY if getattr(describe(name), ability))
