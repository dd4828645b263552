"""The small encoder: its size, padding, pairs, every mechanism, and that it learns."""

import pytest
import torch

from lln.tasks.lra.config import OPTIONS, LraConfig
from lln.tasks.lra.model import Classifier, ExplicitSoftmax, Shape, _similar, build_attention
from lln.tasks.lra.registry import TASKS
from lln.tasks.lra.task import Task
from lln.tasks.lra.train import build

SIZES = {"title": "", "length": 70, "symbols": 9, "about": "", "presets": {}}
SMALL = Task(name="small", classes=3, **SIZES)
PAIR = Task(name="pair", classes=2, towers=2, **SIZES)
preset = LraConfig.preset
METHODS = ("softmax_explicit", "softmax", "reformer", "performer", "skyformer", "nystrom", "lln", "lln_diag")


def test_size_of_the_comparison():
    model = Classifier(TASKS["listops"], "softmax")
    width, hidden = 64, 128
    layer = 4 * (width * width + width) + 2 * width * hidden + hidden + width + 4 * width
    head = width * hidden + hidden + hidden * 10 + 10
    assert sum(p.numel() for p in model.parameters()) == (16 + 2000) * width + 2 * layer + 2 * width + head
    assert Classifier(TASKS["retrieval"], "softmax").head[0].in_features == 4 * width


@pytest.mark.parametrize("method", METHODS)
def test_padding_and_neighbours_do_not_matter(method):
    torch.manual_seed(0)
    model = Classifier(SMALL, method, options=OPTIONS.get(method)).eval().double()
    rows = [torch.randint(1, 10, (length,)) for length in (70, 1, 33, 64, 65, 7, 70, 12, 40, 3)]
    tokens = torch.zeros(len(rows), 1, 70, dtype=torch.long)
    for into, row in zip(tokens, rows, strict=True):
        into[0, : len(row)] = row
    together = model(tokens)["logits"]
    for logits, row in zip(together, rows, strict=True):
        assert torch.allclose(model(row[None, None])["logits"][0], logits, atol=1e-9)


def test_groups_of_similar_length():
    assert _similar([100, 81, 80, 79, 64, 63, 1, 0, 0]) == [3, 2, 1, 1, 2]
    assert _similar([0, 0]) == [2]


def test_explicit_softmax_is_softmax():
    sizes = {"shape": Shape(), "max_len": 70}
    explicit, fused = build_attention(ExplicitSoftmax.name, **sizes), build_attention("softmax", **sizes)
    q, k, v = torch.randn(3, 2, 2, 33, 32, dtype=torch.float64)
    keep = torch.rand(2, 33) > 0.3
    for mask in (None, keep):
        assert torch.allclose(explicit(q, k, v, key_padding_mask=mask), fused(q, k, v, key_padding_mask=mask))


def test_an_empty_row_is_harmless():
    model = Classifier(SMALL, "lln_diag").eval()
    tokens = torch.zeros(2, 1, 5, dtype=torch.long)
    tokens[1, 0, :3] = 4
    outputs = model(tokens, torch.tensor([0, 1]))
    assert outputs["logits"].isfinite().all()
    outputs["loss"].backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_pairs():
    model = Classifier(PAIR, "lln").eval()
    tokens = torch.randint(1, 10, (4, 2, 20))
    x, y = model.pool(tokens[:, 0]), model.pool(tokens[:, 1])
    expected = model.head(torch.cat((x, y, x * y, x - y), dim=-1))
    assert torch.allclose(model(tokens)["logits"], expected, atol=1e-6)


def test_standardised_means():
    torch.manual_seed(0)
    model = Classifier(PAIR, "lln_diag", shape=Shape(dropout=0.0, standardise=True))
    seen = []
    model.head.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    tokens = torch.randint(1, 10, (30, 2, 70))
    with torch.no_grad():
        for _ in range(100):  # until the moments have settled
            model(tokens)
    both = seen[-1][:, : 2 * 64].reshape(-1, 64)  # x and y are measured by the same moments
    assert torch.allclose(both.mean(dim=0), torch.zeros(64), atol=1e-4)
    assert torch.allclose(both.var(dim=0, correction=0), torch.ones(64), atol=0.1)
    model.eval()
    together = model(tokens)["logits"]
    assert torch.allclose(model(tokens[3:4])["logits"], together[3:4], atol=1e-4)  # whatever its neighbours are
    assert [task for task in TASKS if preset("laptop", task=task).standardise] == ["retrieval"]
    assert isinstance(build(preset("laptop", task="retrieval")).standard, torch.nn.BatchNorm1d)
    assert isinstance(build(preset("paper", task="retrieval")).standard, torch.nn.Identity)


@pytest.mark.parametrize("shape", [(2, 2, 10), (2, 1, 71)])
def test_wrong_tokens(shape):
    with pytest.raises(ValueError, match=r"small takes tokens \(batch, 1, at most 70\)"):
        Classifier(SMALL, "softmax")(torch.ones(shape, dtype=torch.long))


def test_all_methods_start_from_the_same_weights():
    states = [
        build(preset("laptop", task="listops", attention=method)).state_dict()
        for method in ("softmax", "performer", "lln_diag")
    ]
    for name, value in states[0].items():
        assert all(torch.equal(value, state[name]) for state in states[1:]), name
    other = build(preset("laptop", task="listops", attention="softmax", seed=1)).state_dict()
    assert not torch.equal(states[0]["embedding.weight"], other["embedding.weight"])


@pytest.mark.parametrize("method", ["softmax", "lln_diag"])
def test_learns(method):
    """Which of three symbols is there: one token in thirty decides."""
    torch.manual_seed(0)
    model = Classifier(SMALL, method, shape=Shape(dropout=0.0))
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    labels = torch.arange(48) % 3
    tokens = torch.randint(4, 10, (48, 1, 30))
    tokens[torch.arange(48), 0, torch.randint(30, (48,))] = 1 + labels
    for _ in range(60):
        outputs = model(tokens, labels)
        optimiser.zero_grad()
        outputs["loss"].backward()
        optimiser.step()
    assert (outputs["logits"].argmax(-1) == labels).float().mean() > 0.9
