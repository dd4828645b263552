"""The recorder beside training: it changes nothing, takes little time, and loses nothing."""

import copy
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded_models import FAMILIES, MODELS, hugging_face, inputs_of, record, torch_encoder
from torch import Tensor, nn

from lln.instruments import Recorder, read_records
from lln.nn import LLNAttention


def train(model: nn.Module, batches: list[Any], recorder: Recorder | None, autocast: bool = False) -> list[Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen = []
    for batch in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            output = model(**batch) if isinstance(batch, dict) else model(batch)
        output = output if isinstance(output, Tensor) else output.last_hidden_state
        output.float().square().mean().backward()
        seen += [output.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        if recorder is not None:
            recorder.step()
    return [*seen, torch.get_rng_state()]


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", MODELS)
def test_training_is_bit_identical(name: str, autocast: bool, tmp_path: Path) -> None:
    """Outputs, gradients and the random numbers that dropout draws."""
    torch.manual_seed(0)
    model = MODELS[name]()
    start = {key: value.clone() for key, value in model.state_dict().items()}
    batches = [inputs_of(name) if name in FAMILIES else torch.randn(2, 10, 16) for _ in range(3)]
    alone = train(model, batches, None, autocast)
    model.load_state_dict(start)
    with Recorder(model, tmp_path / "r.jsonl", every=2, max_overhead=None) as recorder:
        watched = train(model, batches, recorder, autocast)
        assert {r["step"] for r in recorder.table()} == {0, 2}
    assert len(alone) == len(watched)
    assert all(torch.equal(x, y) for x, y in zip(alone, watched, strict=True))


def test_model_is_left_as_it_was(tmp_path: Path) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model = nn.ModuleList([hugging_face("bert"), torch_encoder(), LLNAttention(2, 4)])
    with Recorder(model, tmp_path / "r.jsonl"):
        assert "get_interface" in vars(ALL_ATTENTION_FUNCTIONS)
    assert "get_interface" not in vars(ALL_ATTENTION_FUNCTIONS)
    assert not any("forward" in vars(module) for module in model.modules())


def test_closed_recorder_is_reported(tmp_path: Path) -> None:
    recorder = Recorder(nn.MultiheadAttention(16, 2), tmp_path / "r.jsonl")
    recorder.close()
    with pytest.raises(ValueError, match="closed"):
        recorder.step()


def test_two_recorders_at_once(tmp_path: Path) -> None:
    model = hugging_face("bert").eval()
    first = Recorder(model, tmp_path / "1.jsonl", every=1, max_overhead=None)
    second = Recorder(model, tmp_path / "2.jsonl", every=1, max_overhead=None)
    model(**inputs_of("bert"))
    assert [r["entropy"] for r in first.step()] == [r["entropy"] for r in second.step()]
    first.close()
    model(**inputs_of("bert"))
    assert len(second.step()) == 8
    second.close()


def test_a_step_that_takes_too_long_waits(tmp_path: Path) -> None:
    module = nn.MultiheadAttention(16, 4, batch_first=True)
    x = torch.randn(1, 60, 16)
    with Recorder(module, tmp_path / "r.jsonl", every=1, max_overhead=0.2) as recorder:
        start = time.perf_counter()
        for _ in range(40):
            module(x, x, x)
            time.sleep(0.005)
            recorder.step()
        elapsed = time.perf_counter() - start
        steps = {r["step"] for r in recorder.table()}
        longest = 0.1  # one record more than the share allows
        assert recorder.seconds <= 0.2 * elapsed + longest
    assert 0 in steps
    assert 1 < len(steps) < 40


def test_crash_loses_at_most_the_last_record(tmp_path: Path) -> None:
    path = tmp_path / "run" / "records.jsonl"
    module = nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(1, 5, 16)

    def run(first_step: int) -> None:
        with Recorder(module, path, every=1, max_overhead=None, first_step=first_step) as recorder:
            for _ in range(2):
                module(x, x, x)
                recorder.step()
                assert len(read_records(path)) % 2 == 0  # it is on the disk already

    run(0)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step": 2, "lay')  # what a crash leaves
    assert len(read_records(path)) == 4
    run(2)
    assert [r["step"] for r in read_records(path)] == [0, 0, 1, 1, 2, 2, 3, 3]
    path.write_bytes(b"nonsense\n" + whole)
    with pytest.raises(ValueError, match="line 1 is not a record"):
        read_records(path)


@pytest.mark.parametrize("recorders", [1, 2])
@pytest.mark.parametrize("name", ["torch", "ours", "bert"])
def test_copy_and_pickle_while_open(name: str, recorders: int, tmp_path: Path) -> None:
    model = MODELS[name]().eval()
    inputs = inputs_of(name) if name in FAMILIES else {"src": torch.randn(2, 10, 16)}

    def run(network: nn.Module) -> Tensor:
        with torch.no_grad():
            output = network(**inputs)
        return output if isinstance(output, Tensor) else output.last_hidden_state

    expected = run(model)
    opened = [Recorder(model, tmp_path / f"{i}.jsonl", max_overhead=None) for i in range(recorders)]
    duplicate = copy.deepcopy(model)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    again = copy.deepcopy(duplicate)
    for network in (duplicate, again, loaded):
        assert torch.equal(run(network), expected)
    for network in (duplicate, again, loaded):
        for parameter in network.parameters():
            nn.init.zeros_(parameter)
        assert not run(network).any()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert opened[0].step() == []  # copies are not recorded
    for recorder in reversed(opened):
        recorder.close()
    for network in (duplicate, again, loaded):
        assert not run(network).any()
    assert torch.equal(run(model), expected)


def test_copy_of_a_module_with_a_forward_of_its_own(tmp_path: Path) -> None:
    module = nn.MultiheadAttention(16, 2, batch_first=True)
    module.forward = str  # type: ignore[assignment, method-assign]
    with Recorder(module, tmp_path / "r.jsonl"):
        assert copy.deepcopy(module).forward is str
        torch.save(module, tmp_path / "module.pt")
        assert torch.load(tmp_path / "module.pt", weights_only=False).forward is str
    assert module.forward is str


def test_continuing_a_file(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    module = nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(1, 5, 16)
    first = record(module, lambda: module(x, x, x), path)
    whole = path.read_bytes()
    path.write_bytes(whole.rstrip())  # a complete record without its newline stays
    second = record(module, lambda: module(x, x, x), path, first_step=1, every=1)
    assert read_records(path) == first + second
    for torn in (b"{", b'{"step": 0, "la'):  # nothing but the beginning of a first record
        path.write_bytes(torn)
        Recorder(module, path).close()
        assert path.read_bytes() == b""
    for foreign in (b"my thesis", b"my thesis\n", b"[1, 2]\n", b'{"a": 1}', b'{\n  "step": 1\n}', b"\n" + whole):
        path.write_bytes(foreign)
        with pytest.raises(ValueError, match="is not a file of records"):
            Recorder(module, path)
        assert path.read_bytes() == foreign
