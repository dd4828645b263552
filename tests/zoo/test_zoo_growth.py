"""Time and memory of every mechanism of the zoo that is linear, by counts: they grow with the number of tokens."""

import json
from itertools import accumulate

import pytest
import torch
from mechanisms import CAUSAL, DIM, LINEAR, make, run, tokens
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

import lln.zoo
from lln import cli
from lln.matching.moments import CHUNK_TOKENS


def measure(name: str, number: int, is_causal: bool, *, padded: bool = False) -> tuple[int, int]:
    """Peak bytes and matrix product operations of a forward and a backward pass."""
    module = make(name, heads=1, max_len=number)
    qkv = [x.requires_grad_() for x in tokens(number, batch=1, heads=1)]
    keep = torch.arange(number)[None] < number - 5 if padded else None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run(module, *qkv, is_causal=is_causal, key_padding_mask=keep).sum().backward()
    changes = [event.nbytes() for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    with FlopCounterMode(display=False) as flops:
        run(module, *qkv, is_causal=is_causal, key_padding_mask=keep).sum().backward()
    return max(accumulate(changes)), flops.get_total_flops()


@pytest.mark.parametrize(
    ("name", "is_causal"),
    [(name, is_causal) for name in LINEAR for is_causal in (False, True) if name in CAUSAL or not is_causal],
)
def test_linear_is_linear(name: str, is_causal: bool) -> None:
    (bytes_4k, flops_4k), (bytes_8k, flops_8k) = (measure(name, number, is_causal) for number in (4096, 8192))
    assert bytes_4k > 4096 * DIM * 4
    assert bytes_8k <= 2.3 * bytes_4k
    assert flops_8k <= 2.3 * flops_4k


# Blocks that do not fill a piece.
NOT_IN_STEP = {"flash": {"chunk_size": 100}, "longformer": {"window": 100}, "transformer_ls": {"segment": 100}}


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", LINEAR)
def test_pieces_change_nothing(name: str, is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long inputs pass through piece by piece; while compiling they pass in one."""
    description = lln.zoo.describe(name)
    if is_causal and not description.causal:
        pytest.skip("refuses to be causal")
    number = 2 * CHUNK_TOKENS + 70
    module = make(name, max_len=number, **NOT_IN_STEP.get(name, {})).double()
    keep = torch.arange(number) < torch.tensor([[number], [CHUNK_TOKENS + 50]])
    keep[0, CHUNK_TOKENS - 3 : CHUNK_TOKENS + 2] = False

    def everything() -> list[Tensor]:
        qkv = [x.requires_grad_() for x in tokens(number, dtype=torch.float64)]
        output = run(module, *qkv, is_causal=is_causal, key_padding_mask=keep).where(keep[:, None, :, None], 0.0)
        inputs = [*qkv, *module.parameters()]
        gradients = torch.autograd.grad(output.square().sum(), inputs, allow_unused=True)
        return [output, *(torch.zeros(()) if g is None else g for g in gradients)]

    pieces = everything()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for actual, expected in zip(pieces, everything(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-7, atol=1e-9 * max(1.0, expected.abs().max().item()))


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_softmax_with_padding_holds_no_matrix(is_causal: bool) -> None:
    bytes_1k, bytes_4k = (measure("softmax", number, is_causal, padded=True)[0] for number in (1024, 4096))
    assert bytes_4k <= 4.6 * bytes_1k


def test_growth_prints_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lln.bench.growth.peak_memory", lambda name, *, tokens, **_: tokens * 2**20)
    threads = torch.get_num_threads()
    sizes = ["--short", "128", "--long", "256", "--repeats", "1"]
    done = CliRunner().invoke(cli.app, ["bench", "growth", "--mechanisms", "elu,linformer", *sizes, "--json"])
    assert torch.get_num_threads() == threads
    table = json.loads(done.stdout)
    assert [row[0] for row in table["rows"]] == ["elu", "linformer"]
    assert table["rows"][1][3:] == ["", "", "128.0 → 256.0", "2.00"]  # it has no causal form
    for mistake, message in ((["elu,x"], "no mechanism"), (["elu", "--option", "block_size=8"], "block_size")):
        assert message in CliRunner().invoke(cli.app, ["bench", "growth", "--mechanisms", *mistake]).stderr


def test_the_measurement_detects_what_is_not_linear() -> None:
    (bytes_512, flops_512), (bytes_2048, flops_2048) = (measure("relu_kernel", n, False) for n in (512, 2048))
    assert bytes_2048 > 10 * bytes_512
    assert flops_2048 > 10 * flops_512
