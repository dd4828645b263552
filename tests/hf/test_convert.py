"""lln.hf.convert: what converted models compute, and what is refused."""

import copy
import pickle

import pytest
import torch
import transformers
from torch._dynamo.testing import CompileCounterWithBackend

import lln.hf
from lln import reference, zoo

ENCODERS = ["roberta", "bert", "electra", "distilbert"]
DECODERS = ["gpt2", "llama", "opt", "gpt_neox", "qwen2", "mistral", "granite"]
IMAGES = ["vit", "deit"]


def run(model, inputs, **options):
    with torch.no_grad():
        return model(**inputs, **options)[0]


def kept(output, inputs):
    return output[inputs["attention_mask"].bool()]


def explicit(kind, **options):
    """An attention function of transformers made of explicit matrices, with the scores' scale in the query."""

    def attend(module, query, key, value, attention_mask, scaling=None, **rest):
        scale = 1.0 if scaling is None else scaling * query.shape[3] ** 0.5
        output = getattr(reference, f"{kind}_attention")(
            query * scale, key, value, key_padding_mask=attention_mask, is_causal=module.is_causal, **options
        )
        return output.transpose(1, 2), None

    return attend


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(
    ("kind", "options"), [("lln", {"matching": "entropy"}), ("lln_diag", {"block_size": 5})], ids=["lln", "lln_diag"]
)
@pytest.mark.parametrize("family", ["roberta", "distilbert", "gpt2", "llama", "granite"])
def test_agrees_with_explicit_matrices(family, kind, options, side, make, batch):
    model, inputs = make(family).double(), batch(side)
    transformers.AttentionInterface.register("explicit", explicit(kind, **options))
    transformers.AttentionMaskInterface.register("explicit", lambda attention_mask=None, **rest: attention_mask)
    model.set_attn_implementation("explicit")
    expected = run(model, inputs)
    lln.hf.convert(model, kind, **options)
    torch.testing.assert_close(kept(run(model, inputs), inputs), kept(expected, inputs), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("family", ENCODERS + DECODERS)
def test_padding_is_left_out(family, make, batch):
    model = lln.hf.convert(make(family), "lln_diag", block_size=4)
    inputs, options = batch(), {} if family in ENCODERS else {"use_cache": False}
    padded = run(model, inputs, **options)
    for sample, mask in enumerate(inputs["attention_mask"].bool()):
        alone = run(model, {"input_ids": inputs["input_ids"][sample : sample + 1, mask]}, **options)
        torch.testing.assert_close(padded[sample, mask], alone[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["roberta", "vit", "llama"])
def test_every_mechanism(family, make, batch):
    model = make(family)
    inputs = {"pixel_values": torch.randn(2, 3, 20, 20)} if family == "vit" else batch()
    before, names = run(model, inputs), set(model.state_dict())
    for name in zoo.names():
        description = zoo.describe(name)
        if family == "llama" and not description.causal:
            with pytest.raises(ValueError, match=f"is causal, which {name} cannot be"):
                lln.hf.convert(model, name)
            continue
        lln.hf.convert(model, name)
        assert run(model, inputs, **({"use_cache": False} if family == "llama" else {})).isfinite().all(), name
        learned = [p for n, p in model.named_parameters() if ".mechanism." in n]
        assert bool(learned) == (bool(description.learned) and "conv_kernel" not in description.learned), name
    lln.hf.convert(model, "softmax")
    assert torch.equal(run(model, inputs), before)
    assert set(model.state_dict()) == names
    assert not hasattr(model.config, "lln_attention")


@pytest.mark.parametrize("family", ENCODERS + DECODERS + IMAGES)
def test_all_layers_are_converted(family, make):
    model = lln.hf.convert(make(family), "rfa")
    assert sum(isinstance(module, zoo.Mechanism) for module in model.modules()) == 2


def test_learned_parameters_train_and_move(make, batch):
    model = lln.hf.convert(make("roberta"), "linformer", rank=6).train()
    assert model.encoder.layer[0].attention.self.mechanism.project_key.shape == (6, 70)  # max_position_embeddings
    model(**batch())[0].square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for n, p in model.named_parameters() if "mechanism" in n)
    assert {p.dtype for p in model.to(torch.bfloat16).parameters()} == {torch.bfloat16}
    assert run(model, batch()).dtype == torch.bfloat16
    again = lln.hf.convert(model, "linformer", rank=6, max_len=30)
    assert again.encoder.layer[0].attention.self.mechanism.project_key.shape == (6, 30)
    assert again.encoder.layer[0].attention.self.mechanism.project_key.dtype == torch.bfloat16


def test_patches_are_counted(make):
    model = lln.hf.convert(make("vit"), "linformer", rank=3)
    assert model.layers[0].attention.mechanism.max_len >= 17


@pytest.mark.parametrize("name", ["lln", "lln_diag"])
@pytest.mark.parametrize("family", ["roberta", "llama"])
def test_by_name(family, name, make, batch):
    converted = lln.hf.convert(make(family), name)
    config = make(family).config
    model = transformers.AutoModel.from_config(config, attn_implementation=name).eval()
    model.load_state_dict(converted.state_dict())
    options = {} if family == "roberta" else {"use_cache": False}
    expected = run(converted, batch(), **options)
    assert torch.equal(run(model, batch(), **options), expected)
    model.set_attn_implementation("sdpa")
    assert not torch.equal(run(model, batch(), **options), expected)
    model.set_attn_implementation(name)
    assert torch.equal(run(model, batch(), **options), expected)


@pytest.mark.parametrize("family", ["roberta", "llama"])
def test_copies(family, make, batch):
    model, inputs = lln.hf.convert(make(family), "lln_diag", block_size=8), batch()
    expected = model(**inputs)[0].detach()  # with gradients, and where there is a cache with a cache
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(run(other, inputs), expected)


@pytest.mark.parametrize("family", ["roberta", "gpt2", "llama"])
def test_gradient_checkpointing(family, make, batch):
    model, inputs = lln.hf.convert(make(family), "lln_diag", block_size=8).train(), batch()
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        torch.manual_seed(1)
        model.zero_grad()
        model(**inputs, **({} if family == "roberta" else {"use_cache": False}))[0].square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(checkpointed, plain)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "dtype"), [("bert", torch.int64), ("llama", torch.float32)])
def test_compiled(family, dtype, make, batch):
    """One graph for all lengths, forward and backward, with masks of ones and zeros of any dtype."""
    model = lln.hf.convert(make(family, num_hidden_layers=1), "lln_diag", block_size=8)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    graphs = []
    for tokens in (23, 31):
        inputs = batch(tokens=tokens)
        inputs["attention_mask"] = inputs["attention_mask"].to(dtype)
        results = []
        for either in (compiled, model):
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            output = either(**inputs)[0][inputs["attention_mask"].bool()]
            output.square().sum().backward()
            results.append([output.detach(), *(parameter.grad for parameter in model.parameters())])
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected)
        graphs.append(counter.frame_count)
    assert graphs[1] == graphs[0]


@pytest.mark.parametrize("family", ["roberta", "llama"])
def test_autocast(family, make, batch):
    model, inputs = lln.hf.convert(make(family), "lln_diag", block_size=8), batch()
    expected = run(model, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        output = run(model, inputs)
    assert 0 < (output - expected).abs().mean() < 0.1 * expected.abs().mean()


def test_dropout_drops_values(make, batch):
    off = {"hidden_dropout_prob": 0.0}
    model, inputs = lln.hf.convert(make("roberta", attention_probs_dropout_prob=0.5, **off), "lln"), batch()
    expected = run(model, inputs)
    model.train()
    assert not torch.equal(run(model, inputs), expected)
    torch.manual_seed(5)
    dropped = run(model, inputs)
    torch.manual_seed(5)
    assert torch.equal(run(model, inputs), dropped)


def test_attention_to_an_encoder_stays_as_it_is(make, batch):
    model, inputs = make("bart"), batch()
    with pytest.warns(UserWarning, match="to its encoder stays softmax attention"):
        lln.hf.convert(model, "lln_diag", block_size=4)
    layer = model.decoder.layers[0]
    assert isinstance(layer.self_attn.mechanism, zoo.Mechanism)
    assert not hasattr(layer.encoder_attn, "mechanism")
    x, memory, keep = torch.randn(3, 7, 32), torch.randn(3, 23, 32), inputs["attention_mask"].bool()
    output = layer.encoder_attn(x, key_value_states=memory, attention_mask=keep)[0]
    lln.hf.convert(model, "sdpa")
    expected = layer.encoder_attn(x, key_value_states=memory, attention_mask=keep[:, None, None, :])[0]
    assert torch.equal(output, expected)


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_windows_are_refused_by_name_too(family, make, batch):
    model = make(family, **({"sliding_window": 8} if family == "mistral" else {}))
    model.set_attn_implementation("lln")
    with pytest.raises(ValueError, match="sliding window"):
        model(**batch())


@pytest.mark.parametrize(
    ("error", "reason", "attention", "options"),
    [
        (ValueError, "no mechanism is called 'lln_dig'", "lln_dig", {}),
        (TypeError, "lln_diag has no option blocksize", "lln_diag", {"blocksize": 3}),
        (ValueError, "block_size must be at least 1", "lln_diag", {"block_size": 0}),
        (ValueError, "takes no options", "softmax", {"block_size": 3}),
        (ValueError, 'scope="batch"', "lln", {"scope": "batch"}),
    ],
)
def test_options_that_are_refused(error, reason, attention, options, make):
    model = make("llama")
    with pytest.raises(error, match=reason):
        lln.hf.convert(model, attention, **options)
    assert model.config._attn_implementation == "sdpa"


def test_a_mask_that_is_the_same_for_all_queries(make, batch):
    model, inputs = lln.hf.convert(make("bert")), batch()
    keep, expected = inputs["attention_mask"].bool(), run(model, inputs)
    for mask in (keep, torch.zeros(keep.shape).masked_fill(~keep, -1e4), (1.0 - keep.float()) * torch.finfo().min):
        assert torch.equal(run(model, inputs | {"attention_mask": mask[:, None, None, :]}), expected)
    with pytest.raises(ValueError, match="must be 0 or hide a key"):
        run(model, inputs | {"attention_mask": torch.linspace(-1, 0, 23).expand(3, 1, 1, 23)})
    with pytest.raises(ValueError, match=r"got \(3, 1, 1, 23\): a mask for each pair"):  # which would not be causal
        run(lln.hf.convert(make("llama")), inputs | {"attention_mask": keep[:, None, None, :]}, use_cache=False)


def test_a_decoder_can_be_bidirectional(make, batch):
    model, inputs = make("llama"), batch()
    expected = run(model, inputs, is_causal=False, use_cache=False)
    assert not torch.allclose(expected, run(model, inputs))
    lln.hf.convert(model, "block_diagonal", block_size=64)
    output = run(model, inputs, is_causal=False, use_cache=False)
    torch.testing.assert_close(kept(output, inputs), kept(expected, inputs), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="is_causal=False needs use_cache=False"):
        lln.hf.convert(model, "lln")(**inputs, is_causal=False)
    with pytest.raises(ValueError, match="is_causal=True is not for BertSelfAttention, which is not causal"):
        lln.hf.convert(make("bert"))(inputs["input_ids"], is_causal=True)


def test_masks_of_another_length_are_refused(make, batch):
    """Also masks of ones, which mark no padding."""
    ids = batch()["input_ids"]
    for family, options in (("bert", {}), ("llama", {"use_cache": False})):
        model = lln.hf.convert(make(family))
        for tokens in (20, 30):
            with pytest.raises(ValueError, match=rf"for all 23 tokens, got \(3, {tokens}\)"):
                model(ids, attention_mask=torch.ones(3, tokens), **options)


def test_by_name_needs_a_module_with_is_causal(make, batch):
    model = make("splinter")
    model.set_attn_implementation("lln")
    with pytest.raises(ValueError, match=r"SplinterSelfAttention has no attribute is_causal.*lln\.hf\.convert"):
        model(**batch())


def test_inputs_that_are_refused(make, batch):
    encoder, inputs = lln.hf.convert(make("roberta")), batch()
    pairs = torch.ones(3, 1, 23, 23)
    for model in (encoder, lln.hf.convert(make("llama")), lln.hf.convert(make("gpt2"))):
        with pytest.raises(ValueError, match=r"output_attentions=True; .*lln\.attention_matrix"):
            model(**inputs, output_attentions=True)
        with pytest.raises(ValueError, match=r"got \(3, 1, 23, 23\): a mask for each pair"):
            model(inputs["input_ids"], attention_mask=pairs)
    with pytest.raises(ValueError, match="output_attentions=True"):
        lln.hf.convert(make("llama", "ModelForCausalLM")).model(**inputs, output_attentions=True)
    encoder.set_attn_implementation("lln")
    with pytest.raises(ValueError, match="converted to lln_diag and then set to 'lln'"):
        encoder(**inputs)
    with pytest.raises(TypeError, match="a transformers model is needed"):
        lln.hf.convert(torch.nn.Linear(2, 2))
    eager = make("roberta", attn_implementation="eager", output_attentions=True)
    with pytest.raises(ValueError, match="sets output_attentions"):
        lln.hf.convert(eager)
