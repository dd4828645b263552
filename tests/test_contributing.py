"""The worked examples of CONTRIBUTING.md do what is written there: a file and a line in a registry are enough."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import lln.paper
from lln import instruments, zoo
from lln.cli.options import settings_parameters
from lln.instruments import heads
from lln.results import Result, write_results
from lln.tasks.lra import registry
from lln.tasks.lra.config import LraConfig
from lln.tasks.lra.data import load
from lln.tasks.lra.train import build
from lln.tasks.presets import MlmConfig
from lln.zoo.registry import _REGISTRY

TEXT = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")


def example(title):
    """What a file with the code block after a title defines."""
    code = re.search(rf"\*\*{title}\*\*.*?```python\n(.*?)```", TEXT, re.DOTALL)[1]
    scope = {"__name__": "example"}
    exec(code, scope)
    return SimpleNamespace(**scope)


def test_a_mechanism(monkeypatch):
    monkeypatch.setattr("lln.zoo.registry._REGISTRY", dict(_REGISTRY))
    example("A mechanism")
    assert "softplus" in zoo.names()
    query, key, value = torch.randn(3, 1, 2, 9, 4).unbind()
    phi = torch.nn.functional.softplus
    weights = phi(query) @ phi(key).mT
    expected = weights / weights.sum(dim=-1, keepdim=True) @ value
    built = zoo.build("softplus", num_heads=2, head_dim=4)
    torch.testing.assert_close(built(query, key, value), expected)


def test_an_instrument(monkeypatch, tmp_path):
    made = example("An instrument")
    query, key = torch.randn(2, 2, 3, 40, 4, dtype=torch.float64).unbind()
    P = torch.softmax(query @ key.mT / 2, dim=-1)
    expected = P.amax(dim=-1).mean(dim=-1)
    torch.testing.assert_close(made.largest(query, key, kind="softmax"), expected)
    torch.testing.assert_close(made.largest(P), expected)
    monkeypatch.setitem(heads.ROW_INSTRUMENTS, "largest", made.row_largest)
    for module in (heads, instruments.recorder):
        monkeypatch.setattr(module, "SCALARS", (*heads.SCALARS, "largest"))
    layer = lln.MultiheadAttention(8, 2)
    with instruments.Recorder(layer, tmp_path / "records.jsonl") as recorder:
        layer(*[torch.randn(1, 5, 8)] * 3)
        records = recorder.step()
    assert all(0.2 <= record["largest"] <= 1 for record in records)


def test_a_figure(monkeypatch, tmp_path):
    made = example("A figure or table")
    monkeypatch.setattr(lln.paper, "load", lambda name: made)
    origin = {"command": "lln", "commit": "abc", "seed": 0, "machine": {"processor": "P", "cores": 2}}
    losses = [{"step": step, "loss": 1 / step} for step in (1, 2, 3)]
    write_results(tmp_path / "figure11.jsonl", [Result(made.JOBS[0].name, origin, tables={"training": losses})])
    png, _, csv = lln.paper.figure("figure11", out=tmp_path, results=tmp_path)
    assert png.exists()
    assert csv.read_text().splitlines() == ["step,loss", "1,1", "2,0.5", "3,0.3333333333"]


def test_a_task_of_the_long_range_arena(monkeypatch, tmp_path):
    monkeypatch.setenv("LLN_CACHE", str(tmp_path))
    monkeypatch.delenv("LLN_DATA", raising=False)
    task = example("A task of the Long Range Arena").TASK
    monkeypatch.setitem(registry.TASKS, "parity", task)
    for preset, values in task.presets.items():
        monkeypatch.setitem(LraConfig.TASK_PRESETS[preset], "parity", values)
    data = load("parity", examples=20)
    assert [len(split) for split in data.splits.values()] == [20, 1000, 1000]
    assert data.splits["train"].inputs[0][0].sum() % 2 == data.splits["train"].labels[0]
    config = LraConfig.preset("laptop", task="parity", attention="lln")
    assert config.steps == 300
    outputs = build(config)(**data.splits["test"].batch([0, 1]))
    assert outputs["loss"].item() == pytest.approx(0.69, abs=0.1)


def test_a_preset_of_an_experiment(monkeypatch):
    monkeypatch.setattr(MlmConfig, "PRESETS", dict(MlmConfig.PRESETS))
    example("A preset of an experiment")
    config = MlmConfig.preset("overnight")
    assert (config.layers, config.steps, config.width) == (4, 30_000, 128)
    preset, *_ = settings_parameters(MlmConfig)
    assert "overnight" in preset.annotation.__metadata__[0].help
