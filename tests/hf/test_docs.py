"""The examples of docs/hugging-face.md run as they stand, one after the other."""

import re
from pathlib import Path

import torch

PAGE = Path(__file__).resolve().parents[2] / "docs/hugging-face.md"


def test_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(examples) == 6
    scope = {}
    for example in examples:
        exec(example, scope)
    assert scope["logits"].shape == (2, 300, 1000)
    assert scope["output"].shape == (2, 150)
    assert scope["assisted"].shape[0] == scope["looked_up"].shape[0] == 1
    with torch.no_grad():
        assert scope["classifier"](scope["ids"]).logits.shape == (2, 2)
