"""generate() on converted models: a cache of constant size, and the tokens that generation without one gives."""

import copy

import pytest
import torch

import lln.hf
from lln.hf.cache import StateLayer

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
}
BRIEF = ("given", "ratio", "scale")


def generate(model, inputs, tokens=15, **options):
    torch.manual_seed(3)
    return model.generate(**inputs, max_new_tokens=tokens, min_new_tokens=tokens, **options)


@pytest.mark.parametrize(
    ("kind", "how"), [(kind, how) for kind in KINDS for how in (("greedy",) if kind in BRIEF else HOW)]
)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_tokens_are_those_without_a_cache(family, kind, how, make, batch):
    attention, options = KINDS[kind]
    model = lln.hf.convert(make(family, "ModelForCausalLM", seed=len(how)), attention, **options)
    inputs = batch("left", tokens=13)
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
    with pytest.raises(ValueError, match="cannot forget its last tokens"):
        repeated.crop(-2)


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
    with pytest.raises(ValueError, match="stateful models"):
        generate(model, inputs, prompt_lookup_num_tokens=2)
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
