"""The stages of linearising, as one training that can be killed at any moment and continued bit for bit.

- calibrate: centres and spreads of every head, from the teacher's queries and keys, then shares of the branches and
  output projections in closed form (`lln.linearize.outputs`); no training;
- align: the far branch of every layer learns softmax attention's weights, on what the teacher's layer sees; shares are
  fitted anew;
- join: the shares of the two branches are learned, on the teacher's attention outputs;
- distil: the whole model learns to give what the teacher gives: predictions of language models, hidden states of
  encoders, both of classifiers.

Branches that are joined by a gate give softmax attention's own output where nothing is far. Output projections that are
fitted to all lengths would change it, so training begins from the teacher's; other mechanisms have theirs fitted anew
after align and join.

A step is a function of its number: data and chance depend on the seed, the stage and the step alone.
"""

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, set_seed

from lln.linearize.config import LinearizeConfig
from lln.linearize.data import STAGES, Batch, Source
from lln.linearize.losses import hidden_loss, logits_loss, output_loss, weights_loss
from lln.linearize.outputs import fit_outputs, fit_shares, output_layers, restore_outputs
from lln.linearize.teacher import Observation, converted_modules, is_classifier, observing
from lln.mechanism import JoinedBranches, Mechanism
from lln.nn import LLNAttention
from lln.tasks.data.order import draws
from lln.tasks.display import Display, Metrics, StopSignals
from lln.tasks.run import RunFolder
from lln.tasks.saving import pickled, weights

WARMUP = 0.05  # share of a stage's steps in which the learning rate rises
# Shares of the matched spread that calibration tries on every head: concentrating on the wrong tokens is worse than
# not concentrating, so heads that LLN attention does not follow well start low.
SPREADS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.85, 1.0)


class DivergedError(ValueError):
    """A loss is not a number any more. The same settings would end the same way, so there is nothing to continue."""


@dataclass(frozen=True)
class Stage:
    """What is trained, and on what."""

    name: str
    steps: int
    groups: list[tuple[float, list[nn.Parameter]]]  # learning rates, and what is trained with them
    loss: Callable[[Batch, int], Tensor]

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for _, group in self.groups for parameter in group]


class Linearizer:
    """A student that is made to imitate a teacher, stage by stage."""

    def __init__(
        self, student: PreTrainedModel, teacher: PreTrainedModel, source: Source, config: LinearizeConfig
    ) -> None:
        self.student, self.teacher, self.source, self.config = student, teacher, source, config
        modules = converted_modules(student)
        self.mechanisms: dict[str, Mechanism] = {name: module.mechanism for name, module in modules.items()}
        self.is_language_model = getattr(student, "lm_head", None) is not None and any(
            module.attends_causally for module in modules.values()
        )
        self.is_classifier = is_classifier(teacher)

    def calibrate(self, on_layer: Callable[[], None] = lambda: None) -> None:
        """Set centres, projections and spreads of every head that learns them; of a few spreads the best is taken."""
        observed = self._observed(self.source.calibration())
        for name, mechanism in self.mechanisms.items():
            if isinstance(mechanism, LLNAttention) and mechanism.features is not None:
                calibrate_heads(mechanism, observed[name], self._rows(observed[name], "align", 0))
            on_layer()
        self._fit_joins()

    def begin(self) -> None:
        """What precedes the first step of training."""
        if self._is_exact_nearby:
            restore_outputs(self.student, self.teacher, self._output_layers())

    def finish(self, stage: str) -> None:
        """What follows the last step of a stage: fits in closed form of what depends on what the stage has trained."""
        if stage in ("align", "join"):
            self._fit_joins(shares=stage == "align", outputs=not self._is_exact_nearby)

    def _fit_joins(self, *, shares: bool = True, outputs: bool = True) -> None:
        """Fit the shares of the branches and the output projections, if asked for."""
        batch = self._fitted_batch()
        if shares:
            for name, seen in self._observed([batch]).items():
                fit_shares(self.mechanisms[name], seen)
        if outputs:
            fit_outputs(self.student, self.teacher, batch, self._output_layers())

    def _output_layers(self) -> dict[str, str]:
        return output_layers(self.teacher, self.source.calibration()[0])

    @property
    def _is_exact_nearby(self) -> bool:
        """Whether all attentions give softmax attention's own output where nothing is far."""
        return all(
            getattr(mechanism, "combine", None) in ("gate", "replace", "mass") for mechanism in self.mechanisms.values()
        )

    def _fitted_batch(self) -> Batch:
        """Passages of all lengths, because errors depend on the length, or of one if a mechanism takes no padding."""
        if all(mechanism.description.padding for mechanism in self.mechanisms.values()):
            return self.source.mixed()
        batches = self.source.calibration()
        return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}

    def stages(self) -> list[Stage]:
        """The stages that train something; weights of the student are trained in the last one alone."""
        steps, config = self.config.stage_steps(), self.config
        shares = [x for mechanism in self.mechanisms.values() for x in share_parameters(mechanism)]
        known = set(map(id, shares))
        features = [x for mechanism in self.mechanisms.values() for x in mechanism.parameters() if id(x) not in known]
        found = (
            Stage("align", steps["align"], [(config.align_rate, features)], self._align),
            Stage("join", steps["join"], [(config.join_rate, shares)], self._join),
            Stage("distil", steps["distil"], self._distilled(), self._distil),
        )
        return [stage for stage in found if stage.steps and stage.parameters]

    def _distilled(self) -> list[tuple[float, list[nn.Parameter]]]:
        """What the last stage trains: all weights or LoRA matrices, and the mechanisms with a rate of their own."""
        mechanisms = [x for mechanism in self.mechanisms.values() for x in mechanism.parameters()]
        known, lora = set(map(id, mechanisms)), bool(self.config.lora_rank)
        rest = [
            x for name, x in self.student.named_parameters() if id(x) not in known and ("lora_" in name or not lora)
        ]
        groups = ((self.config.distil_rate, rest), (self.config.distil_feature_rate, mechanisms))
        return [(rate, group) for rate, group in groups if group]

    def _observed(self, batches: list[Batch], *, precisely: bool = True) -> dict[str, Observation]:
        """What the teacher's attentions see in some batches of the same shape; in float32, or as the teacher trains."""
        precision = "fp32" if precisely else self.config.precision
        with observing(self.teacher) as found, torch.no_grad(), autocast(precision, batches[0]):
            for batch in batches:
                self.teacher(**batch)
        return {name: _joined(seen) for name, seen in found.items()}

    def _rows(self, seen: Observation, stage: str, step: int) -> Tensor:
        tokens = seen.query.shape[2]
        chance = draws(self.config.seed, 10 + STAGES.index(stage), step)
        return torch.from_numpy(chance.permutation(tokens)[: self.config.rows].copy())

    def _align(self, batch: Batch, step: int) -> Tensor:
        losses = []
        for name, seen in self._observed([batch], precisely=False).items():
            mechanism = self.mechanisms[name]
            features = mechanism.log_features(seen.query, seen.key)
            if features is None:
                losses.append(output_loss(mechanism, seen))
            else:
                losses.append(weights_loss(features, seen, self._rows(seen, "align", step)).mean())
        return torch.stack(losses).sum()

    def _join(self, batch: Batch, step: int) -> Tensor:
        observed = self._observed([batch], precisely=False)
        return torch.stack([output_loss(self.mechanisms[name], seen) for name, seen in observed.items()]).sum()

    def _distil(self, batch: Batch, step: int) -> Tensor:
        options: dict[str, Any] = {} if self.is_language_model else {"output_hidden_states": True}
        with torch.no_grad(), autocast(self.config.precision, batch):
            wanted = self.teacher(**batch, **options)
        with autocast(self.config.precision, batch):
            found = self.student(**batch, **options)
        if self.is_language_model:
            return logits_loss(found.logits, wanted.logits)
        mask = batch.get("attention_mask")
        loss = hidden_loss(found.hidden_states, wanted.hidden_states, None if mask is None else mask.bool())
        return loss + logits_loss(found.logits, wanted.logits) if self.is_classifier else loss


def calibrate_heads(mechanism: LLNAttention, seen: Observation, rows: Tensor) -> None:
    """Centres, projection and spread of every head of one layer."""
    assert mechanism.features is not None
    few = seen.first(max(1, len(seen.query) // 4))  # enough to compare spreads; centres are of all samples
    best = torch.full((mechanism.num_heads,), math.inf)
    chosen = torch.ones(mechanism.num_heads)
    query, key = seen.query, seen.key
    if seen.keep is not None:  # the kept tokens of all samples, one after the other
        query, key = (x.transpose(1, 2)[seen.keep].transpose(0, 1)[None] for x in (query, key))
    for spread in SPREADS:
        mechanism.features.calibrate(query, key, matching=mechanism.matching, spread=spread)
        with torch.no_grad():
            features = mechanism.log_features(few.query, few.key)
            assert features is not None
            loss = weights_loss(features, few, rows)
        chosen = torch.where(loss < best, spread, chosen)
        best = torch.minimum(loss, best)
    mechanism.features.calibrate(query, key, matching=mechanism.matching, spread=chosen)


def share_parameters(mechanism: Mechanism) -> list[nn.Parameter]:
    """What decides how the branches of a mechanism are put together."""
    return mechanism.share_parameters() if isinstance(mechanism, JoinedBranches) else []


def train(
    work: Linearizer, run: RunFolder, *, quiet: bool, after_stage: Callable[[str], None] = lambda name: None
) -> None:
    """Go through the stages, from the newest checkpoint of the run if there is one.

    `after_stage` is called after each one, and after calibration, with the student as it then is; if the run is killed
    before it returns, it is called again.
    """
    stages = work.stages()
    total = sum(stage.steps for stage in stages)
    checkpoint = run.checkpoint()
    done = 0
    if checkpoint is not None:
        safetensors.torch.load_model(work.student, checkpoint / "model.safetensors")
        done = int(checkpoint.name.removeprefix("step-"))
        run.cut(done)
        run.note_continued(done)
        run.print(f"Continuing {run.path} from step {done} of {total}.")
    else:
        display = Display("calibrate", len(work.mechanisms), 0, quiet=quiet)
        layers = iter(range(1, len(work.mechanisms) + 1))
        try:
            work.calibrate(lambda: display.step(next(layers)))
        finally:
            display.close()
        run.save_checkpoint(0, {"model.safetensors": weights(work.student)}, keep=2)
    if done == 0:
        after_stage("calibrate")
        if stages:
            work.begin()
    first = 0
    for stage in stages:
        last = first + stage.steps
        if done < last:
            _train_stage(work, stage, first, max(done, first), run, checkpoint if done > first else None, quiet=quiet)
        if done <= last:
            after_stage(stage.name)
        first = last


def _train_stage(
    work: Linearizer, stage: Stage, first: int, done: int, run: RunFolder, checkpoint: Path | None, *, quiet: bool
) -> None:
    trainable = {parameter: parameter.requires_grad for parameter in work.student.parameters()}
    for parameter in trainable:
        parameter.requires_grad_(False)
    parameters = stage.parameters
    for parameter in parameters:
        parameter.requires_grad_(True)
    groups = [{"params": group, "lr": rate} for rate, group in stage.groups]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    if checkpoint is not None:
        optimizer.load_state_dict(torch.load(checkpoint / "optimizer.pt", weights_only=True))
    display = Display(stage.name, first + stage.steps, done, quiet=quiet)
    metrics = Metrics(run.path, done, display)
    saved, began = time.monotonic(), time.monotonic()
    tokens = 0
    # Without dropout: the teacher has none, and what is fitted in closed form would follow the noise. Mechanisms that
    # measure running averages or draw features anew do so in training alone.
    for mechanism in work.mechanisms.values():
        mechanism.train()
    try:
        with StopSignals(display) as stop:
            for step in range(done - first, stage.steps):
                set_seed(int(np.random.SeedSequence((work.config.seed, first + step)).generate_state(1)[0]))
                batch = work.source.batch(stage.name, step)
                for settings, (rate, _) in zip(optimizer.param_groups, stage.groups, strict=True):
                    settings["lr"] = rate * schedule(step, stage.steps)
                loss = stage.loss(batch, step)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                norm = nn.utils.clip_grad_norm_(parameters, 1.0)
                value = float(loss.detach())
                if not math.isfinite(value):
                    raise DivergedError(
                        f"the loss of stage {stage.name} is {value} at step {step}; lower --{stage.name}-rate"
                    )
                optimizer.step()
                tokens += next(iter(batch.values())).numel()
                number, is_last = first + step + 1, step + 1 == stage.steps
                if is_last:
                    work.student.train(False)
                    work.finish(stage.name)
                display.step(number)
                if number % 10 == 0 or is_last:
                    seconds = time.monotonic() - began
                    line = {"step": number, "loss": value, "grad_norm": float(norm)}
                    metrics.add(line | {"tokens_per_second": round(tokens / seconds, 1)})
                if is_last or stop.requested or time.monotonic() - saved > work.config.save_seconds:
                    files = {"model.safetensors": weights(work.student)}
                    if not is_last:
                        files["optimizer.pt"] = pickled(optimizer.state_dict())
                    run.save_checkpoint(number, files, keep=2)
                    saved = time.monotonic()
                if stop.requested and not is_last:
                    display.print(f"Stopped in {stage.name} at step {number}; the same command continues.")
                    raise KeyboardInterrupt
    finally:
        metrics.close()
        display.close()
        work.student.train(False)
        for parameter, before in trainable.items():
            parameter.requires_grad_(before)


def autocast(precision: str, batch: Batch) -> AbstractContextManager[Any]:
    """Where a model computes on a batch in a number format, fp32 or bf16, as it is trained."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(next(iter(batch.values())).device.type, dtype=torch.bfloat16)


def schedule(step: int, steps: int) -> float:
    """The learning rate of a step, as a share of the highest: a linear rise, then half a cosine."""
    rise = max(1, round(WARMUP * steps))
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def _joined(seen: list[Observation]) -> Observation:
    """Batches of text, which are joined, have no padding."""
    names = ("query", "key", "value", "output")
    query, key, value, output = (torch.cat([getattr(x, name) for x in seen]).float() for name in names)
    return Observation(query, key, value, seen[0].keep, seen[0].is_causal, output)
