import pytest
import torch

from helpers import random_transformer

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 90,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 70,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# DeepSeek's: heads whose values have fewer features than their keys.
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
TWO_STACKS = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FULL = {"num_key_value_heads": 2, "head_dim": 8, "layer_types": ["full_attention", "full_attention"]}
EXTRA = {
    "deepseek_v2": LATENT | EXPERTS | {"n_routed_experts": 4},
    "deepseek_v3": LATENT | EXPERTS | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    "qwen2_moe": EXPERTS | {"num_key_value_heads": 2, "shared_expert_intermediate_size": 16},
    "gemma3_text": FULL,
    "modernbert": {"layer_types": ["full_attention", "full_attention"]},
    "markuplm": {"xpath_unit_hidden_size": 8, "max_depth": 4},
    "beit": {"image_size": 20, "patch_size": 5},
    "pixtral": {"image_size": 20, "patch_size": 5},
    "siglip_vision_model": {"image_size": 20, "patch_size": 5},
    "nllb-moe": TWO_STACKS
    | {
        "num_experts": 4,
        "encoder_sparse_step": 4,
        "decoder_sparse_step": 4,
        "encoder_layerdrop": 0.0,
        "decoder_layerdrop": 0.0,
    },
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
    "llama": {"num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 2},
    "mistral": {"num_key_value_heads": 2, "sliding_window": None},
    "granite": {"num_key_value_heads": 2, "attention_multiplier": 0.8},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 8},
    "gpt2": {"scale_attn_by_inverse_layer_idx": True},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "vit": {"image_size": 20, "patch_size": 5},
    "deit": {"image_size": 20, "patch_size": 5},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    "bart": TWO_STACKS
    | {
        "decoder_start_token_id": 2,
        "forced_eos_token_id": None,
    },
}


@pytest.fixture(autouse=True)
def _quiet():
    """Without progress bars of transformers."""
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture
def make():
    """Makes a tiny random model of a family. Weights are large enough for tokens to differ and attention to matter."""

    def build(family, head="Model", **settings):
        settings = SIZES | EXTRA.get(family, {}) | settings
        return random_transformer(family, head, settings, factor=4.0)

    return build


@pytest.fixture
def batch():
    """Makes token ids and their mask, padded on a side; the same every time."""

    def build(side="right", *, tokens=23):
        ids = torch.randint(3, 90, (3, tokens), generator=torch.Generator().manual_seed(0))
        mask = torch.ones_like(ids)
        mask[0, -9:], mask[1, -1:] = 0, 0
        if side == "left":
            mask = mask.flip(1)
        return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}

    return build
