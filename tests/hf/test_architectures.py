"""Many architectures: converted to something that equals softmax attention they compute what they did before."""

import pytest
import torch
import transformers

import lln.hf
from lln import zoo

FULL = {"layer_types": ["full_attention", "full_attention"]}
TEXT = {
    "bert": ("bert", {}),
    "albert": ("albert", {"embedding_size": 32}),
    "esm": ("esm", {"mask_token_id": 4}),
    "layoutlm": ("layoutlm", {}),  # makes its mask itself, (batch, 1, 1, tokens)
    "markuplm": ("markuplm", {}),  # as well, and hides with -10000
    "modernbert": ("modernbert", {}),  # also makes a mask for a window, which no layer uses
    "splinter": ("splinter", {}),  # its attention has no attribute is_causal
    "bert_decoder": ("bert", {"is_decoder": True}),
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "gemma2": ("gemma2", FULL | {"attn_logit_softcapping": None}),
    "gemma3": ("gemma3_text", {}),
    "gpt2": ("gpt2", {}),
    "phi": ("phi", {}),
    "qwen2": ("qwen2", {}),
    "qwen2_moe": ("qwen2_moe", {}),  # also makes a mask for a window, of 0 tokens
    "smollm3": ("smollm3", {"num_key_value_heads": 2}),
}
SCRIPTED = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
GENERATING = ["deepseek_v3", "gemma3_text", "qwen2_moe"]


def run(model, inputs):
    causal_model = model.config.model_type not in ("bert", "albert", "esm", "layoutlm", "markuplm", "splinter")
    options = {"use_cache": False} if causal_model and model.config.model_type != "modernbert" else {}
    with torch.no_grad():
        return model(**inputs, **options)[0]


@pytest.mark.parametrize("case", TEXT)
def test_nothing_is_left_out(case, make, batch):
    """Blocks as long as the input are softmax attention: a bias, a window, a scale or a mask left out would show."""
    family, settings = TEXT[case]
    model = make(family, **settings)
    expected = {side: run(model, batch(side)) for side in ("left", "right")}
    lln.hf.convert(model, "block_diagonal", block_size=64)
    for side, before in expected.items():
        keep = batch(side)["attention_mask"].bool()
        torch.testing.assert_close(run(model, batch(side))[keep], before[keep], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", TEXT)
def test_what_stands_in_padding_does_not_matter(case, make, batch):
    family, settings = TEXT[case]
    model, inputs = lln.hf.convert(make(family, **settings), "lln_diag", block_size=7), batch()
    keep = inputs["attention_mask"].bool()
    expected = run(model, inputs)[keep]
    inputs["input_ids"] = inputs["input_ids"].masked_fill(~keep, 7)
    torch.testing.assert_close(run(model, inputs)[keep], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", GENERATING)
def test_generation(family, make, batch):
    model = lln.hf.convert(make(family, "ModelForCausalLM"), "lln_diag", block_size=7)
    inputs = batch("left", tokens=13)
    options = {"max_new_tokens": 10, "min_new_tokens": 10, "output_logits": True, "return_dict_in_generate": True}
    with_cache = model.generate(**inputs, **options)
    without = model.generate(**inputs, **options, use_cache=False)
    assert torch.equal(with_cache.sequences, without.sequences)
    torch.testing.assert_close(torch.stack(with_cache.logits), torch.stack(without.logits), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:the attention of the decoder")
def test_a_model_that_reads_the_keys_of_its_cache(batch):
    sizes = {"vocab_size": 90, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 70}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3, "cross_attention_layers": [1]}
    config = transformers.models.mllama.MllamaTextConfig(
        **sizes, **heads, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    torch.manual_seed(0)
    model = lln.hf.convert(transformers.MllamaForCausalLM(config).eval(), "lln_diag", block_size=7)
    inputs, options = batch("left", tokens=13), {"max_new_tokens": 5, "min_new_tokens": 5}
    without = model.generate(**inputs, **options, use_cache=False)
    assert torch.equal(model.generate(**inputs, **options), without)


@pytest.mark.filterwarnings("ignore:the attention of the decoder")
def test_a_decoder_is_causal_by_its_mask(make, batch):
    """The decoder of NLLB-MoE calls its attention not causal, and gives it a causal mask."""
    model, inputs = make("nllb-moe"), batch() | {"decoder_input_ids": torch.randint(3, 90, (3, 11))}
    expected = run(model, inputs)
    lln.hf.convert(model, "block_diagonal", block_size=64)
    torch.testing.assert_close(run(model, inputs), expected, rtol=1e-4, atol=1e-4)


def test_values_of_another_width(make, tmp_path):
    """Learned scales have the width of the values, also when a saved model is opened."""
    model = lln.hf.convert(make("deepseek_v3"), "lln_diag", combine="scale", block_size=7)
    assert model.layers[0].self_attn.mechanism.far_scale.shape == (4, 1, 6)
    model.save_pretrained(tmp_path)
    ids = torch.randint(3, 90, (2, 15))
    with torch.no_grad():
        assert torch.equal(lln.hf.from_pretrained(tmp_path)(ids)[0], model(ids)[0])


@pytest.mark.filterwarnings("ignore:torch.nn.MultiheadAttention stays")
@pytest.mark.parametrize("family", ["vit", "deit", "beit", "siglip_vision_model"])
def test_images(family, make):
    model, inputs = make(family), {"pixel_values": torch.randn(2, 3, 20, 20)}
    with torch.no_grad():
        expected = model(**inputs)[0]
        output = lln.hf.convert(model, "block_diagonal", block_size=64)(**inputs)[0]
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)


def test_torchs_own_attention_is_named(make):
    with pytest.warns(UserWarning, match=r"nn\.MultiheadAttention stays softmax attention, in head\.attention"):
        lln.hf.convert(make("siglip_vision_model"))


def test_fewer_keys_than_queries():
    sizes = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "decoder_hidden_size": 16}
    model = transformers.SegformerModel(transformers.SegformerConfig(**sizes)).eval()
    with pytest.raises(ValueError, match=r"has fewer keys than queries, which lln_diag cannot have; these can: .*lln,"):
        lln.hf.convert(model, "lln_diag")
    lln.hf.convert(model, "lln")
    with torch.no_grad():
        assert model(torch.randn(2, 3, 64, 64))[0].isfinite().all()


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("mpnet", {}, "past the attention interface of transformers in MPNetSelfAttention"),
        pytest.param("deberta-v2", {}, "interface of transformers in DisentangledSelfAttention", marks=SCRIPTED),
        ("bloom", {}, "past the attention interface of transformers in BloomAttention"),
        ("mistral", {"sliding_window": 8}, "sliding window of 8 tokens.*sliding_window=None"),
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, "'sliding_attention'"),
        ("gemma2", {}, "layers of types"),
        ("gemma2", FULL, "a cap on its scores"),
        ("gpt_oss", FULL, "needs attention sinks"),
        ("t5", {}, "needs a bias for positions"),
        ("wav2vec2-conformer", {}, "needs a bias for positions"),
        ("deepseek_v32", {}, "layers of types|a choice of keys"),
        ("doge", {"num_key_value_heads": 2}, "makes a mask itself, attn_mask"),
        ("diffllama", {"num_key_value_heads": 2}, "keeps more in a cache than one sequence"),
        ("hrm_text", {}, "keeps more in a cache than one sequence"),
        ("beit", {"use_relative_position_bias": True}, "is given a mask that the model makes itself"),
        ("pixtral", {}, "is given a mask that the model makes itself: .*block"),
    ],
)
def test_models_that_are_refused(family, settings, reason, make):
    model = make(family, **settings)
    with pytest.raises(ValueError, match=reason):
        lln.hf.convert(model)
    assert not any(isinstance(module, zoo.Mechanism) for module in model.modules())
