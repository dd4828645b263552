import pytest
import torch

import lln
import lln.zoo
from lln.neighbors import near_with_mass_ratio


def make(**options):
    torch.manual_seed(0)
    return lln.zoo.build("hybrid", num_heads=2, head_dim=8, **options)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("far", ["elu", "hedgehog", "lln"])
def test_both_branches_with_their_shares(far, is_causal):
    hybrid = make(far=far, block_size=5, share=0.3)
    with torch.no_grad():
        hybrid.gate.normal_()
    torch.manual_seed(1)
    query, key, value = (torch.randn(2, 2, 23, 8) for _ in range(3))
    options = {"key_padding_mask": torch.tensor([23, 14]), "is_causal": is_causal}
    distant = lln.zoo.build(far, num_heads=2, head_dim=8)(query, key, value, **options)
    close = lln.block_diagonal_attention(query, key, value, block_size=5, near="window", **options)
    logit = (query * hybrid.gate[:, None]).sum(dim=-1, keepdim=True) + torch.log(torch.tensor(0.3 / 0.7))
    keep = torch.arange(23) < torch.tensor([23, 14])[:, None]
    neighbors = {"near": "window", "block_size": 5, "is_causal": is_causal}
    _, ratio = near_with_mass_ratio(query, key, key, key_padding_mask=keep, **neighbors)
    share = torch.sigmoid(logit + ratio[..., None])
    output, expected = hybrid(query, key, value, **options), share * distant + (1 - share) * close
    kept = keep[:, None, :, None].expand_as(output)
    torch.testing.assert_close(output[kept], expected[kept], rtol=1e-5, atol=1e-5)


def test_a_far_mechanism_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="no mechanism is called 'nothing'"):
        make(far="nothing")
