"""One training step of RoBERTa in a process of its own, for `lln.bench.model`; the part that needs transformers."""

import os
import resource
import time
from pathlib import Path

import torch
from transformers import RobertaConfig, RobertaForMaskedLM

from lln.bench.measure import peak_bytes, reset_peak
from lln.bench.model import ModelSetting
from lln.hf import convert
from lln.zoo.registry import options_of

MASKED = 0.15  # of the tokens
WARM_UP_TOKENS = 32


def training_step(mechanism: str, tokens: int, setting: ModelSetting, seed: int, most_bytes: int) -> tuple[float, int]:
    """Seconds and peak bytes of one step, after one on a few tokens; MemoryError if it would take more than allowed."""
    _allow_bytes(most_bytes)
    try:
        return _training_step(mechanism, tokens, setting, seed)
    except RuntimeError as error:
        if "alloc" in str(error):
            raise MemoryError(str(error)) from None
        raise


def _training_step(mechanism: str, tokens: int, setting: ModelSetting, seed: int) -> tuple[float, int]:
    torch.manual_seed(seed)
    reset_peak()
    without_model = peak_bytes()
    config = RobertaConfig(
        vocab_size=setting.vocabulary,
        hidden_size=setting.hidden_size,
        num_hidden_layers=setting.layers,
        num_attention_heads=setting.heads,
        intermediate_size=4 * setting.hidden_size,
        max_position_embeddings=max(tokens, WARM_UP_TOKENS) + 2,  # positions begin after that of padding
        type_vocab_size=1,
        layer_norm_eps=1e-5,
        attention_probs_dropout_prob=0.0,
    )
    model = RobertaForMaskedLM(config).train()  # type: ignore[no-untyped-call]
    options = {"block_size": setting.block_size} if mechanism == "lln_diag" else {}
    convert(model, mechanism, **options | options_of(mechanism, setting.options))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(number: int) -> None:
        ids = torch.randint(4, setting.vocabulary, (1, number))
        masked = torch.rand(1, number) < MASKED
        masked[0, 0] = True  # at least one
        hidden = model.roberta(ids).last_hidden_state
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[masked]), ids[masked])
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    step(min(WARM_UP_TOKENS, tokens))
    reset_peak()
    before = time.perf_counter()
    step(tokens)
    return time.perf_counter() - before, peak_bytes() - without_model


def _allow_bytes(more: int) -> None:
    """Let this process have so many bytes more and then fail by itself, where its size is known (Linux)."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        taken = int(statm.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (taken + more, resource.getrlimit(resource.RLIMIT_AS)[1]))
