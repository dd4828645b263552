"""generate() on converted models: a cache of constant size, and the tokens that generation without one gives."""

import copy
import itertools

import pytest
import torch
import transformers

import lln.hf
from lln.hf.state_cache import StateLayer

HOW = {
    "greedy": {},
    "sampling": {"do_sample": True},
    "beams": {"num_beams": 3},
    "several": {"do_sample": True, "num_return_sequences": 2},
    "chunked": {"prefill_chunk_size": 4},
}
KINDS = {
    "lln": ("lln", {}),
    "lln_diag": ("lln_diag", {"block_size": 7}),
    "given": ("lln_diag", {"block_size": 4, "alpha": 1.2, "beta": 0.8}),
    "ratio": ("lln_diag", {"block_size": 7, "combine": "ratio", "share": 0.1}),
    "scale": ("lln_diag", {"block_size": 7, "combine": "scale", "share": 0.3}),
    "window": ("lln_diag", {"block_size": 7, "near": "window"}),
    "unbiased": ("lln", {"form": "unbiased"}),
    "decomposed": ("lln_diag", {"block_size": 7, "near": "window", "form": "decomposed", "statistics": "running"}),
}
GATE = {"combine": "gate", "block_size": 7, "statistics": "learned", "projection": True, "signed": True}
KINDS |= {
    "gate": ("lln_diag", GATE | {"near": "window", "form": "decomposed"}),
    "gate of blocks": ("lln_diag", GATE | {"form": "unbiased"}),
}
BRIEF = ("given", "ratio", "scale", "window", "unbiased", "decomposed", "gate of blocks")


def generate(model, inputs, tokens=15, **options):
    torch.manual_seed(3)
    return model.generate(**inputs, max_new_tokens=tokens, min_new_tokens=tokens, **options)


# Every kind with rotated keys that queries share; one kind with the positions and the heads of GPT-2.
CASES = [("llama", kind, how) for kind in KINDS for how in (("greedy",) if kind in BRIEF else HOW)]
CASES += [("gpt2", "lln_diag", how) for how in HOW]


@pytest.mark.parametrize(("family", "kind", "how"), CASES)
def test_tokens_are_those_without_a_cache(family, kind, how, make, batch):
    attention, options = KINDS[kind]
    model = lln.hf.convert(make(family, "ModelForCausalLM", seed=len(how)), attention, **options)
    inputs = batch("left", tokens=13)
    if options.get("statistics") == "running":  # for centres that are not zero
        model.train()(**batch())
        model.eval()
    elif "statistics" in options:
        for name, parameter in model.named_parameters():
            if name.endswith(("center_q", "center_k", "column", "gate")):
                torch.nn.init.normal_(parameter)
    with_cache = generate(model, inputs, **HOW[how])
    no_cache = {name: value for name, value in HOW[how].items() if name != "prefill_chunk_size"}
    assert torch.equal(with_cache, generate(model, inputs, use_cache=False, **no_cache))
    assert len(with_cache.unique()) > 10


@pytest.mark.parametrize("family", ["opt", "gpt_neox", "qwen2"])
def test_other_families(family, make, batch):
    model = lln.hf.convert(make(family, "ModelForCausalLM"), block_size=7)
    inputs = batch("left", tokens=13)
    assert torch.equal(generate(model, inputs), generate(model, inputs, use_cache=False))


@pytest.mark.filterwarnings("ignore:the attention of the decoder")
def test_encoder_and_decoder(make, batch):
    model = lln.hf.convert(make("bart", "ModelForSeq2SeqLM"), block_size=7)
    for options in ({}, {"num_beams": 3}):
        assert torch.equal(generate(model, batch(), **options), generate(model, batch(), use_cache=False, **options))


def test_the_cache_does_not_grow(make, batch):
    model = lln.hf.convert(make("llama", "ModelForCausalLM"), block_size=7)
    sizes = []
    for tokens in (1, 30):
        cache = generate(model, batch("left"), tokens, return_dict_in_generate=True).past_key_values
        assert all(isinstance(layer, StateLayer) for layer in cache.layers)
        assert cache.get_seq_length() == 23 + tokens - 1
        sizes.append(sum(layer.state.nbytes for layer in cache.layers))
    assert sizes[0] == sizes[1]


def test_logits_token_by_token(make, batch):
    model, inputs = lln.hf.convert(make("gpt2", "ModelForCausalLM"), block_size=4), batch("left")
    with torch.no_grad():
        positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
        expected = model(**inputs, position_ids=positions, use_cache=False).logits
        cache, outputs = None, []
        for start, end in ((0, 11), (11, 12), (12, 13), (13, 23)):
            output = model(
                inputs["input_ids"][:, start:end],
                attention_mask=inputs["attention_mask"][:, :end],
                position_ids=positions[:, start:end],
                past_key_values=cache,
            )
            cache = output.past_key_values
            outputs.append(output.logits)
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(torch.cat(outputs, 1)[real], expected[real], rtol=1e-4, atol=1e-4)


def test_cache_operations(make):
    model = lln.hf.convert(make("llama", "ModelForCausalLM"), block_size=4)
    ids = torch.randint(3, 90, (2, 9))
    with torch.no_grad():
        cache = model(ids).past_key_values
        repeated, chosen = copy.deepcopy(cache), copy.deepcopy(cache)
        repeated.batch_repeat_interleave(2)
        chosen.batch_select_indices(torch.tensor([1]))
        token = torch.tensor([[5]])
        expected = model(token.expand(2, 1), past_key_values=cache).logits
        torch.testing.assert_close(model(token.expand(4, 1), past_key_values=repeated).logits[::2], expected)
        torch.testing.assert_close(model(token, past_key_values=chosen).logits, expected[1:])
    cache.reset()
    assert cache.get_seq_length() == 0
    with pytest.raises(ValueError, match=r"take back 0 tokens here, got crop\(-2\); call cache.activate_past"):
        repeated.crop(-2)
    with pytest.raises(ValueError, match="as a negative int"):
        repeated.crop(2)


class Crops(list):
    """How many tokens caches of converted models are to remove."""


@pytest.fixture
def crops(monkeypatch):
    made = Crops()
    crop = StateLayer.crop
    monkeypatch.setattr(StateLayer, "crop", lambda self, n: made.append(n) or crop(self, n))
    return made


def assistant_of(make, family, seed, attention=None, **options):
    model = make(family, "ModelForCausalLM", seed=seed)
    model.generation_config.num_assistant_tokens = 5
    model.generation_config.assistant_confidence_threshold = 0.0  # proposes tokens however wrong they may be
    return model if attention is None else lln.hf.convert(model, attention, **options)


@pytest.mark.parametrize("kind", ["lln_diag", "decomposed", "ratio"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_assisted_decoding_gives_the_same_tokens(family, kind, make, batch, crops):
    """Assistants that are always, often and never wrong; one has a state itself, which goes back further."""
    attention, options = KINDS[kind]
    model = lln.hf.convert(make(family, "ModelForCausalLM"), attention, max_rollback=6, **options)
    ids = batch(tokens=20)["input_ids"][2:]
    if "statistics" in options:
        model.train()(**batch())
        model.eval()
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    plain = model.generate(**inputs, max_new_tokens=20)
    for assistant in (
        assistant_of(make, family, 1),
        assistant_of(make, family, 1, "lln_diag", block_size=7),
        assistant_of(make, family, 0, "lln"),
    ):
        crops.clear()
        assert torch.equal(model.generate(**inputs, max_new_tokens=20, assistant_model=assistant), plain)
        assert crops
    assert min(crops) <= -3  # taken back were tokens that are right in part


def test_prompt_lookup_gives_the_same_tokens(make, crops):
    model = lln.hf.convert(make("llama", "ModelForCausalLM"), block_size=7, near="window")
    ids = torch.randint(3, 90, (1, 8)).repeat(1, 4)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    plain = model.generate(**inputs, max_new_tokens=25)
    assert torch.equal(model.generate(**inputs, max_new_tokens=25, prompt_lookup_num_tokens=3), plain)
    assert min(crops) < 0


@pytest.mark.parametrize("kept", [30, 9], ids=["the prompt too", "the last tokens"])
def test_taking_back_tokens(make, kept):
    """Any number of tokens up to max_rollback, across calls of any size, and again; then everything is as before."""
    model = lln.hf.convert(make("llama", "ModelForCausalLM"), block_size=4, max_rollback=kept)
    ids = torch.randint(3, 90, (2, 60))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        cache = transformers.DynamicCache(config=model.config)
        cache.activate_past_recording()
        seen = 0
        for number, back in ((20, 0), (1, 2), (7, 9), (3, 1), (1, 1), (30, 5), (12, 0), (1, 3), (1, 3)):
            mask = torch.ones(2, seen + number, dtype=torch.long)
            logits = model(ids[:, seen : seen + number], past_key_values=cache, attention_mask=mask).logits
            torch.testing.assert_close(logits, expected[:, seen : seen + number], rtol=1e-4, atol=1e-4)
            cache.crop(-back)
            seen += number - back
            assert cache.get_seq_length() == seen
            for layer in cache.layers:  # a few times as many tokens at most, and nothing of the prompt
                assert sum(x["query"].untyped_storage().nbytes() for x in layer.recorded) <= 4 * kept * 2 * 32 * 4
        reordered = copy.deepcopy(cache)
        reordered.batch_select_indices(torch.tensor([1]))
        reordered.crop(-1)
        one = torch.ones(1, seen, dtype=torch.long)
        again = model(ids[1:, seen - 1 : seen], past_key_values=reordered, attention_mask=one).logits
        torch.testing.assert_close(again, expected[1:, seen - 1 : seen], rtol=1e-4, atol=1e-4)
        with pytest.raises(ValueError, match=r"got crop\(-70\); lln.hf.convert\(model, ..., max_rollback=70\)"):
            cache.crop(-70)


def test_recording_can_begin_and_end(make):
    model = lln.hf.convert(make("llama", "ModelForCausalLM"), block_size=4)
    ids = torch.randint(3, 90, (1, 12))
    with torch.no_grad():
        cache = model(ids[:, :5]).past_key_values
        assert all(layer.base is None for layer in cache.layers)  # kept only once it is needed
        cache.activate_past_recording()
        model(ids[:, 5:8], past_key_values=cache)
        cache.crop(-3)
        expected = model(ids[:, 5:9], past_key_values=cache).logits
        cache.crop(-1)
        for layer in cache.layers:
            layer.record_past = False  # as `generate` does when it hands a cache over
        last = model(ids[:, 8:9], past_key_values=cache).logits
        torch.testing.assert_close(last[:, 0], expected[:, 3], rtol=1e-4, atol=1e-4)
        assert all(layer.base is None and not layer.recorded for layer in cache.layers)


def test_max_rollback_is_saved(make, tmp_path):
    lln.hf.convert(make("llama", "ModelForCausalLM"), block_size=4, max_rollback=17).save_pretrained(tmp_path)
    assert lln.hf.from_pretrained(tmp_path).model.layers[0].self_attn.max_rollback == 17
    with pytest.raises(ValueError, match="max_rollback must be at least 1"):
        lln.hf.convert(make("llama", "ModelForCausalLM"), max_rollback=0)


def test_a_cache_made_in_training(make):
    """There the first sequence runs without a state, which is made of it when something continues."""
    ids = torch.randint(3, 90, (2, 9))
    model = lln.hf.convert(make("llama", "ModelForCausalLM"), block_size=4)
    with torch.no_grad():
        expected = model(torch.cat((ids, ids[:, :2]), 1), use_cache=False).logits[:, -2:]
    for change in (
        lambda cache: cache.batch_repeat_interleave(2),
        lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    ):
        output = model(ids)
        assert all(layer.state is None for layer in output.past_key_values.layers)
        change(output.past_key_values)
        samples = [0, 0, 1, 1] if output.past_key_values.layers[0].first[0].shape[0] == 4 else [1, 0]
        continued = model(ids[samples, :2], past_key_values=output.past_key_values)
        torch.testing.assert_close(continued.logits, expected[samples], rtol=1e-4, atol=1e-4)


def test_running_statistics_are_kept_in_training(make, batch):
    model = lln.hf.convert(make("llama", "ModelForCausalLM"), "lln", statistics="running")
    mechanism = model.model.layers[0].self_attn.mechanism
    assert mechanism.num_batches_tracked == 0  # not by the first run in convert either
    model.train()(**batch())
    assert mechanism.num_batches_tracked == 1
    model.eval()
    inputs = batch("left", tokens=13)
    assert torch.equal(generate(model, inputs), generate(model, inputs, use_cache=False))


def test_what_cannot_be_generated(make, batch):
    model, inputs = lln.hf.convert(make("llama", "ModelForCausalLM")), batch("left")
    with pytest.raises(ValueError, match="leave cache_implementation out"):
        generate(model, inputs, cache_implementation="static")
    cache = model(**inputs).past_key_values
    for mask in (torch.zeros(3, 1), torch.ones(3, 1)):
        with pytest.raises(ValueError, match="for all tokens so far, 24 with the new ones"):
            model(inputs["input_ids"][:, :1], attention_mask=mask, past_key_values=cache)
    lln.hf.convert(model, "elu")
    with pytest.raises(ValueError, match=r"keeps no state.* use_cache=False"):
        generate(model, inputs)
    assert generate(model, inputs, use_cache=False).shape == (3, 38)
    lln.hf.convert(model, "softmax").set_attn_implementation("lln")
    with pytest.raises(ValueError, match=r"lln\.hf\.convert\(model, 'lln'\)"):
        generate(model, inputs)


def test_timing_a_whole_model(make, tmp_path):
    """`lln bench decode --model`: a step leaves the contexts as they were, whatever the number of steps."""
    from lln.bench.generation import compare_generation

    make("llama", "ModelForCausalLM").save_pretrained(tmp_path)
    rows = list(compare_generation(str(tmp_path), (5, 9), seconds=0.02))
    assert [(row["tokens"], row["mechanism"]) for row in rows] == list(
        itertools.product((5, 9), ("softmax", "lln_diag"))
    )
    assert all(row["milliseconds"] > 0 for row in rows)
    assert rows[2]["ratio"] == 1


@pytest.mark.parametrize(("family", "attention"), [("llama", "softmax"), ("llama", "performer"), ("bert", "lln")])
def test_a_rollback_that_nothing_would_use_is_refused(make, family, attention):
    with pytest.raises(ValueError, match=r"options|leave max_rollback out"):
        lln.hf.convert(make(family), attention, max_rollback=3)
