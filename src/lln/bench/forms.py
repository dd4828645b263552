"""`lln bench forms`: how near each form of LLN, and other linear attention, is to the softmax attention of a
pretrained model, without any training.

The model reads a text with its own softmax attention S. In each layer every candidate gets the same queries and keys,
and its matrix P is what it makes of the identity. U is uniform attention over the keys that a query may attend to. Per
layer and sequence:

    error        ||P V - S V|| / ||U V - S V||, Frobenius norms over all tokens, heads and features: 1 is as far from
                 softmax attention as uniform attention is
    correlation  of ln P and ln S over the keys that a query may attend to, around the means of each row, which the
                 normalisation determines; per head, then the mean of the heads
    divergence   sum_j S_ij log2(S_ij / P_ij), the Kullback-Leibler divergence in bits; mean of tokens and heads
    entropy      of the rows of P in bits; mean of tokens and heads

A table has the means of layers and sequences. Weights below `FLOOR` count as `FLOOR` in logarithms. The candidate may
also be averaged with softmax attention inside blocks or a window, as LLN+Diag is.

In causal models the centres of the decomposed form, and alpha and beta of what is called calibrated, are those of
another text. In encoders all statistics are those of the sample, as by default.

`loss` is that of the whole causal model when the candidate is the attention of all its layers.

Shapes: B batch, H heads, N queries, M keys, D features of a head.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from lln import zoo
from lln.checks import check_at_least
from lln.forms import token_mean
from lln.functional import block_diagonal_attention, lln_attention, match_moments
from lln.instruments.inspect import encode, load_model
from lln.instruments.reading import repeat_heads
from lln.instruments.rows import LLNRows
from lln.matching.curves import FORMS, Form, Matching
from lln.matching.moments import measure_moments
from lln.problem import Near
from lln.results import Row

Attend = Callable[[Tensor, Tensor, Tensor, bool], Tensor]  # (query, key, value, is_causal)

FLOOR = 1e-12
COMPANIONS: tuple[Near | None, ...] = (None, "blocks", "window")
CHARACTERS_A_TOKEN = 32  # more than any text has: what is beyond is not tokenised
DIGITS = 4


@dataclass(frozen=True)
class Candidate:
    """A row of the table: LLN attention in one of its forms, or a mechanism of `lln.zoo`.

    `signed` gives LLN the 2 D features (dq, -dq) and (dk, -dk), with the curve of 2 D features and the variance of the
    scores of dq and dk. `spread` is a factor of the matched s².
    """

    mechanism: str = "lln"
    form: Form = "paper"
    matching: Matching = "variance"
    spread: float = 1.0
    signed: bool = False
    calibrated: bool = False

    @property
    def label(self) -> str:
        if self.mechanism == "uniform":
            return "uniform, companion alone"
        if self.mechanism != "lln":
            return zoo.describe(self.mechanism).title
        parts = ["LLN" if self.form == "paper" else str(self.form)]
        parts += ["entropy matching"] if self.matching == "entropy" else []
        parts += ["signed features"] if self.signed else []
        parts += [f"spread x {self.spread:g}"] if self.spread != 1.0 else []
        parts += ["calibrated"] if self.calibrated else []
        return ", ".join(parts)


def candidates(*, is_causal: bool) -> list[Candidate]:
    """What is compared: in causal models also with statistics that are calibrated on another text."""
    listed = [Candidate("softmax"), Candidate("uniform")]
    matchings: tuple[Matching, ...] = ("variance", "entropy")
    for form in FORMS:
        if is_causal and form != "decomposed":
            listed.append(Candidate(form=form))
        listed += [Candidate(form=form, matching=matching, calibrated=is_causal) for matching in matchings]
        listed += [Candidate(form=form, spread=spread, calibrated=is_causal) for spread in (0.5, 0.25)]
        if form != "paper":
            listed.append(Candidate(form=form, signed=True, calibrated=is_causal))
    return [*listed, *map(Candidate, ("elu", "performer", "cosformer"))]


class Attention(zoo.Mechanism):
    """A function in the place of a mechanism that `lln.hf.convert` gave a model."""

    description = zoo.describe("lln")

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        assert key_padding_mask is None  # there is one sequence, and no padding
        return self.attend(query, key, value, is_causal)


@dataclass(frozen=True)
class Calibration:
    """Query and key of a layer on another text."""

    query: Tensor
    key: Tensor


def attend(
    candidate: Candidate,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    calibration: Calibration | None,
    *,
    seed: int = 0,
) -> Tensor:
    """The attention of a candidate, (B, H, N, Dv)."""
    if candidate.mechanism == "uniform":
        return _uniform(query, repeat_heads(value, query), is_causal)
    if candidate.mechanism == "softmax":
        return scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=True)
    if candidate.mechanism != "lln":
        options: dict[str, Any] = {"seed": seed} if zoo.describe(candidate.mechanism).random else {}
        options |= {"num_heads": query.shape[1], "head_dim": query.shape[3], "max_len": query.shape[2]}
        return zoo.build(candidate.mechanism, **options).eval()(query, key, value, is_causal=is_causal)  # type: ignore[no-any-return]
    known = calibration if candidate.calibrated else None
    if candidate.signed:
        return _signed(candidate, query, key, value, is_causal, known)
    form, matching = candidate.form, candidate.matching
    if known is None:
        centers = None
        alpha, beta = match_moments(query, key, form=form, matching=matching, is_causal=is_causal)
    else:
        centers = _centers(known) if form == "decomposed" else None
        alpha, beta = match_moments(known.query, known.key, form=form, matching=matching)
    alpha, beta = (x * math.sqrt(candidate.spread) for x in (alpha, beta))
    return lln_attention(query, key, value, alpha=alpha, beta=beta, form=form, centers=centers, is_causal=is_causal)


def _centers(calibration: Calibration) -> tuple[Tensor, Tensor]:
    return token_mean(calibration.query, None), token_mean(calibration.key, None)


def _uniform(query: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    if not is_causal:
        return value.mean(dim=2, keepdim=True).expand(*query.shape[:3], -1)
    return value.cumsum(dim=2) / torch.arange(1, value.shape[2] + 1, device=value.device)[:, None]


def _signed(
    candidate: Candidate, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, known: Calibration | None
) -> Tensor:
    """a = alpha (dq, -dq) and b = log_softmax over the features of beta (dk, -dk), plus the weight of each key."""
    base = known or Calibration(query, key)
    key, value, base_key = (repeat_heads(x, query) for x in (key, value, base.key))
    center_q, center_k = (token_mean(x, None)[:, :, None] for x in (base.query, base_key))
    if candidate.form != "decomposed":
        center_q, center_k = torch.zeros_like(center_q), torch.zeros_like(center_k)
    column = (key * center_q).sum(dim=-1, keepdim=True) * query.shape[3] ** -0.5
    moments = measure_moments(base.query - center_q, base_key - center_k)
    scales = moments.scales(head_dim=2 * query.shape[3], matching=candidate.matching, form="unbiased")
    alpha, beta = (x[..., None, None] * math.sqrt(candidate.spread) for x in scales)
    dq, dk = alpha * (query - center_q), beta * (key - center_k)
    a = torch.cat((dq, -dq), dim=-1)
    b = torch.log_softmax(torch.cat((dk, -dk), dim=-1), dim=-1) + column
    rows = LLNRows(a.flatten(0, 1), b.flatten(0, 1), is_causal=is_causal)
    return rows.block(rows.index).reshape(*query.shape[:3], -1).to(value.dtype) @ value


def join(candidate: Candidate, far: Tensor, near: Tensor | None) -> Tensor:
    """The average with the near branch, which is taken alone with uniform attention."""
    if near is None:
        return far
    return near if candidate.mechanism == "uniform" else (far + near) / 2


class LayerComparison:
    """What the candidates make of the queries, keys and values of one layer and sequence."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, *, block_size: int) -> None:
        self.query, self.key, self.is_causal = query, key, is_causal
        self.value = repeat_heads(value, query)
        size = key.shape[2]
        self.identity = torch.eye(size, dtype=query.dtype, device=query.device).expand(1, key.shape[1], size, size)
        self.allowed = torch.ones(size, size, dtype=torch.bool, device=query.device)
        if is_causal:
            self.allowed = self.allowed.tril()
        self.softmax = self._matrix(Candidate("softmax"))
        self.output = self.softmax @ self.value
        self.unit = (self._matrix(Candidate("uniform")) @ self.value - self.output).norm().item()
        options: dict[str, Any] = {"block_size": block_size, "is_causal": is_causal}
        self.near = {
            near: None if near is None else block_diagonal_attention(query, key, value, near=near, **options)
            for near in COMPANIONS
        }

    def _matrix(self, candidate: Candidate, calibration: Calibration | None = None, seed: int = 0) -> Tensor:
        return attend(candidate, self.query, self.key, self.identity, self.is_causal, calibration, seed=seed)

    def measure(self, candidate: Candidate, calibration: Calibration | None, *, seed: int = 0) -> Row:
        matrix = self._matrix(candidate, calibration, seed)
        output = matrix @ self.value
        logs, wanted = (x.clamp(min=FLOOR).log2() for x in (matrix, self.softmax))
        row: Row = {}
        for near, near_output in self.near.items():
            difference = join(candidate, output, near_output) - self.output
            row[column("error", near)] = difference.norm().item() / self.unit
        row["correlation"] = self._correlation(logs, wanted)
        row["divergence"] = (self.softmax * (wanted - logs)).sum(dim=-1).mean().item()
        row["entropy"] = -(matrix * logs).sum(dim=-1).mean().item()
        return row

    def _correlation(self, x: Tensor, y: Tensor) -> float:
        """Mean of heads, of which one with the same weight for all keys counts as 0."""
        count = self.allowed.sum(dim=-1, keepdim=True)
        x, y = (z.masked_fill(~self.allowed, 0.0) for z in (x, y))
        x, y = ((z - z.sum(dim=-1, keepdim=True) / count).masked_fill(~self.allowed, 0.0) for z in (x, y))
        norms = x.square().sum(dim=(2, 3)).sqrt() * y.square().sum(dim=(2, 3)).sqrt()
        return ((x * y).sum(dim=(2, 3)) / norms.clamp(min=torch.finfo(x.dtype).tiny)).mean().item()


class Comparison:
    """All candidates on all layers of a model: `run` gives a row for each, and calls `on_step` `steps` times."""

    def __init__(
        self,
        model: str,
        text: str,
        *,
        calibration: str | None = None,
        length: int = 512,
        sequences: int = 2,
        block_size: int = 64,
        loss: bool = False,
        seed: int = 0,
    ) -> None:
        """Load the model, and if it is causal run it on the text that statistics are calibrated on.

        Args:
            model: a folder saved by `save_pretrained`, or a model type, as in `lln inspect`.
            text: its first `sequences` times `length` tokens are measured.
            calibration: of causal models; its first `length` tokens are calibrated on. Left out, those of `text` that
                follow what is measured.
            length: tokens of a sequence.
            sequences: number of sequences.
            block_size: of the companions.
            loss: whether the loss of the whole model is measured too.
            seed: of what is drawn at random.

        Raises:
            ValueError: a text is too short, or the model cannot be converted or has no loss.
        """
        from lln.hf import convert
        from lln.hf.convert import attention_modules

        check_at_least(2, length=length)
        check_at_least(1, sequences=sequences, block_size=block_size)
        network, tokenizer, self.notes = load_model(model, "AutoModelForCausalLM" if loss else "AutoModel")
        if hasattr(network.config, "lln_attention"):
            raise ValueError(f"{model} was converted, so its attention is not softmax attention; give the original")
        self.network = network.get_encoder() if network.config.is_encoder_decoder else network
        self.block_size, self.seed = block_size, seed
        convert(self.network.eval(), "lln")  # refuses what is not plain softmax attention
        modules = attention_modules(self.network)
        self.layers = {name: module for name, module in modules.items() if not module.stays_softmax}
        self.is_causal = any(module.attends_causally for module in self.layers.values())
        if loss and not self.is_causal:
            raise ValueError(f"{model} is not causal, so it has no loss of the next token; leave --loss out")
        if calibration is not None and not self.is_causal:
            raise ValueError(f"{model} is not causal, so its statistics are of each sample; leave --calibration out")

        def cut(name: str, source: str, count: int) -> list[Tensor]:
            parts = encode(network, tokenizer, source[: CHARACTERS_A_TOKEN * length * count], length)[:count]
            if len(parts) < count or parts[-1].shape[1] < length:
                raise ValueError(
                    f"{name} is too short for {count} x {length:,} tokens, or the model has fewer positions; give more "
                    "text, a smaller --length or fewer --sequences"
                )
            return parts

        from_text = self.is_causal and calibration is None
        self.sequences = cut("the text", text, sequences + from_text)
        self.candidates = candidates(is_causal=self.is_causal)
        self.losses = [(one, near) for one in self.candidates for near in COMPANIONS] if loss else []
        self.steps = sequences * (len(self.layers) + len(self.losses))
        self.calibrations: dict[str, Calibration] = {}
        if self.is_causal:
            other = self.sequences.pop() if calibration is None else cut("the calibration text", calibration, 1)[0]
            self._read(other, self._calibrate)

    @torch.no_grad()
    def run(self, on_step: Callable[[], None] = lambda: None) -> list[Row]:
        measured: dict[Candidate, list[Row]] = {candidate: [] for candidate in self.candidates}

        def measure(layer: str, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
            inputs = LayerComparison(query, key, value, is_causal, block_size=self.block_size)
            for candidate in self.candidates:
                measured[candidate].append(inputs.measure(candidate, self.calibrations.get(layer), seed=self.seed))
            on_step()
            return attend(Candidate("softmax"), query, key, value, is_causal, None)

        for sequence in self.sequences:
            self._read(sequence, measure)
        rows = [self._summary(candidate, found) for candidate, found in measured.items()]
        for candidate, near in self.losses:
            row = rows[self.candidates.index(candidate)]
            row[column("loss", near)] = self._loss(candidate, near, on_step)
        return rows

    def _calibrate(self, layer: str, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
        self.calibrations[layer] = Calibration(query, key)
        return attend(Candidate("softmax"), query, key, value, is_causal, None)

    def _read(self, sequence: Tensor, attention: Callable[..., Tensor]) -> Any:
        """The model's output with `attention(layer, query, key, value, is_causal)` in the place of its own."""
        for name, module in self.layers.items():
            module.mechanism = Attention(partial(attention, name))
        options = {"use_cache": False} if self.is_causal else {}
        with torch.no_grad():
            return self.network(input_ids=sequence, **options)

    def _summary(self, candidate: Candidate, found: list[Row]) -> Row:
        row: Row = {"label": candidate.label, **asdict(candidate)}
        for name in found[0]:
            row[name] = round(fmean(one[name] for one in found), DIGITS)
        # Layers come in the same order in each sequence.
        layers = [fmean(one["error"] for one in found[i :: len(self.layers)]) for i in range(len(self.layers))]
        return row | {"error_of_layers": [round(error, DIGITS) for error in layers]}

    def _loss(self, candidate: Candidate, near: Near | None, on_step: Callable[[], None]) -> float:
        """The mean loss of the next token, in nats."""

        def replacement(layer: str, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
            far = attend(candidate, query, key, value, is_causal, self.calibrations.get(layer), seed=self.seed)
            if near is None:
                return far
            options: dict[str, Any] = {"block_size": self.block_size, "near": near, "is_causal": is_causal}
            return join(candidate, far, block_diagonal_attention(query, key, value, **options))

        losses = []
        for sequence in self.sequences:
            logits = self._read(sequence, replacement).logits[0, :-1].float()
            losses.append(cross_entropy(logits, sequence[0, 1:]).item())
            on_step()
        return round(fmean(losses), DIGITS)


def column(name: str, near: Near | None) -> str:
    """The name of a number in a row, for one of `COMPANIONS`."""
    return name if near is None else f"{name}_{near}"
