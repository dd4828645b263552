"""What the source of a model shows about its attention, before the model runs; transformers itself reads it too.

An attention module looks up its attention function and calls it:

    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
    output, weights = attend(self, query, key, value, attention_mask, scaling=self.scaling, **kwargs)

The arguments of this call and the masks that the model around it makes are what the attention will be called with.
Branches that the configuration rules out, such as `if self.relative_position_bias is not None:`, are left out.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn
from transformers import PreTrainedModel

INTERFACE = "ALL_ATTENTION_FUNCTIONS.get_interface("
POSITIONAL = ("module", "query", "key", "value", "attention_mask")
# The functions of transformers.masking_utils, and the names that models have for masks that they make themselves.
MASK_FUNCTION = re.compile(r"create_(\w+_)?masks?(_\w+)?$")
MASK_NAME = re.compile(r"(attention|attn|causal|extended)\w*_mask$")
ONE_ROW = re.compile(r"\.unsqueeze\(1\)\.unsqueeze\(2\)|\[:, None, None, :\]")
CHOICE = (ast.Name, ast.IfExp, ast.Constant, ast.expr_context)  # one of several things, as it is
CHANGING = ("training", "gradient_checkpointing", "_attn_implementation")  # attributes that are no settings
UNKNOWN = object()  # the value of an expression that depends on the input


@dataclass(frozen=True)
class Masks:
    """The masks that a model makes for an attention module."""

    causal: bool  # by a function of transformers that makes causal masks
    bidirectional: bool
    own: tuple[str, ...]  # by assignments of its own, from nothing or from masks of transformers

    @property
    def are_of_keys(self) -> bool:
        """Whether masks of its own are the same for all queries, (batch, 1, 1, keys)."""
        return not (self.causal or self.bidirectional) and any(map(ONE_ROW.search, self.own))


def calls_interface(kind: Any) -> bool:
    """Whether modules of a class look up their attention function in transformers."""
    return not issubclass(kind, PreTrainedModel) and INTERFACE in read(kind)


def attention_calls(module: nn.Module) -> list[dict[str, ast.expr]]:
    """The arguments of each call of the attention function, by name."""
    nodes = list(_live_nodes(module))
    functions = {
        name
        for node in nodes
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value and INTERFACE in ast.unparse(node.value)
        for name in _targets(node)
    }
    return [
        dict(zip(POSITIONAL, node.args, strict=False)) | {k.arg: k.value for k in node.keywords if k.arg is not None}
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions
    ]


def changes_its_mask(module: nn.Module) -> str | None:
    """How an attention module changes the mask that it is given, or None if it takes that or another one as it is."""
    for node in _live_nodes(module):
        if not isinstance(node, (ast.Assign, ast.AugAssign)) or "attention_mask" not in _targets(node):
            continue
        if isinstance(node, ast.AugAssign) or not all(isinstance(part, CHOICE) for part in ast.walk(node.value)):
            return ast.unparse(node)
    return None


def cache_places(module: nn.Module) -> set[str]:
    """Which layers of a cache an attention module writes to, as expressions."""
    return {
        ast.unparse(node.args[2])
        for node in _live_nodes(module)
        if isinstance(node, ast.Call)
        and len(node.args) > 2
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "update"
    }


def masks(around: Iterable[nn.Module]) -> Masks:
    """The masks that are made by the modules around an attention module."""
    made, own, changed = set(), [], []
    for module in around:
        nodes = list(_live_nodes(module))
        to_encoder = {id(node.func) for node in nodes if isinstance(node, ast.Call) and _is_for_two_sequences(node)}
        for node in nodes:
            if isinstance(node, ast.Name) and MASK_FUNCTION.match(node.id) and id(node) not in to_encoder:
                made.add("bidirectional" if "bidirectional" in node.id else "causal")
            elif isinstance(node, ast.Assign) and any(map(MASK_NAME.search, _targets(node))):
                choices = (node.value.body, node.value.orelse) if isinstance(node.value, ast.IfExp) else (node.value,)
                if any(isinstance(choice, ast.BinOp) for choice in choices):  # such as a bias and a mask
                    changed.append(ast.unparse(node))
                if not all(isinstance(choice, CHOICE) for choice in choices):
                    own.append(ast.unparse(node))
    return Masks("causal" in made, "bidirectional" in made, tuple(changed if made else own))


def value_of(expression: ast.expr, module: nn.Module) -> Any:
    """The value of an expression in the source of a module, or UNKNOWN if it depends on more than its settings."""
    for node in ast.walk(expression):
        if isinstance(node, ast.Name) and node.id not in ("self", "getattr"):
            return UNKNOWN
        if isinstance(node, ast.Attribute) and node.attr in CHANGING:
            return UNKNOWN
        if isinstance(node, ast.Call) and not isinstance(node.func, ast.Name):
            return UNKNOWN
    with suppress(Exception):  # such as an attribute that other layers have
        return eval(compile(ast.Expression(expression), "<attention>", "eval"), {"self": module})
    return UNKNOWN


@cache
def read(kind: Any) -> str:
    """The source of a class and of its bases, "" where there is none."""
    bases = []
    for base in kind.__mro__:
        if base in (nn.Module, PreTrainedModel):
            break
        with suppress(OSError, TypeError):  # a class without source, such as one typed into a console
            bases.append(textwrap.dedent(inspect.getsource(base)))
    return "\n".join(bases)


@cache
def _parse(kind: Any) -> ast.Module:
    return ast.parse(read(kind))


def _is_for_two_sequences(call: ast.Call) -> bool:
    """Whether a mask function is called for queries and keys of different sequences."""
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    return given.get("encoder_hidden_states", given.get("inputs_embeds")) != given.get("inputs_embeds")


def _targets(node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> list[str]:
    return [ast.unparse(target) for target in (node.targets if isinstance(node, ast.Assign) else [node.target])]


def _live_nodes(module: nn.Module) -> Iterator[ast.AST]:
    """All nodes of the source of a module's class, without the branches that cannot be taken in this module."""
    kind: Any = type(module)
    waiting: list[ast.AST] = [_parse(kind)]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.If) and (test := value_of(node.test, module)) is not UNKNOWN:
            waiting.extend(node.body if test else node.orelse)
        else:
            waiting.extend(ast.iter_child_nodes(node))
