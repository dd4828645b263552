"""Packed sequences in converted models: each is computed as it is alone, and none attends to another."""

import functools

import pytest
import torch
import transformers

import lln.hf
from lln import zoo
from lln.hf.packing import packed_mask

LENGTHS = [5, 1, 17, 3, 12]
DECODERS = ["llama", "gpt2", "qwen2", "opt", "gpt_neox"]
ENCODERS = ["bert", "roberta", "distilbert", "modernbert"]
WAYS = {
    "position_ids": {},
    "cu_seq_lens": {"return_flash_attn_kwargs": True},
    "seq_idx": {"return_seq_idx": True},
    "all": {"return_flash_attn_kwargs": True, "return_seq_idx": True},
}


@pytest.fixture
def documents():
    ids = torch.randint(3, 90, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": part.tolist()} for part in ids.split(LENGTHS)]


def collated(documents, family, **options):
    first = 1 if family == "roberta" else 0  # the tests' models have padding 0
    return transformers.DataCollatorWithFlattening(position_ids_start=first, **options)(documents)


def build(make, family, attention="lln_diag", **options):
    options = {"block_size": 4} if attention == "lln_diag" and not options else options
    head = "ModelForCausalLM" if family in DECODERS else "ModelForMaskedLM"
    return lln.hf.convert(make(family, head), attention, **options)


def quiet(family):
    return {"use_cache": False} if family in DECODERS else {}


def test_a_decoder_packs_by_position_ids_alone(make, documents):
    """The model's own masks are separate: softmax attention of transformers gives the sequences apart as well."""
    for family in ("llama", "gpt2"):
        plain = make(family, "ModelForCausalLM")
        inputs = collated(documents, family)
        del inputs["labels"]
        with torch.no_grad():
            packed = plain(**inputs, use_cache=False).logits[0]
            alone = torch.cat([plain(torch.tensor([x["input_ids"]])).logits[0] for x in documents])
        torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", DECODERS + ENCODERS)
def test_each_sequence_is_computed_as_alone(family, way, make, documents):
    if way == "position_ids" and family in ("distilbert", "modernbert"):
        pytest.skip("keeps position_ids for its embeddings, as documented")
    model = build(make, family)
    inputs = collated(documents, family, **WAYS[way])
    del inputs["labels"]
    found = model(**inputs, **quiet(family)).logits[0]
    alone = torch.cat([model(torch.tensor([x["input_ids"]]), **quiet(family)).logits[0] for x in documents])
    torch.testing.assert_close(found, alone, rtol=1e-5, atol=2e-6)
    gradient = torch.randn_like(found)
    weights = [p for p in model.parameters() if p.requires_grad]
    for x, y in zip(
        *(torch.autograd.grad(z, weights, gradient, allow_unused=True) for z in (found, alone)), strict=True
    ):
        assert (x is None) == (y is None)
        if x is not None:
            torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("attention", zoo.names())
def test_every_mechanism_takes_packed_sequences(attention, make, documents):
    if attention == "softmax":
        pytest.skip("is the attention of transformers")
    causal = zoo.describe(attention).causal
    family = "llama" if causal else "bert"
    model = build(make, family, attention, max_len=64)
    inputs = collated(documents, family, return_flash_attn_kwargs=True)
    del inputs["labels"]

    def logits(**inputs):
        torch.manual_seed(0)  # some draw random numbers
        with torch.no_grad():
            return model(**inputs, **quiet(family)).logits[0]

    found = logits(**inputs)
    assert not torch.isnan(found).any()
    if not zoo.describe(attention).random:
        alone = torch.cat([logits(input_ids=torch.tensor([x["input_ids"]])) for x in documents])
        torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-5)
    other = {**inputs, "input_ids": inputs["input_ids"].clone()}
    other["input_ids"][0, : LENGTHS[0]] = 7
    assert torch.equal(logits(**other)[LENGTHS[0] :], found[LENGTHS[0] :])


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_no_sequence_attends_to_another(family, make, documents):
    model = build(make, family)
    inputs = collated(documents, family, return_flash_attn_kwargs=True)
    own = slice(sum(LENGTHS[:3]), None)
    results = []
    for ids in (inputs["input_ids"], inputs["input_ids"].clone()):
        if results:
            ids[0, : own.start] = torch.arange(3, 3 + own.start)
        embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
        arguments = {x: y for x, y in inputs.items() if x not in ("input_ids", "labels")}
        logits = model(inputs_embeds=embedded, **arguments, **quiet(family)).logits[:, own]
        (gradient,) = torch.autograd.grad(logits.square().sum(), embedded)
        assert not gradient[:, : own.start].any()
        results.append((logits, gradient[:, own]))
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)


def test_loss_of_a_collated_batch(make, documents):
    """The mean over the tokens that follow another one: as a training step of the Trainer has it."""
    model = build(make, "llama").train()
    batch = collated(documents, "llama", return_flash_attn_kwargs=True)
    model(**batch, use_cache=False).loss.backward()
    found = {name: x.grad.clone() for name, x in model.named_parameters()}
    model.zero_grad()
    for document in documents:
        ids = torch.tensor([document["input_ids"]])
        if ids.shape[1] > 1:
            number = sum(n - 1 for n in LENGTHS)
            (model(ids, labels=ids, use_cache=False).loss * (ids.shape[1] - 1) / number).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-5)


def test_a_trainer_with_packed_sequences(make, documents, tmp_path):
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=3, report_to="none", use_cpu=True, disable_tqdm=True,
        save_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip
    collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    trainer = transformers.Trainer(
        build(make, "llama"), arguments, data_collator=collator, train_dataset=documents, callbacks=[]
    )
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    assert trainer.train().training_loss > 0


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_several_rows(family, make):
    model, ids = build(make, family), torch.randint(3, 90, (2, 12))
    positions = torch.tensor([[*range(5), *range(7)], [*range(9), *range(3)]])
    found = model(ids, position_ids=positions, **quiet(family)).logits
    for row, cut in ((0, 5), (1, 9)):
        parts = ids[row : row + 1].split([cut, 12 - cut], dim=1)
        alone = torch.cat([model(part, **quiet(family)).logits for part in parts], dim=1)
        torch.testing.assert_close(found[row : row + 1], alone, rtol=1e-5, atol=2e-6)
    one_row = model(ids, position_ids=torch.arange(12).expand(2, -1), **quiet(family)).logits
    assert torch.equal(one_row, model(ids, **quiet(family)).logits)


def test_by_name_and_bidirectional(make, documents):
    inputs = collated(documents, "llama")
    del inputs["labels"]
    model = make("llama", "ModelForCausalLM", is_causal=False)
    model.set_attn_implementation("lln")
    found = model(**inputs, use_cache=False).logits[0]
    alone = torch.cat([model(torch.tensor([x["input_ids"]]), use_cache=False).logits[0] for x in documents])
    torch.testing.assert_close(found, alone, rtol=1e-5, atol=2e-6)


def test_a_cache_is_for_one_sequence(make, documents):
    model, ids = build(make, "llama"), torch.randint(3, 90, (1, 12))
    starts = torch.tensor([0, 5, 12])
    for given in (
        {"position_ids": torch.tensor([[*range(5), *range(7)]])},
        {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts},
    ):
        with pytest.raises(ValueError, match="use_cache=False with packed sequences"):
            model(ids, use_cache=True, **given)
    one = torch.tensor([0, 12])
    model(ids, use_cache=True, cu_seq_lens_q=one, cu_seq_lens_k=one)


REFUSED = {
    "keys": ({"cu_seq_lens_q": [0, 5, 12], "cu_seq_lens_k": [0, 6, 12]}, "must be equal"),
    "keys alone": ({"cu_seq_lens_k": [0, 5, 12]}, "cu_seq_lens_q must be an int32 tensor"),
    "floats": ({"cu_seq_lens_q": [0.0, 12.0], "cu_seq_lens_k": [0.0, 12.0]}, "must be an int32 tensor"),
    "end": ({"cu_seq_lens_q": [0, 5, 11], "cu_seq_lens_k": [0, 5, 11]}, "from 0 to the 12 tokens"),
    "seq_idx": ({"seq_idx": [0] * 12}, r"number of each token's sequence, \(1, 12\), got \(12,\)"),
    "different": (
        {"seq_idx": [[0] * 5 + [1] * 7], "position_ids": [[*range(6), *range(6)]]},
        r"position_ids and seq_idx differ about where .*\[0, 6, 12\] and \[0, 5, 12\]",
    ),
    "padding": (
        {"attention_mask": [[1] * 11 + [0]], "cu_seq_lens_q": [0, 5, 12], "cu_seq_lens_k": [0, 5, 12]},
        "leave attention_mask out",
    ),
}


@pytest.mark.parametrize("family", ["llama", "bert"])
@pytest.mark.parametrize("wrong", REFUSED)
def test_what_is_refused(wrong, family, make):
    given, message = REFUSED[wrong]
    with pytest.raises(ValueError, match=message):
        build(make, family)(
            torch.full((1, 12), 5), **{name: torch.tensor(x) for name, x in given.items()}, **quiet(family)
        )


def test_ones_beside_packed_sequences_change_nothing(make):
    model, ids = build(make, "bert"), torch.randint(3, 90, (1, 12))
    starts = torch.tensor([0, 5, 12], dtype=torch.int32)
    given = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
    assert torch.equal(model(ids, torch.ones(1, 12), **given).logits, model(ids, **given).logits)


def test_other_masks_are_not_taken_for_packing():
    masks = transformers.masking_utils
    numbers = torch.tensor([[0, 0, 1]])
    packed = masks.packed_sequence_mask_function(numbers)
    assert packed_mask(masks.and_masks(masks.causal_mask_function, packed)).cu_seqlens.tolist() == [0, 2, 3]
    window = masks.sliding_window_causal_mask_function(2)
    others = [window, masks.and_masks(window, packed), masks.or_masks(masks.causal_mask_function, packed)]
    others += [masks.and_masks(masks.causal_mask_function, window), packed, functools.partial(packed), None]
    for mask_function in others:
        assert packed_mask(mask_function) is None


def test_an_encoder_of_a_decoder_is_not_packed(make):
    with pytest.warns(UserWarning, match="stays softmax"):
        model = lln.hf.convert(make("bart"))
    starts = torch.tensor([0, 5, 12])
    with pytest.raises(ValueError, match="packed sequences of its encoder"):
        model(torch.full((1, 12), 5), cu_seq_lens_q=starts, cu_seq_lens_k=starts, use_cache=False)
