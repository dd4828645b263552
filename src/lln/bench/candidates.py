"""What `lln bench attention` compares, each made for a setting and a number of tokens.

`performer` and `nystrom` are the code of performer-pytorch and nystrom-attention where these are installed and run, or
else the zoo's; `origin` is which. Every name that is not in `MECHANISMS` is looked up in the zoo.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from lln.backends import use
from lln.bench.paper import paper_attention
from lln.bench.peak import SMALL, Call, attention_call, random_heads
from lln.functional import lln_attention, lln_diag_attention
from lln.zoo import build, describe, names
from lln.zoo.nystrom import LANDMARKS
from lln.zoo.registry import check_shared_options, options_of

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}


@dataclass(frozen=True)
class Setting:
    """What all rows of a result have in common."""

    heads: int = 12
    head_dim: int = 64
    dtype: str = "float32"
    causal: bool = False
    device: str = "cpu"
    options: Mapping[str, Any] = field(default_factory=dict)  # of the zoo, for the mechanisms that have them

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device must be cpu or cuda, got {self.device!r}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device is cuda, and torch finds no GPU here (torch.cuda.is_available() is False)")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.heads < 1 or self.head_dim < 1:
            raise ValueError(f"heads and head_dim must be at least 1, got {self.heads} and {self.head_dim}")


def gpu_name() -> dict[str, str]:
    """The GPU that is measured, for the settings of a result."""
    return {"gpu": torch.cuda.get_device_name()}


class CannotRunError(Exception):
    """A candidate that has no form for this setting; the text is the reason."""


# What is compared by default, on a CPU and on a GPU.
MECHANISMS = (
    "softmax",
    "softmax_explicit",
    "paper",
    "elu",
    "performer",
    "nystrom",
    "lln_torch",
    "lln",
    "lln_diag",
    "floor",
)
GPU_MECHANISMS = ("softmax", "lln_torch", "lln_compiled", "fla", "lln", "lln_diag", "floor")
# Explicit N x N matrices that are there at the same time: scores and weights, and with gradients those of both.
MATRICES = {False: 2, True: 4}


def origin(name: str, setting: Setting) -> str:
    """The package whose code runs under a name, with its version if it is not this one."""
    package = _package(name, setting)
    if package is not None:
        return f"{package} {version(package)}"
    if name in ("softmax", "softmax_explicit", "floor"):
        return f"torch {torch.__version__}"
    return "lln.zoo" if name in names() and name not in ("lln", "lln_diag") else "lln"


def quadratic(name: str) -> bool:
    """Whether time grows with the square of the number of tokens."""
    return name == "softmax_explicit" or (name in names() and not describe(name).linear)


def check_names(mechanisms: Sequence[str], setting: Setting) -> None:
    """Refuse names that no candidate has, options that none of the mechanisms has, and values that they refuse."""
    candidates = dict.fromkeys((*MECHANISMS, *GPU_MECHANISMS, *names()))
    for name in mechanisms:
        if name not in candidates:
            raise ValueError(f"no candidate is called {name!r}; there are: {', '.join(candidates)}")
    check_shared_options(mechanisms, setting.options)
    for name in mechanisms:
        if options := options_of(name, setting.options):
            build(name, num_heads=setting.heads, head_dim=setting.head_dim, max_len=SMALL, **options)


def matrix_bytes(name: str, setting: Setting, tokens: int, *, backward: bool) -> int:
    """What the N x N matrices of a candidate take."""
    if name != "softmax_explicit":
        return 0
    itemsize: int = DTYPES[setting.dtype].itemsize
    return MATRICES[backward] * setting.heads * tokens**2 * itemsize


def random_inputs(setting: Setting, tokens: int) -> tuple[Tensor, ...]:
    heads = random_heads(tokens, heads=setting.heads, head_dim=setting.head_dim, dtype=DTYPES[setting.dtype])
    return tuple(x.to(setting.device) for x in heads)


def make_call(name: str, setting: Setting, inputs: tuple[Tensor, ...], *, backward: bool) -> Call:
    """A candidate on query, key and value; `CannotRunError` if it has no form for this setting."""
    like = inputs[2] if backward else None
    if _package(name, setting) == "nystrom-attention":
        packed = torch.stack([x.transpose(1, 2) for x in inputs], dim=2).flatten(2)
        return attention_call(_nystrom_package(setting), (packed,), like=like)
    own = tuple(x.detach() for x in inputs)  # others may run on the same without gradients
    if name == "fla":  # which makes copies of inputs that do not lie in memory as it needs them
        own = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in own)
    return attention_call(_attention(name, setting, inputs[0].shape[2]), own, like=like)


@dataclass(frozen=True)
class OwnInputs:
    """A candidate that draws its inputs, for a process of its own: call it with the number of tokens."""

    name: str
    setting: Setting
    backward: bool

    def __call__(self, tokens: int) -> Call:
        return make_call(self.name, self.setting, random_inputs(self.setting, tokens), backward=self.backward)


def _attention(name: str, setting: Setting, tokens: int) -> Callable[..., Tensor]:
    causal, options = setting.causal, options_of(name, setting.options)
    if name == "softmax":
        return partial(scaled_dot_product_attention, is_causal=causal)
    if name == "softmax_explicit":
        return partial(_explicit_softmax, is_causal=causal)
    if name == "lln" and not options:
        return partial(lln_attention, is_causal=causal)
    if name == "lln_diag" and not options:
        return partial(lln_diag_attention, is_causal=causal)
    if name == "lln_torch":
        return partial(_plain_lln, is_causal=causal)
    if name == "lln_compiled":
        torch.compiler.reset()  # each length is compiled by itself, and after eight of them it would stop compiling
        return partial(_compiled_lln, torch.compile(lln_attention, dynamic=False), is_causal=causal)
    if name == "fla":
        return _fla(setting)
    if name == "floor":
        return _products
    if name == "paper":
        if causal:
            raise CannotRunError("its causal form needs a compiled product that plain torch does not have")
        return paper_attention
    if _package(name, setting) == "performer-pytorch":
        return _performer_package(setting)
    module = build(name, num_heads=setting.heads, head_dim=setting.head_dim, max_len=tokens, **options).eval()
    if causal and not describe(name).causal:
        raise CannotRunError("it has no causal form")
    return partial(module.to(setting.device, DTYPES[setting.dtype]), is_causal=causal)


def _explicit_softmax(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
    scores = (query * query.shape[-1] ** -0.5) @ key.mT
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return torch.softmax(scores, dim=-1) @ value


def _products(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The two products of linear attention; backward has the four that any backward of it needs."""
    return query @ (key.mT @ value)


def _plain_lln(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
    with use("torch"):
        return lln_attention(query, key, value, is_causal=is_causal)


def _compiled_lln(
    compiled: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, **options: bool
) -> Tensor:
    with use("torch"):  # outside of what is compiled, which would break its graph here
        return compiled(query, key, value, **options)


def _fla(setting: Setting) -> Callable[..., Tensor]:
    """linear_attn of flash-linear-attention, which has tokens before heads (B, N, H, D), is normalised and causal.

    Its queries and keys are those of all: a feature map, which it has none of, would come on top.
    """
    try:
        from fla.ops.linear_attn import chunk_linear_attn  # type: ignore[import-not-found]
    except ImportError as error:
        raise CannotRunError("flash-linear-attention is not installed") from error
    head_first = signature(chunk_linear_attn).parameters.get("head_first")
    if head_first is not None and head_first.default:
        raise CannotRunError("this flash-linear-attention has heads before tokens; install a newer one")
    if not setting.causal:
        raise CannotRunError("it is causal only; compare with --causal")

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        output: Tensor = chunk_linear_attn(query, key, value, normalize=True)[0]
        return output.transpose(1, 2)

    return attend


def _performer_package(setting: Setting) -> Callable[..., Tensor]:
    """performer-pytorch's attention with the number of features that both it and the zoo have by default."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it reads torch's version with distutils
        from performer_pytorch.performer_pytorch import (  # type: ignore[import-untyped]
            FastAttention,
            causal_linear_attention_noncuda,
        )
    attention = FastAttention(setting.head_dim).to(DTYPES[setting.dtype])
    if setting.causal:  # set here, because asking for it prints that a CUDA extension is missing
        attention.causal, attention.causal_linear_fn = True, causal_linear_attention_noncuda
    run: Callable[..., Tensor] = attention
    return run


def _nystrom_package(setting: Setting) -> Callable[..., Tensor]:
    """nystrom-attention's token mixing, without projections and convolution, with as many landmarks as the zoo."""
    if setting.causal:
        raise CannotRunError("it has no causal form")
    from nystrom_attention import NystromAttention  # type: ignore[import-untyped]

    sizes = {"dim": 1, "dim_head": setting.head_dim, "heads": setting.heads}
    attention = NystromAttention(**sizes, num_landmarks=LANDMARKS, residual=False).to(DTYPES[setting.dtype])
    attention.to_qkv, attention.to_out = nn.Identity(), nn.Identity()

    def attend(packed: Tensor) -> Tensor:
        output: Tensor = attention(packed)
        return output.view(*output.shape[:2], setting.heads, setting.head_dim).transpose(1, 2)

    return attend


def _package(name: str, setting: Setting) -> str | None:
    """The package whose code is taken for a name, if any."""
    packages = {"performer": "performer-pytorch", "nystrom": "nystrom-attention", "fla": "flash-linear-attention"}
    package = packages.get(name)
    if (
        package is None
        or options_of(name, setting.options)
        or (name == "nystrom" and setting.dtype not in ("float32", "float64"))
    ):
        return None  # nystrom-attention has a float32 identity matrix inside
    try:
        version(package)
    except PackageNotFoundError:
        return None
    return package
