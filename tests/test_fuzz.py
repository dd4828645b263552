"""Random problems on every backend against the explicit reference in float64.

Strides, masks, dtypes, lengths, shared keys, outliers.

Every case is drawn from its number alone, so a failure is repeated by its id. What is compared are the outputs of kept
tokens and the gradients of the memory that the inputs are views of.
"""

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import lln
from helpers import BACKENDS
from lln import reference

# The last ones have a key with nearly all weight, whose gradients vanish but for rounding.
EAGER = [*range(150), 3378, 4528, 4727]
COMPILED = [1000, 1001, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1002, 1006))]
# What a result may be off by, in units of the largest entry; or four times the error of plain torch, if that is more.
FLOOR = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
OPTIONS = {"near": {"blocks", "window"}, "form": {"paper", "unbiased", "decomposed"}, "is_causal": {False, True}}
WHAT = ("output", "gradient of query", "gradient of key", "gradient of value")
NOISE = {"as others": None, "ones": 1.0, "huge": 1e30, "nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf}


@dataclass(frozen=True)
class Layout:
    """How a (B, heads, tokens, features) tensor lies in memory: the shape of its base, and the view of it."""

    name: str

    def base(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        B, H, N, D = shape
        return {
            "dense": (B, H, N, D),
            "tokens first": (B, N, H, D),
            "features outside": (B, H, D, N),
            "same in batch": (1, H, N, D),
            "same in heads": (B, 1, N, D),
            "every second token": (B, H, 2 * N, D),
            "odd offset": (B, H, N, D + 3),
            "overlapping": (B, H, N + D - 1),
            "same tokens": (B, H, 1, D),
        }[self.name]

    def view(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        match self.name:
            case "tokens first":
                return x.transpose(1, 2)
            case "features outside":
                return x.transpose(2, 3)
            case "same in batch" | "same in heads" | "same tokens":
                return x.expand(shape)
            case "every second token":
                return x[:, :, ::2]
            case "odd offset":
                return x[..., 3:]
            case "overlapping":
                return x.unfold(2, shape[3], 1)
        return x


LAYOUTS = [
    Layout(name)
    for name in (
        "dense",
        "tokens first",
        "features outside",
        "same in batch",
        "same in heads",
        "every second token",
        "odd offset",
        "overlapping",
        "same tokens",
    )
]


DENSE = LAYOUTS[0]


class Case:
    """One problem, drawn from a number."""

    def __init__(self, number: int, *, compile: bool = False) -> None:
        draw = random.Random(number)
        torch.manual_seed(number)
        self.name = draw.choice(["lln_attention", "lln_attention", "lln_diag_attention", "block_diagonal_attention"])
        B, key_heads, groups = draw.randint(1, 3), draw.randint(1, 2), draw.choice([1, 1, 2, 3])
        N = draw.choice([1, 2, 7, 63, 64, 65, 100, 131])
        is_cross = self.name == "lln_attention" and draw.random() < 0.2
        M = draw.choice([1, 50, 129]) if is_cross else N
        D, V = draw.choice([8, 16, 24, 64]), draw.choice([8, 16, 40])
        self.dtype = draw.choice([torch.float32] * 6 + [torch.bfloat16, torch.float16, torch.float64])
        self.options: dict[str, object] = {"is_causal": not is_cross and draw.random() < 0.4}
        if self.name != "lln_attention":
            self.options["block_size"] = draw.choice([1, 16, 23, 64])
            self.options["near"] = draw.choice(["blocks", "blocks", "window"])
        if self.name != "block_diagonal_attention":
            self.options["matching"] = draw.choice(["variance", "entropy", "linear"])
            if draw.random() < 0.3:
                self.options |= {"alpha": draw.uniform(0.2, 3), "beta": draw.uniform(0.2, 3)}
            self._draw_form(draw, key_heads * groups, key_heads, D)
            if draw.random() < 0.2:
                self.options["key_weight"] = torch.randn(1, draw.choice([1, key_heads * groups]), M)
        self.shapes = (B, key_heads * groups, N, D), (B, key_heads, M, D), (B, key_heads, M, V)
        self.layouts = [draw.choice([*LAYOUTS, *[DENSE] * len(LAYOUTS)]) for _ in self.shapes]
        self.bases = [
            torch.randn(x.base(s)) * draw.choice([0.3, 1, 2]) for x, s in zip(self.layouts, self.shapes, strict=True)
        ]
        self._make_outlier(draw)
        if B == 1 and N == M and not compile and draw.random() < 0.5:
            cuts = sorted(draw.randint(0, N) for _ in range(draw.randint(0, 4)))
            self.options["cu_seqlens"] = torch.tensor([0, *cuts, N], dtype=torch.int32)
            self.keep = torch.ones(B, M, dtype=torch.bool)
        else:
            self.keep, self.options["key_padding_mask"] = self._draw_mask(draw, B, M)
        self.keep_query = self.keep if N == M else torch.ones(B, N, dtype=torch.bool)
        self._make_noise(draw)
        self.odd_token: int | None = None
        if self.options["is_causal"] and N > 1 and "cu_seqlens" not in self.options and draw.random() < 0.3:
            self._make_odd_token(draw)
        self.bases = [x.to(self.dtype) for x in self.bases]
        self.gradient = torch.randn(B, self.shapes[0][1], N, V)
        if draw.random() < 0.3:
            self.gradient = torch.randn(B, 1, 1, V).expand_as(self.gradient)
        elif draw.random() < 0.3:
            self.gradient = torch.randn(B, V, N, self.shapes[0][1]).transpose(1, 3)

    def _draw_form(self, draw: random.Random, heads: int, key_heads: int, width: int) -> None:
        self.options["form"] = draw.choice(["paper", "paper", "unbiased", "decomposed"])
        if self.options["form"] == "decomposed" and (self.options["is_causal"] or draw.random() < 0.3):
            self.options["centers"] = (torch.randn(heads, width) / 2, torch.randn(key_heads, width) / 2)

    def _make_outlier(self, draw: random.Random) -> None:
        """One key a thousand to a hundred thousand times as large as the others."""
        if self.layouts[1].name == "dense" and self.dtype is torch.float32 and draw.random() < 0.5:
            self.bases[1][0, 0, draw.randrange(self.shapes[1][2])] *= 10 ** draw.uniform(3, 5)

    def _draw_mask(self, draw: random.Random, B: int, M: int) -> tuple[Tensor, Tensor | None]:
        kind = draw.choice(["none", "none", "right", "left", "holes", "lengths"])
        lengths = torch.tensor([draw.randint(0, M) for _ in range(B)])
        position = torch.arange(M)
        if kind == "none":
            return torch.ones(B, M, dtype=torch.bool), None
        if kind == "holes":
            keep = torch.rand(B, M) < 0.6
        else:
            keep = position >= M - lengths[:, None] if kind == "left" else position < lengths[:, None]
        return keep, lengths if kind == "lengths" else keep

    def _make_noise(self, draw: random.Random) -> None:
        """Fill padding with anything, where a token has memory of its own."""
        noise = NOISE[draw.choice(list(NOISE))]
        for x, layout, keep in zip(self.bases, self.layouts, (self.keep_query, self.keep, self.keep), strict=True):
            if noise is not None and layout.name == "dense":
                x.masked_fill_(~keep[:, None, :, None], noise)

    def _make_odd_token(self, draw: random.Random) -> None:
        """A token that is kept but not finite: no token before it may attend to it."""
        which = draw.randrange(3)
        if self.layouts[which].name == "dense":
            self.odd_token = draw.randrange(1, self.shapes[0][2])
            self.bases[which][0, :, self.odd_token] = draw.choice([torch.nan, torch.inf, -torch.inf])

    def run(self, module: object, dtype: torch.dtype, compile: bool = False) -> list[Tensor]:
        """Output of kept queries and the gradients of all bases."""
        bases = [x.to(dtype).detach().requires_grad_() for x in self.bases]

        def attention(*bases: Tensor) -> Tensor:
            inputs = [layout.view(x, shape) for layout, x, shape in zip(self.layouts, bases, self.shapes, strict=True)]
            options = dict(self.options)
            if "centers" in options:
                options["centers"] = tuple(x.to(dtype) for x in options["centers"])
            if "key_weight" in options and dtype is torch.float64:
                options["key_weight"] = options["key_weight"].double()
            output: Tensor = getattr(module, self.name)(*inputs, **options)
            return output

        if compile:
            torch._dynamo.reset()
            attention = torch.compile(attention, fullgraph=True, backend="aot_eager")
        output = attention(*bases).masked_fill(~self.keep_query[:, None, :, None], 0.0)
        if self.odd_token is not None:  # gradients are not finite then
            return [output[:, :, : self.odd_token].detach()]
        return [output.detach(), *torch.autograd.grad(output, bases, self.gradient.to(dtype))]

    def reference(self) -> list[Tensor]:
        """The same from the explicit formulas, which padding would spoil: it holds zeros there."""
        case = Case.__new__(Case)
        case.__dict__ |= self.__dict__
        case.bases = [
            x.double().masked_fill(~keep[:, None, :, None], 0.0).nan_to_num(0.0, 0.0, 0.0)
            if layout.name == "dense"
            else x.double()
            for x, layout, keep in zip(self.bases, self.layouts, (self.keep_query, self.keep, self.keep), strict=True)
        ]
        return case.run(reference, torch.float64)

    def __str__(self) -> str:
        options = {k: "tensor" if isinstance(v, (Tensor, tuple)) else v for k, v in self.options.items()}
        return f"{self.name} {self.dtype} {self.shapes} {[x.name for x in self.layouts]} {options}"


def check(case: Case, *, compile: bool) -> list[str]:
    """Compare all backends that can compute a case with the reference; returns their names."""
    expected = case.reference()
    with lln.backends.use("torch"):
        plain = case.run(lln, case.dtype)
    # Gradients that vanish by cancellation are judged by the largest of all gradients.
    unit_of_output = expected[0].abs().max().clamp(min=1e-2)
    unit_of_gradients = max([float(x.abs().max()) for x in expected[1:]], default=0.0) or 1.0
    units = [unit_of_output, *[unit_of_gradients] * 3]
    able = []
    for backend in BACKENDS:
        try:
            with lln.backends.use(backend):
                found = case.run(lln, case.dtype, compile) if compile or backend != "torch" else plain
        except lln.backends.UnsupportedError:
            continue
        able.append(backend)
        for what, x, y, z, unit in zip(WHAT, found, plain, expected, units, strict=False):
            error, allowed = (float((got.double() - z).abs().max() / unit) for got in (x, y))
            assert allowed < 1000 * FLOOR[case.dtype], f"{what} of plain torch is off by {allowed:.1e}: {case}"
            assert error < max(FLOOR[case.dtype], 4 * allowed), f"{what} of {backend} is off by {error:.1e}: {case}"
    return able


@pytest.mark.parametrize("number", EAGER)
def test_eager(number):
    case = Case(number)
    able = check(case, compile=False)
    assert "torch" in able
    assert "cpu" in able or "cpu" not in BACKENDS or case.dtype is torch.float64


@pytest.mark.parametrize("number", COMPILED)
def test_compiled(number):
    assert "torch" in check(Case(number, compile=True), compile=True)


def test_the_cases_cover_what_they_should():
    cases = [Case(number) for number in EAGER]
    assert {x.name for case in cases for x in case.layouts} == {x.name for x in LAYOUTS}
    assert {case.dtype for case in cases} == set(FLOOR)
    assert sum(not x.isfinite().all() for case in cases for x in case.bases) > 10
    for option, values in OPTIONS.items():
        assert {case.options.get(option) for case in cases} >= values
    assert sum("cu_seqlens" in case.options for case in cases) > 10
    assert {case.options.get("form") for case in cases if "key_weight" in case.options} >= OPTIONS["form"]
    assert sum(case.odd_token is not None for case in cases) > 5
    assert sum(bool((case.bases[1].abs() > 100).any()) for case in cases) > 5
