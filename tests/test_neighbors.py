import pytest
import torch

import lln
from lln.neighbors import log_far_ratio, token_ranks

TOKENS = 37


@pytest.mark.parametrize("block_size", [1, 2, 5, 8, 64])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("near", ["window", "blocks"])
@pytest.mark.parametrize("padded", [False, True])
def test_the_ratio_counts_what_the_explicit_matrix_shows(near, is_causal, block_size, padded):
    x = torch.randn(2, 3, TOKENS, 8, generator=torch.Generator().manual_seed(0))
    kept = torch.rand(2, TOKENS, generator=torch.Generator().manual_seed(1)) > (0.3 if padded else -1.0)
    mask = kept if padded else None
    options = {"near": near, "block_size": block_size, "is_causal": is_causal}
    identity = torch.eye(TOKENS).expand(2, 3, TOKENS, TOKENS)
    matrix = lln.block_diagonal_attention(x, x, identity, key_padding_mask=mask, **options)[:, 0]
    seen = kept[:, None].expand(2, TOKENS, TOKENS)
    seen = (seen.tril() if is_causal else seen).sum(dim=-1)
    neighbors = (matrix > 0).sum(dim=-1)
    expected = ((seen - neighbors) / neighbors).log()
    found = log_far_ratio(token_ranks(x, mask), **options).expand(2, TOKENS)
    torch.testing.assert_close(found[kept], expected[kept])
    assert not bool(found.isnan().any())
