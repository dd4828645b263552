"""`lln inspect`: a layer x head table of a Hugging Face model."""

import csv
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from lln.cli import app
from lln.instruments.inspect import inspect, inspect_model, inspection_tables

transformers = pytest.importorskip("transformers")
TEXT = "The queen asked the gardener why the roses were red. The gardener said nothing, and painted on. " * 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = transformers.BertConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48
    )
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


@pytest.mark.parametrize("name", ["roberta", "bert", "gpt2", "llama"])
def test_model_types(name: str) -> None:
    records = inspect_model(name, TEXT, tokens=40)
    assert [(r["layer"] == records[0]["layer"], r["head"]) for r in records[:5]] == [(True, i) for i in range(4)] + [
        (False, 0)
    ]
    assert len(records) == 4 * 4
    assert "random" in records[0]["note"]
    for r in records:
        assert r["tokens"] == 40
        assert 0 < r["entropy"] <= r["limit"] + 1e-5
        assert 0 <= r["gap"] <= 1
        assert 0 <= r["bias"] <= r["limit"] - r["entropy"] + 1e-5
        assert 0 <= r["ks_distance"] <= 1


def test_saved_model(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    state = torch.get_rng_state()
    records = inspect(str(folder), text, out=tmp_path / "out", tokens=50)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(records) == 3 * 4
    assert records[0]["note"] == "no tokenizer found, so the bytes of the text are its tokens"
    printed = str(inspection_tables(records))
    for title in ("temperature", "entropy (bits)", "spectral gap", "bias (bits)", "50 tokens", "5.64 bits"):
        assert title in printed
    with (tmp_path / "out" / "inspect.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["entropy"]) for row in rows] == [pytest.approx(r["entropy"]) for r in records]
    assert (tmp_path / "out" / "inspect.png").read_bytes().startswith(b"\x89PNG")
    again = inspect_model(str(folder), TEXT, tokens=50)
    assert [r["gap"] for r in again] == [r["gap"] for r in records]


def test_long_text_is_cut_to_the_positions(folder: Path) -> None:
    records = inspect_model(str(folder), TEXT * 10, tokens=10_000)
    assert records[0]["tokens"] == 512
    assert "the model has positions for 512 tokens" in records[0]["note"]
    assert "positions" not in inspect_model(str(folder), TEXT, tokens=50)[0]["note"]


def test_tables_of_one_layer() -> None:
    records = [r for r in inspect_model("bert", TEXT, tokens=10) if r["layer"].startswith("encoder.layer.0")]
    records[0]["gap"] = None
    tables = {title: (columns, rows, notes) for title, columns, rows, notes in inspection_tables(records)}
    columns, rows, _ = tables["spectral gap of each layer and head"]
    assert columns == ["layer", "0", "1", "2", "3"]
    assert [row[:2] for row in rows] == [["encoder.layer.0.attention.self", "-"]]
    _, rows, notes = tables["bias (bits) of each layer and head"]
    assert float(rows[0][1]) == pytest.approx(records[0]["bias"], abs=0.005)
    assert notes[0] == "10 tokens; entropy of uniform attention: 3.32 bits"
    assert "random" in notes[1]


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither a folder"):
        inspect_model("roberta-base", TEXT)
    with pytest.raises(ValueError, match=r"no config\.json"):
        inspect_model(str(tmp_path), TEXT)
    with pytest.raises(ValueError, match="reads pixel_values, not text"):
        inspect_model("vit", TEXT)
    with pytest.raises(ValueError, match="the text is empty"):
        inspect_model("bert", "  \n")
    with pytest.raises(ValueError, match="tokens must be at least 2"):
        inspect_model("bert", TEXT, tokens=1)
    with pytest.raises(ValueError, match="text file"):
        inspect("bert", tmp_path / "missing.txt")
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    with pytest.raises(ValueError, match="expected UTF-8 text"):
        inspect("bert", tmp_path / "latin.txt")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [(["--html", "{folder}"], "--html must be a file"), (["--compare", "nothing"], "neither a folder")],
)
def test_options_are_checked_before_a_model_runs(tmp_path: Path, wrong: list[str], message: str) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    given = [x.format(folder=tmp_path) for x in wrong]
    done = CliRunner().invoke(app, ["inspect", "bert", "--text", str(tmp_path / "text.txt"), *given])
    assert done.exit_code != 0
    assert message in done.stderr
    assert done.stdout == ""


def test_models_that_cannot_be_read_are_refused_with_a_reason() -> None:
    for name, reason in (
        ("t5", "t5 cannot be read, encoder.* it uses a bias for positions"),
        ("gemma2", "gemma2 cannot be read, .* it uses a cap on scores"),
        ("clip", "clip cannot be run on a text"),
        ("xlnet", "no small xlnet can be made"),
    ):
        with pytest.raises(ValueError, match=reason):
            inspect_model(name, TEXT, tokens=20)


def test_shared_layers_are_reported() -> None:
    records = inspect_model("albert", TEXT, tokens=20)
    assert len(records) == 4
    assert "layers share their attention, which is called 4 times" in records[0]["note"]
    assert "share" not in inspect_model("bert", TEXT, tokens=20)[0]["note"]
