"""Reformer against reformer-pytorch with the same buckets, and against its own formula as sets of pairs."""

import math
from collections.abc import Iterator

import pytest
import torch
from reformer_pytorch import LSHAttention
from torch import Tensor

from lln.zoo import build
from lln.zoo.reformer import Reformer

HEADS, HEAD_DIM, CHUNK = 2, 8, 8


def tokens_of(number: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 2, HEADS, number, HEAD_DIM, dtype=torch.float64, generator=generator)
    return q, k, v


def make(**options: object) -> Reformer:
    options = {"chunk_size": CHUNK, "num_buckets": 8, "seed": 3} | options
    mechanism = build("reformer", num_heads=HEADS, head_dim=HEAD_DIM, **options)
    assert isinstance(mechanism, Reformer)
    return mechanism


def sorted_chunks(mechanism: Reformer, q: Tensor, k: Tensor, rotation: Tensor) -> list[list[tuple[str, int]]]:
    """The chunks of one head: its queries (and keys) by bucket, then by position, a query before its key."""
    items = [("q", i) for i in range(len(q))]
    if not mechanism.shared_qk:
        items += [("k", i) for i in range(len(k))]

    def place(item: tuple[str, int]) -> tuple[int, int, bool]:
        kind, i = item
        rotated = (q if kind == "q" else k)[i] @ rotation
        return int(torch.cat((rotated, -rotated)).argmax()), i, kind == "k"

    items.sort(key=place)
    return [items[start : start + mechanism.chunk_size] for start in range(0, len(items), mechanism.chunk_size)]


def pairs(mechanism: Reformer, q: Tensor, k: Tensor, rotation: Tensor) -> Iterator[tuple[int, set[int]]]:
    """Each query, and the keys in its chunk and in the one before."""
    chunks = sorted_chunks(mechanism, q, k, rotation)
    kind_of_key = "q" if mechanism.shared_qk else "k"
    for c, chunk in enumerate(chunks):
        near = {i for kind, i in chunk + chunks[c - 1] if kind == kind_of_key}
        yield from ((i, near) for kind, i in chunk if kind == "q")


def explicit(mechanism: Reformer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """All rounds of all heads, query by query: one softmax over the pairs of all rounds, each as often as it occurs."""
    output = torch.zeros_like(v)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            keys = q[b, h] / q[b, h].norm(dim=-1, keepdim=True) if mechanism.shared_qk else k[b, h]
            scores = q[b, h] @ keys.mT / math.sqrt(HEAD_DIM)
            if mechanism.shared_qk:
                scores.fill_diagonal_(-5e4)
            count = torch.zeros_like(scores)
            for rotation in mechanism.rotations.double():
                for i, near in pairs(mechanism, q[b, h], k[b, h], rotation):
                    count[i, list(near)] += 1
            weights = (scores + count.log()).softmax(dim=-1).nan_to_num(0.0)  # without a key: zeros
            output[b, h] = weights @ v[b, h]
    return output


@pytest.mark.parametrize("shared_qk", [True, False], ids=["shared", "separate"])
@pytest.mark.parametrize("number", [1, 7, 8, 9, 16, 50])
@pytest.mark.parametrize("rounds", [1, 3])
def test_formula(rounds: int, number: int, shared_qk: bool) -> None:
    mechanism = make(rounds=rounds, shared_qk=shared_qk)
    q, k, v = tokens_of(number)
    torch.testing.assert_close(mechanism(q, k, v), explicit(mechanism, q, k, v), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("length", [64, 59], ids=["whole", "padded"])
def test_reformer_pytorch(rounds: int, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their attention with our buckets. There the first chunk of a round attends to the last chunk of the round before,
    here to that of the same round: with several rounds, tokens that are never in a first chunk are compared."""
    mechanism = make(rounds=rounds, shared_qk=True)
    q, k, v = tokens_of(64)
    buckets = torch.stack([mechanism.buckets(q, rotation) for rotation in mechanism.rotations.double()], dim=2)
    buckets[..., length:] = mechanism.num_buckets  # padding sorts last
    offsets = (mechanism.num_buckets + 1) * torch.arange(rounds)[:, None]
    theirs = LSHAttention(bucket_size=CHUNK, n_hashes=rounds).eval()
    ours_for_theirs = (buckets + offsets).flatten(0, 1).flatten(1)
    monkeypatch.setattr(theirs, "hash_vectors", lambda *args, **kwargs: ours_for_theirs)
    keep = (torch.arange(64) < length).expand(2, -1)
    expected, _, _ = theirs(q.flatten(0, 1), v.flatten(0, 1), input_mask=keep.repeat_interleave(HEADS, dim=0))

    output = mechanism(q, k, v, key_padding_mask=keep)
    first = buckets.argsort(dim=3, stable=True).argsort(dim=3) < CHUNK
    comparable = keep[:, None] & ~(first.any(dim=2) if rounds > 1 else torch.zeros_like(first[:, :, 0]))
    assert comparable.float().mean() > 0.5
    torch.testing.assert_close(output[comparable], expected.view_as(v)[comparable], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shared_qk", [True, False], ids=["shared", "separate"])
def test_padding_is_as_if_removed(shared_qk: bool) -> None:
    mechanism = make(rounds=2, shared_qk=shared_qk)
    q, k, v = tokens_of(50)
    keep = torch.rand(2, 50, generator=torch.Generator().manual_seed(1)) < 0.6
    output = mechanism(q, k, v, key_padding_mask=keep)
    for sample in range(2):
        cut = (x[sample : sample + 1, :, keep[sample]] for x in (q, k, v))
        torch.testing.assert_close(output[sample, :, keep[sample]], mechanism(*cut)[0], rtol=1e-9, atol=1e-9)


def test_shared_keys_are_the_queries() -> None:
    mechanism = make(shared_qk=True)
    q, k, v = tokens_of(20)
    assert torch.equal(mechanism(q, k, v), mechanism(q, torch.zeros_like(k), v))


@pytest.mark.parametrize("shared_qk", [True, False], ids=["shared", "separate"])
def test_one_chunk_is_softmax_attention(shared_qk: bool) -> None:
    q, k, v = tokens_of(30)
    output = make(shared_qk=shared_qk, chunk_size=64, rounds=3)(q, k, v)
    keys = q / q.norm(dim=-1, keepdim=True) if shared_qk else k
    scores = q @ keys.mT / math.sqrt(HEAD_DIM)
    if shared_qk:
        scores.diagonal(dim1=2, dim2=3).fill_(-5e4)
    torch.testing.assert_close(output, scores.softmax(dim=-1) @ v, rtol=1e-9, atol=1e-9)


def test_hashing_finds_the_near_keys() -> None:
    """With more rounds the output comes closer to softmax attention that is sharp."""
    q, _, v = tokens_of(256)
    k = q[:, :, torch.randperm(256, generator=torch.Generator().manual_seed(2))]
    exact = (q * 6.0 @ k.mT / math.sqrt(HEAD_DIM)).softmax(dim=-1) @ v
    errors = []
    for rounds in (1, 4, 16):
        output = make(rounds=rounds, num_buckets=16, chunk_size=32)(q * 6.0, k, v)
        errors.append(float((output - exact).norm() / exact.norm()))
    assert errors[1] < 0.7 * errors[0]  # measured 0.93, 0.54, 0.26
    assert errors[2] < 0.6 * errors[1]


def test_seeds() -> None:
    same, again, other = make(seed=1), make(seed=1), make(seed=2)
    assert torch.equal(same.rotations, again.rotations)
    assert not torch.equal(same.rotations, other.rotations)
    other.load_state_dict(same.state_dict())
    q, k, v = tokens_of(50)
    assert torch.equal(same(q, k, v), other(q, k, v))


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="num_buckets must be even"):
        make(num_buckets=5)
    with pytest.raises(ValueError, match="rounds must be at least 1, got 0"):
        make(rounds=0)
    with pytest.raises(ValueError, match="reformer cannot be causal"):
        make()(*tokens_of(8), is_causal=True)
