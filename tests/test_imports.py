"""Dependencies point one way, and the core needs torch alone: read from the source, so that lazy imports count too."""

import ast
import sys
from pathlib import Path

import pytest

import lln

ROOT = Path(lln.__file__).parent
# From the bottom to the top. What stands in one line is one layer; a part imports from lower layers, from its own part,
# and from those of its layer that `BESIDE` names.
LAYERS = (
    ("core",),
    ("zoo", "instruments", "hf", "distributed"),
    ("results", "terminal"),
    ("bench", "report"),
    ("tasks",),
    ("linearize",),
    ("paper", "demo"),
    ("cli",),
)
BESIDE = {"hf": {"zoo"}, "instruments": {"hf"}, "distributed": {"hf", "zoo"}}
LAYER = {part: number for number, parts in enumerate(LAYERS) for part in parts}
FILES = sorted(ROOT.rglob("*.py"))


def part_of(module: str) -> str:
    """The part that a module of this library belongs to: what has no layer of its own is of the core."""
    name = [*module.split("."), ""][1]
    return name if name in LAYER else "core"


def imports(file: Path) -> list[tuple[int, str]]:
    """Line and module of every import in a file, with the names that are imported from a package."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}, line {node.lineno}: imports are absolute here"
            module = node.module or ""
            found += [(node.lineno, f"{module}.{alias.name}" if module == "lln" else module) for alias in node.names]
    return found


def wrong_imports(file: Path) -> list[str]:
    me = part_of(".".join(["lln", *file.relative_to(ROOT).with_suffix("").parts]))
    wrong = []
    for line, module in imports(file):
        if module.split(".")[0] != "lln":
            continue
        part = part_of(module)
        if part != me and LAYER[part] >= LAYER[me] and part not in BESIDE.get(me, ()):
            wrong.append(f"{file.relative_to(ROOT)}, line {line}: {me} imports {module} of {part}")
    return wrong


def test_no_import_points_up():
    assert [text for file in FILES for text in wrong_imports(file)] == []


@pytest.mark.parametrize(
    ("place", "text", "is_wrong"),
    [
        ("bench/x.py", "from lln.report.table import Table", True),
        ("report/x.py", "import lln.bench.measure", True),
        ("report/x.py", "def f():\n    from lln import tasks", True),
        ("zoo/x.py", "from lln.bench import measure", True),
        ("functional.py", "from lln.hf import convert", True),
        ("tasks/x.py", "from lln.bench import measure", False),
        ("hf/x.py", "from lln import zoo", False),
    ],
    ids=str,
)
def test_the_check_finds_what_points_up(monkeypatch, tmp_path, place, text, is_wrong):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    file = tmp_path / place
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    assert bool(wrong_imports(file)) == is_wrong


def test_the_core_needs_torch_alone():
    allowed = {"torch", "lln", "triton"} | sys.stdlib_module_names
    found = {
        (str(file.relative_to(ROOT)), module)
        for file in FILES
        if part_of(".".join(["lln", *file.relative_to(ROOT).with_suffix("").parts])) == "core"
        for _, module in imports(file)
        if module.split(".")[0] not in allowed
    }
    assert found == set()
