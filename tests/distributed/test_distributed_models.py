"""Converted models over several processes: loss, gradients, states, with data parallelism and FSDP."""

import copy
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from distributed_world import report, run_world
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

transformers = pytest.importorskip("transformers")

import lln.hf  # noqa: E402
from lln import distributed  # noqa: E402

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 70,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
}
MORE = {
    "llama": {"num_key_value_heads": 2},
    "roberta": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}
HEADS = {"llama": "CausalLM", "roberta": "MaskedLM", "bert": "TokenClassification"}


def build(family, head=None, attention="lln_diag", **options):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **SIZES | MORE.get(family, {}))
    model = getattr(transformers, f"AutoModelFor{head or HEADS[family]}").from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    model = lln.hf.convert(model, attention, **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".mechanism." in name:  # gates and features, which begin at zero
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def batch(family, seed=0, tokens=37):
    chance = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 50, (3, tokens), generator=chance)
    mask = torch.ones_like(ids)
    mask[0, -13:] = 0
    labels = torch.randint(0, 2 if family == "bert" else 50, (3, tokens), generator=chance)
    unlabelled = (mask == 0) | (torch.rand(3, tokens, generator=chance) < 0.5)
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels.masked_fill(unlabelled, -100)}


def gradients(model):
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def close(found, expected, tolerance=2e-5):
    assert found.keys() == expected.keys()
    for name, x in found.items():
        error, largest = float((x - expected[name]).abs().max()), float(expected[name].abs().max())
        assert error <= tolerance * max(largest, 1e-2), f"{name}: {error:.2e} of {largest:.2e}"


def train_step(group, family, attention="lln_diag", inputs=None, checkpointing=False, **options):
    """A step of one process with all tokens against a step of several, averaged by DistributedDataParallel."""
    model = build(family, attention=attention, **options).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    inputs = inputs or batch(family)
    expected = copy.deepcopy(model)
    outputs = expected(**inputs)
    outputs.loss.backward()
    wrapped = DistributedDataParallel(distributed.parallelize(model, group), process_group=group)
    found = wrapped(**inputs)
    found.loss.backward()
    assert abs(float(found.loss.detach() - outputs.loss.detach())) < 2e-6 * float(outputs.loss.detach().abs())
    logits = outputs.logits.detach()
    counts = torch.ones_like(logits[..., :1])
    if (
        options.get("combine") in ("gate", "replace") and "attention_mask" in inputs
    ):  # the share of padding means nothing
        counts = inputs["attention_mask"][..., None]
    own, counts = (distributed.split_tokens(wrapped, x) for x in (logits, counts))
    close({"logits": found.logits.detach() * counts}, {"logits": own * counts})
    close(gradients(model), gradients(expected))


def packed(group, **options):
    ids = batch("llama")["input_ids"].clamp(min=3)
    numbers = torch.zeros_like(ids)
    numbers[0, 9:], numbers[1, 20:], numbers[2, 5:] = 1, 1, 1
    numbers[2, 30:] = 2
    inputs = {"input_ids": ids, "labels": batch("roberta")["labels"], "seq_idx": numbers}
    train_step(group, "roberta", inputs=inputs, block_size=4, **options)
    if options.get("combine") == "replace":  # which is not for causal attention
        return
    starts = torch.cat([torch.arange(11), torch.arange(26)])[None]
    inputs = {"input_ids": ids[:1], "position_ids": starts, "labels": ids[:1]}
    train_step(group, "llama", inputs=inputs | {"use_cache": False}, block_size=4, **options)
    model = distributed.parallelize(build("llama"), group)
    with pytest.raises(ValueError, match="pass use_cache=False with packed sequences"):
        model(**inputs)


def data_and_sequence(group, sharded, family="roberta"):
    """Two batches on a 2 x 2 mesh: the gradient is the mean of both, by DDP or FSDP2 over all four processes."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    batches = [batch(family, seed) for seed in (0, 1)]
    model = build(family, block_size=8)
    expected = copy.deepcopy(model)
    losses = [expected(**x).loss for x in batches]
    (sum(losses) / 2).backward()
    wanted = gradients(expected)
    distributed.parallelize(model, mesh["sequence"])
    if sharded:
        everyone = init_device_mesh("cpu", (4,))
        for layer in model.model.layers if family == "llama" else model.roberta.encoder.layer:
            fully_shard(layer, mesh=everyone)
        wrapped = fully_shard(model, mesh=everyone)
    else:
        wrapped = DistributedDataParallel(model)
    place = mesh["data"].get_local_rank()
    with warnings.catch_warnings():  # the output of nn.Linear is a view on CPUs
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        loss = wrapped(**batches[place]).loss
    loss.backward()
    assert abs(float((loss - losses[place]).detach())) < 1e-5
    found = gradients(model)
    close({name: x.full_tensor() if sharded else x for name, x in found.items()}, wanted)


def generate(group, attention="lln_diag", tokens=41, **options):
    model = build("llama", attention=attention, **options).eval()
    ids = torch.randint(3, 50, (2, tokens), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    settings = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(ids, attention_mask=mask, **settings)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)  # as `generate` counts them
    cache = distributed.prefill(model, ids, mask, mesh=group, position_ids=positions[:, :-1])
    found = model.generate(ids, attention_mask=mask, past_key_values=cache, **settings)
    assert torch.equal(found.sequences, expected.sequences)
    close({"logits": torch.stack(found.logits)}, {"logits": torch.stack(expected.logits)})


def refused(group):
    with pytest.raises(ValueError, match="head that is not for each token"):
        distributed.parallelize(build("roberta", "SequenceClassification"), group)
    with pytest.raises(ValueError, match='is not "lln" or "lln_diag"'):
        distributed.parallelize(build("roberta", attention="elu"), group)
    with pytest.raises(ValueError, match=r'combine="mass" of RobertaForMaskedLM .* use "gate" or "replace"'):
        distributed.parallelize(build("roberta", combine="mass", statistics="learned"), group)
    model = distributed.parallelize(build("roberta"), group)
    rank, inputs = dist.get_rank(group), batch("roberta")
    with pytest.raises(ValueError, match=r"input_ids: \d+ on rank 0"):
        model(**batch("roberta", seed=rank))
    with pytest.raises(ValueError, match=r"attention_mask: \d+ on rank 0"):
        model(**inputs | {"attention_mask": (torch.arange(37) < 30 + rank).long().expand(3, -1)})
    with torch.set_grad_enabled(rank > 0), pytest.raises(ValueError, match="gradients: False on rank 0; True on rank"):
        model(**inputs)
    labels = inputs["labels"]
    with pytest.raises(ValueError, match=r"kind of labels: int64 \(3, 37\) on rank 0; int32 \(3, 37\) on rank"):
        model(**inputs | {"labels": labels.int() if rank else labels})
    with pytest.raises(ValueError, match="rank 0: ValueError: it needs input_ids or inputs_embeds"):
        model(**inputs if rank else {})
    wrong = labels.clone()
    wrong[0, 0] = 50  # in the part of rank 0 alone
    with pytest.raises(ValueError, match="the loss of RobertaForMaskedLM cannot run: rank 0: IndexError: Target 50"):
        model(**inputs | {"labels": wrong})
    with pytest.raises(ValueError, match="output_hidden_states: False on rank 0; True on rank"):
        model(**inputs, output_hidden_states=rank > 0)
    with pytest.raises(ValueError, match="leave return_dict=False out"):
        model(**inputs, return_dict=False)
    with pytest.raises(ValueError, match="tokens: 37 on rank 0; 36 on rank"):
        model(input_ids=inputs["input_ids"][:, : 37 - min(rank, 1)])
    with pytest.raises(ValueError, match="cannot be split over"):
        model(input_ids=inputs["input_ids"][:, :1])
    distributed.parallelize(model, None)
    inputs = {"input_ids": inputs["input_ids"][:, : 30 + rank]}
    assert model(**inputs).logits.shape == (3, 30 + rank, 50)
    with pytest.raises(ValueError, match="not split over processes"):
        distributed.split_tokens(model, inputs["input_ids"])


def model_cases(size):
    for family in HEADS:
        yield family, partial(train_step, family=family, block_size=8)
    yield "lln, learned", partial(train_step, family="roberta", attention="lln", statistics="learned", form="unbiased")
    yield (
        "window with a ratio",
        partial(train_step, family="roberta", near="window", block_size=7, combine="ratio", share=0.3),
    )
    learned = {"combine": "ratio", "share": 0.3, "statistics": "learned", "form": "decomposed", "projection": True}
    gate = learned | {"combine": "gate"}
    yield "learned", partial(train_step, family="llama", block_size=5, **learned)
    yield "learned, window", partial(train_step, family="roberta", near="window", block_size=7, **learned)
    yield "gate", partial(train_step, family="roberta", near="window", block_size=7, **gate)
    yield "gate, causal, checkpointing", partial(train_step, family="llama", block_size=5, checkpointing=True, **gate)
    replaced = learned | {"combine": "replace"}
    for near in ("window", "blocks"):
        yield f"replace, {near}", partial(train_step, family="roberta", near=near, block_size=7, **replaced)
    yield "packed, gate", partial(packed, near="window", **gate)
    yield "packed, replace", partial(packed, near="window", checkpointing=True, **replaced)
    yield "packed", partial(packed, checkpointing=True)
    yield "packed, learned", partial(packed, near="window", **learned)
    yield "checkpointing", partial(train_step, family="llama", block_size=8, checkpointing=True)
    yield "generate, gate", partial(generate, near="window", block_size=6, tokens=43, **gate)
    yield "generate, blocks", partial(generate, block_size=8)
    yield "generate, window", partial(generate, near="window", block_size=6, tokens=43)
    yield "generate, lln", partial(generate, attention="lln")
    yield "generate, decomposed", partial(generate, form="decomposed", statistics="running", block_size=7)
    yield "refused", refused
    if size == 4:
        yield "data and sequence, DDP", partial(data_and_sequence, sharded=False)
        yield "data and sequence, FSDP2", partial(data_and_sequence, sharded=True)
        yield "data and sequence, FSDP2, Llama", partial(data_and_sequence, sharded=True, family="llama")


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_models_over_several_processes(size):
    failed = run_world(size, model_cases, size)
    assert not failed, report(failed)
