"""The tutorials and other pages with examples run as they stand: Python, and commands of `lln`."""

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lln.cli import app

pytest.importorskip("transformers")
DOCS = Path(__file__).resolve().parents[1] / "docs"
BLOCKS = re.compile(r"```(python|bash)\n(.*?)```", re.DOTALL)


def run_page(path: Path) -> tuple[dict, int]:
    """What the Python of a page defines, and how many blocks were run, in the current folder."""
    scope: dict = {}
    blocks = BLOCKS.findall(path.read_text(encoding="utf-8"))
    for language, code in blocks:
        if language == "python":
            exec(compile(code, str(path), "exec"), scope)
            continue
        for line in code.splitlines():
            program, *arguments = shlex.split(line, comments=True)
            assert program == "lln"
            done = CliRunner().invoke(app, arguments)
            assert done.exit_code == 0, done.output
    return scope, len(blocks)


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch, new_cache):
    monkeypatch.chdir(tmp_path)


def test_quick_start(capsys):
    scope, blocks = run_page(DOCS / "tutorials/quick-start.md")
    assert blocks == 6
    shown = [float(x) for x in re.findall(r"tensor\((.*?)\)", capsys.readouterr().out)]
    assert abs(shown[0] - shown[1]) < 0.1  # "a few hundredths of a bit"
    assert shown[2] > 9.9  # "nearly uniform"
    assert scope["last"].shape == (2, 8, 1, 64)


def test_convert_and_fine_tune():
    scope, blocks = run_page(DOCS / "tutorials/convert.md")
    assert blocks == 4
    assert scope["accuracy"] > 0.8
    assert Path("converted/config.json").exists()


@pytest.mark.slow
def test_linearize():
    scope, blocks = run_page(DOCS / "tutorials/linearize.md")
    assert blocks == 6
    assert list(scope["report"]["kept"]) == ["calibrate", "align", "join", "distil"]
    assert Path("linear/report.html").exists()
    assert Path("linear/heads.html").exists()


def test_heads():
    scope, blocks = run_page(DOCS / "tutorials/heads.md")
    assert blocks == 4
    assert len(scope["rows"]) == 16
    page = Path("heads/page.html").read_text(encoding="utf-8")
    assert "Heads of" in page
    assert len(scope["recorder"].table()) == 2


def test_command_line(capsys):
    assert run_page(DOCS / "command-line.md")[1] == 1


def test_notebook(monkeypatch, capsys):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    notebook = json.loads((DOCS / "tutorials/notebook.ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    scope: dict = {}
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) == 6
    for cell in cells:
        exec(re.sub(r"^( *)%pip .*", r"\1pass", cell, flags=re.MULTILINE), scope)
        pyplot.close("all")
    curves = scope["curves"]
    matched = [abs(a - b) for a, b in zip(curves["softmax"], curves["LLN, matched entropy"], strict=True)]
    fixed = [abs(a - b) for a, b in zip(curves["softmax"], curves["LLN, alpha = beta = 1"], strict=True)]
    assert max(matched) < 0.3 < max(fixed)
    assert scope["accuracy"] > 0.8
    assert Path("heads.html").exists()
    assert all(not cell.get("outputs") for cell in notebook["cells"])
