"""Training that can be killed at any moment: transformers' Trainer, whose every step is a function of its number.

Which examples a step uses, how they are masked or augmented, and what dropout draws depend on the seed and the number
of the step alone, so a checkpoint holds weights and optimiser, and no state of random numbers. The continued run is
the uninterrupted one, bit for bit on a CPU. With several processes each takes its part of the same batch.
"""

import dataclasses
import hashlib
import inspect
import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from accelerate.utils import broadcast_object_list  # type: ignore[import-untyped]
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator, set_seed
from transformers.trainer_callback import PrinterCallback

from lln.functional import KINDS
from lln.instruments import Recorder
from lln.tasks.config import TrainConfig
from lln.tasks.data.order import Examples, Shared, Unrolled
from lln.tasks.display import Display, Metrics, StopSignals
from lln.tasks.evaluation import Batch, Measure, Score, classification_scores, evaluate
from lln.tasks.parallel import share_sequences
from lln.tasks.run import RunFolder, processes
from lln.tasks.saving import pickled, save_model, weights

Summary = dict[str, Any]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant_with_warmup"}


def count_tokens(batch: Batch) -> int:
    """Tokens that are not padding."""
    mask = batch.get("attention_mask")
    return batch["input_ids"].numel() if mask is None else int(mask.sum())


def fit(
    model: nn.Module,
    *,
    run: RunFolder,
    config: TrainConfig,
    train_data: Examples,
    eval_data: Examples,
    collate: Callable[[list[Any]], dict[str, Any]] = default_data_collator,
    score: Score = classification_scores,
    measure: Measure | None = None,
    tokens: Callable[[Batch], int] = count_tokens,
    processing: Any = None,
    notes: Mapping[str, Any] | None = None,
    lengths_alike: bool = False,
    label: str = "training",
    quiet: bool = False,
    sequence_parallel: int = 1,
) -> Summary:
    """Train `model` to the end of `config`, from the newest checkpoint of `run` if there is one; returns the summary.

    The model takes a batch as keywords and returns a mapping with "loss" and "logits". The loss is a mean over
    examples, or, if forward takes `num_items_in_batch`, a sum divided by it: the number of labels over all processes
    and pieces of the step. `score` gives sums over a batch of the validation data, which runs over all of its examples;
    `measure` gives metrics from the logits and labels of all of them; `tokens` counts for the speed; `processing` (a
    tokenizer) is saved with the model; `notes` are entries of the summary; with `lengths_alike` a batch holds examples
    of similar `train_data.lengths`; `sequence_parallel` processes share each sequence.
    """
    state = processes()
    groups = share_sequences(model, sequence_parallel, config)
    steps = total_steps(config, len(train_data))
    run.check_data(_fingerprint(train_data, eval_data))
    [checkpoint] = broadcast_object_list([run.checkpoint() if run.main else None])
    first_step = int(checkpoint.name.removeprefix("step-")) if checkpoint else 0
    run.cut(first_step)
    display = Display(label, steps, first_step, quiet=quiet or not run.main)
    if checkpoint and run.main:
        run.note_continued(first_step)
        display.print(f"Continuing {run.path} from step {first_step} of {steps}.")
    data = (train_data, eval_data, collate, score, measure, tokens, lengths_alike)
    trainer = _Trainer(model, run, config, steps, groups, *data)
    try:
        with ExitStack() as stack:
            stack.callback(display.close)
            trainer.display = display
            if state.num_processes == 1:  # several would stop at different steps, and wait for each other forever
                trainer.stop = stack.enter_context(StopSignals(display))
            if run.main:
                trainer.metrics = Metrics(run.path, first_step, display)
                stack.callback(trainer.metrics.close)
            if first_step < steps:
                if run.main and sequence_parallel == 1:  # others would record a part of the sequences
                    trainer.recorder = _recorder(model, run.path, config, first_step, display)
                with trainer.recorder or nullcontext():
                    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
                trainer.recorder = None
            else:  # it was stopped while its last model was evaluated
                trainer.restore(checkpoint)
            if trainer.state.global_step < steps:
                display.print(f"Stopped at step {trainer.state.global_step} of {steps}; the same command continues.")
                raise KeyboardInterrupt
            if not any("eval_loss" in line and line["step"] == steps for line in run.metrics()):
                trainer.evaluate()
        if run.main:
            summary = _summary(run, config, steps, model) | dict(notes or {})
            run.finish(lambda folder: save_model(model, folder, processing), summary)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OSError(
            f"{run.path} stopped at step {trainer.state.global_step}: {reason}. With that remedied, the same command "
            "continues from the newest checkpoint"
        ) from error
    state.wait_for_everyone()
    assert run.summary is not None
    return run.summary


def total_steps(config: TrainConfig, examples: int) -> int:
    if config.steps is not None:
        return config.steps
    assert config.epochs is not None
    return math.ceil(config.epochs * examples / config.batch_size)


class _Trainer(Trainer):
    """transformers' Trainer with our data order, randomness, evaluation, metrics and checkpoints."""

    model: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(
        self,
        model: nn.Module,
        run: RunFolder,
        config: TrainConfig,
        steps: int,
        groups: int,
        train_data: Examples,
        eval_data: Examples,
        collate: Callable[[list[Any]], dict[str, Any]],
        score: Score,
        measure: Measure | None,
        tokens: Callable[[Batch], int],
        lengths_alike: bool,
    ) -> None:
        pieces = groups * config.gradient_accumulation
        arguments = TrainingArguments(
            output_dir=str(run.path),
            use_cpu=not torch.accelerator.is_available(),
            per_device_train_batch_size=config.batch_size // pieces,
            gradient_accumulation_steps=config.gradient_accumulation,
            max_steps=steps,
            learning_rate=config.learning_rate,
            lr_scheduler_type=SCHEDULES[config.decay],
            warmup_steps=config.warmup_steps,
            weight_decay=config.weight_decay,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_epsilon=config.epsilon,
            max_grad_norm=config.clip,
            seed=config.seed,
            train_sampling_strategy="sequential",  # the data set itself is in the order of the steps
            remove_unused_columns=False,
            logging_strategy="no",  # _Flow decides when to log, evaluate and save
            eval_strategy="no",
            save_strategy="no",
            logging_nan_inf_filter=False,
            disable_tqdm=True,
            report_to="none",
            dataloader_pin_memory=torch.cuda.is_available(),
        )
        passes = math.ceil(steps * config.batch_size / len(train_data))
        self.sequence_parallel = processes().num_processes // groups
        alike = config.batch_size if lengths_alike else 0
        super().__init__(
            model=model,
            args=arguments,
            data_collator=collate,
            train_dataset=Shared(
                Unrolled(train_data, epochs=passes, seed=config.seed, lengths_alike=alike),
                batch_size=config.batch_size // pieces,
                sharers=self.sequence_parallel,
            ),
            callbacks=[_Flow(self)],
        )
        self.remove_callback(PrinterCallback)
        # By itself Trainer takes any model with **kwargs to divide by this number, and doubles the loss if it does not.
        self.model_accepts_loss_kwargs = "num_items_in_batch" in inspect.signature(model.forward).parameters
        if config.precision == "fp16":  # accelerate has no loss scale on a CPU
            device = self.args.device.type
            self.accelerator.scaler = torch.amp.GradScaler(
                device, init_scale=config.loss_scale, growth_interval=config.scale_window
            )
        self.run, self.config, self.steps = run, config, steps
        self.eval_data, self.score, self.measure, self.count = eval_data, score, measure, tokens
        self.metrics: Metrics | None = None
        self.recorder: Recorder | None = None
        self.display: Display | None = None
        self.stop: StopSignals | None = None
        before = [line for line in run.metrics() if "seconds" in line]
        self.seconds = before[-1]["seconds"] if before else 0.0  # of training, without evaluation and saving
        self.tokens = before[-1]["tokens"] if before else 0
        self._since_line = (self.seconds, self.tokens)
        self._mark = time.perf_counter()

    def compute_loss_context_manager(self) -> Any:
        dtype = DTYPES.get(self.config.precision)
        return nullcontext() if dtype is None else torch.autocast(self.args.device.type, dtype=dtype)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        self.tokens += self.count(inputs) * (self.args.world_size // self.sequence_parallel)
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        return loss

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        self._unscale()
        return super()._clip_grad_norm(model)  # type: ignore[no-untyped-call]

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if grad_norm is None:
            self._unscale()
        return super()._get_grad_norm(model, grad_norm)  # type: ignore[no-untyped-call]

    def _unscale(self) -> None:
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.unscale_(self.optimizer.optimizer)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)
        self._mark = time.perf_counter()

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        if "loss" not in logs or self.metrics is None:
            return  # what Trainer logs at the end
        seconds, tokens = self.seconds - self._since_line[0], self.tokens - self._since_line[1]
        self._since_line = (self.seconds, self.tokens)
        line = {
            "step": self.state.global_step,
            "loss": logs["loss"],
            "learning_rate": logs["learning_rate"],
            "grad_norm": float(logs["grad_norm"]),
            "tokens_per_second": round(tokens / seconds, 1),
            "tokens": self.tokens,
            "seconds": round(self.seconds, 3),
        }
        if self.accelerator.scaler is not None:
            line["loss_scale"] = self.accelerator.scaler.get_scale()
        self.metrics.add(line)

    def restore(self, checkpoint: Path) -> None:
        """The state after the last step, of which `checkpoint` is."""
        self._load_from_checkpoint(str(checkpoint))
        self.state.global_step = self.steps

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """The scores over every example, whatever the number of processes and the size of the last batch.

        After the last step there is a checkpoint already, so a stop signal ends it at once.
        """
        began = time.perf_counter()
        set_seed(self.config.seed)
        found = evaluate(
            self.model,
            self.eval_data,
            self.accelerator,
            batch_size=self.args.per_device_train_batch_size,
            collate=self.data_collator,
            autocast=self.compute_loss_context_manager,
            score=self.score,
            measure=self.measure,
            on_batch=self._on_eval_batch,
            sequence_parallel=self.sequence_parallel,
        )
        metrics = {f"eval_{name}": value for name, value in found.items()}
        metrics["eval_seconds"] = round(time.perf_counter() - began, 3)
        if self.metrics is not None:
            self.metrics.add({"step": self.state.global_step} | metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _on_eval_batch(self, share: float) -> None:
        if self.stop is not None and self.stop.requested and self.state.global_step == self.steps:
            raise KeyboardInterrupt
        if self.display is not None:
            self.display.evaluating(share)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if self.run.main:
            state = dataclasses.asdict(self.state) | {"log_history": [], "stateful_callbacks": {}}
            files = {
                "model.safetensors": weights(self.model),
                "optimizer.pt": pickled(self.optimizer.state_dict()),
                "scheduler.pt": pickled(self.lr_scheduler.state_dict()),
                "trainer_state.json": json.dumps(state).encode(),
            }
            if self.accelerator.scaler is not None:
                files["scaler.pt"] = pickled(self.accelerator.scaler.state_dict())
            self.run.save_checkpoint(self.state.global_step, files, keep=self.config.keep_checkpoints)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        safetensors.torch.load_model(model or self.model, Path(resume_from_checkpoint) / "model.safetensors")

    def _load_rng_state(self, checkpoint: str | None) -> None:
        pass  # every step seeds its own


class _Flow(TrainerCallback):
    """What happens before and after each step."""

    def __init__(self, trainer: _Trainer) -> None:
        self.trainer = trainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        place = (self.trainer.config.seed, state.global_step, args.process_index)
        set_seed(int(np.random.SeedSequence(place).generate_state(1)[0]))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer, config, step = self.trainer, self.trainer.config, state.global_step
        trainer.seconds += time.perf_counter() - trainer._mark
        last = step == trainer.steps
        stopping = trainer.stop is not None and trainer.stop.requested
        # The last model is evaluated after training, when its checkpoint is safe.
        control.should_evaluate = not last and config.eval_every > 0 and step % config.eval_every == 0
        control.should_save = last or stopping or step % config.save_every == 0
        # A checkpoint holds no part of the mean of a line, so a line ends there.
        control.should_log = control.should_save or step % config.log_every == 0
        control.should_training_stop = last or stopping
        if trainer.display is not None:
            trainer.display.step(step)
        if not control.should_evaluate:
            self._record()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._record()  # only now: a recorder that is ready for the next step would record the evaluation

    def _record(self) -> None:
        if self.trainer.recorder is not None:
            self.trainer.recorder.step()


def _recorder(
    model: nn.Module, folder: Path, config: TrainConfig, first_step: int, display: Display
) -> Recorder | None:
    """All heads and no limit of time, so that a continued run records what an uninterrupted one would."""
    if not config.record_every:
        return None
    if config.attention not in KINDS:
        display.print(f"No records of heads: {config.attention} is not among {', '.join(KINDS)}.")
        return None
    return Recorder(
        model,
        folder / "records.jsonl",
        every=config.record_every,
        heads=None,
        max_overhead=None,
        first_step=first_step,
        seed=config.seed,
        tensorboard=folder / "tensorboard",
    )


def _fingerprint(train_data: Examples, eval_data: Examples) -> dict[str, Any]:
    """Sizes, and a digest of the first, the middle and the last example."""
    found: dict[str, Any] = {}
    for name, data in (("train", train_data), ("validation", eval_data)):
        if not len(data):
            raise ValueError(f"there are no {name} examples")
        total = hashlib.sha256()
        for index in (0, len(data) // 2, len(data) - 1):
            for key, value in sorted(data.example(index, 0).items()):
                total.update(f"{key} {np.asarray(value).tolist()}".encode())
        found |= {f"{name}_examples": len(data), f"{name}_digest": total.hexdigest()[:16]}
    return found


def _summary(run: RunFolder, config: TrainConfig, steps: int, model: nn.Module) -> Summary:
    lines = run.metrics()
    trained = [line for line in lines if "seconds" in line]
    evaluated = [line for line in lines if "eval_loss" in line]
    return {
        "attention": config.attention,
        "options": dict(config.options),
        "seed": config.seed,
        "steps": steps,
        "tokens": trained[-1]["tokens"],
        "seconds": trained[-1]["seconds"],
        "tokens_per_second": round(trained[-1]["tokens"] / trained[-1]["seconds"], 1),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "loss": trained[-1]["loss"],
        **{key: value for key, value in evaluated[-1].items() if key not in ("step", "eval_seconds")},
    }
