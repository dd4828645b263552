"""The public surface: names, README, what `import lln` needs, and that the project mentions itself alone."""

import ast
import doctest
import importlib.util
import inspect
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml

import lln
import lln.theory
import lln.zoo
from lln.problem import DEFAULTS

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CODE = (".py", ".c", ".h", ".js", ".css")
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]


def test_public_names_are_those_of_all():
    modules = {"reference"}
    public = {name for name, x in vars(lln).items() if not name.startswith("_") and type(x).__name__ != "module"}
    assert set(lln.__all__) == public | modules
    for name in lln.__all__:
        assert getattr(lln, name).__doc__, name


def test_reference_has_the_functions_signatures():
    for name in ("lln_attention", "block_diagonal_attention", "lln_diag_attention", "match_moments"):
        assert inspect.signature(getattr(lln, name)) == inspect.signature(getattr(lln.reference, name)), name


def documented():
    """Public names of the core with what they stand for: functions, classes, and the methods of `LLNState`."""
    for module in (lln, lln.reference, lln.theory):
        yield from ((f"{module.__name__}.{name}", getattr(module, name)) for name in module.__all__)
    for name in ("empty", "prefill", "step", "branches", "reorder", "merge", "to", "from_dict"):
        yield f"lln.LLNState.{name}", getattr(lln.LLNState, name)


TAKES_ANYTHING = {"lln.theory.spread"}
CALLABLE = {name: x for name, x in documented() if inspect.isroutine(x)}


@pytest.mark.parametrize("name", CALLABLE)
def test_functions_document_what_they_take_return_and_refuse(name):
    doc, parameters = inspect.getdoc(CALLABLE[name]), inspect.signature(CALLABLE[name]).parameters.values()
    for section in ("Args:", "Returns:", "Example:", *(("Raises:",) if name not in TAKES_ANYTHING else ())):
        assert section in doc, f"{name} has no {section}"
    described = re.findall(r"[*\w]+", re.search(r"Args:\n(.*?)Returns:", doc, re.DOTALL)[1])
    names = [x.name for x in parameters if x.name != "self" and x.kind is not x.VAR_KEYWORD]
    missing = [x for x in names if x not in described and "**options" not in described]
    assert not missing, f"{name} does not describe {missing}"


def test_functions_document_what_is_taken_by_default():
    """The site has no signature that shows it: options are keywords of a TypedDict."""
    docs = {name: inspect.getdoc(getattr(lln, name)) for name in ("lln_attention", "block_diagonal_attention")}
    far, near = docs.values()
    for name, default in DEFAULTS.items():
        if isinstance(default, str):
            assert re.search(rf'{name}: "{default}" \(the default\)', far + near), name
    assert f"{DEFAULTS['block_size']} by default" in near


def test_modules_document_what_they_take():
    for module in (lln.LLNAttention, lln.LLNDiagAttention, lln.MultiheadAttention):
        doc = inspect.getdoc(module)
        missing = [x for x in inspect.signature(module).parameters if not re.search(rf"\b{x}\b", doc)]
        assert not missing or "**options" in doc, f"{module.__name__} does not describe {missing}"
        assert all(section in doc for section in ("Args:", "Raises:", "Example:")), module.__name__


@pytest.mark.parametrize("name", [name for name, x in documented() if type(x).__name__ != "module"])
def test_examples_of_docstrings_run(name):
    example = dict(documented())[name]
    finder = doctest.DocTestFinder(recurse=False)
    tests = [x for x in finder.find(example, name, globs={"torch": torch, "lln": lln}) if x.examples]
    assert tests or "Args:" not in (example.__doc__ or ""), f"{name} has no example"
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in tests:
        report = []
        runner.run(test, out=report.append)
        assert not runner.failures, "".join(report)


def test_the_core_needs_torch_alone():
    script = """
import sys
for name in ("typer", "rich", "matplotlib", "scipy", "transformers", "numpy", "pandas"):
    sys.modules[name] = None
import torch, lln
lln.lln_diag_attention(*torch.randn(3, 1, 1, 9, 8))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_without_its_extras_the_command_names_what_to_install():
    script = "import sys; sys.modules['typer'] = None; import lln.cli"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    assert 'pip install "lln-attention[cli]"' in done.stderr


def test_readme_is_short_and_begins_with_what_to_run():
    assert len(README.splitlines()) < 120
    commands = re.findall(r"^(?:make|pip|lln|python) .*", README, re.MULTILINE)
    assert [command.split("  ")[0] for command in commands[:2]] == ["make demo", "make test"]


def test_readme_examples_run(tmp_path, monkeypatch):
    pytest.importorskip("accelerate")
    from pydoc_data.topics import topics

    from typer.testing import CliRunner

    from lln.cli import app

    quick_start, opening = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in quick_start.splitlines() if line.strip()]) <= 12
    scope = {}
    exec(quick_start, scope)
    assert scope["output"].shape == (2, 8, 1, 64)
    x = scope["torch"].randn(2, 30, 512)
    assert scope["layer"](x).shape == x.shape

    # The command with a small model in place of the one on the hub, and without training.
    monkeypatch.chdir(tmp_path)
    Path("FILE.txt").write_text("\n\n".join(topics.values()), encoding="utf-8")
    make_small_encoder(Path("small"), Path("FILE.txt"))
    [command] = re.findall(r"^lln (linearize .*?)(?: {2,}#.*)?$", README, re.MULTILINE)
    name, text = "sentence-transformers/all-MiniLM-L6-v2", "--text FILE"
    assert name in command
    assert command.endswith(text)
    words = command.replace(name, "small").split()
    quick = ["--steps", "0", "--cost-tokens", "0", "--eval-passages", "5", "--quiet"]
    done = CliRunner().invoke(app, [*words[:-1], "FILE.txt", *quick])
    assert done.exit_code == 0, done.output
    exec(opening, scope)
    assert scope["model"].config.lln_attention["attention"] == "lln_diag"


def make_small_encoder(folder, text):
    """A folder with a small random BERT, and a tokenizer with the words of a text."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = Counter(re.findall(r"\w+|[^\w\s]+", text.read_text()))  # as the tokenizer below splits it
    common = [word for word, _ in words.most_common(500)]
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[CLS]", "[SEP]", "[UNK]", *common])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=core, **names).save_pretrained(folder)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    config = transformers.BertConfig(vocab_size=len(vocabulary), max_position_embeddings=64, **sizes)
    transformers.BertModel(config).save_pretrained(folder)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\((?!http)([^)#]+)", document.read_text()):
        assert (document.parent / target).exists(), target


def test_every_command_in_the_documents_exists():
    from typer.main import get_command

    from lln.cli import app

    known = get_command(app).commands
    for document in DOCUMENTS:
        for verb in re.findall(r"(?:^|`)lln ([a-z]+)\b", document.read_text(), re.MULTILINE):
            assert verb in known, f"{document.name}: lln {verb}"


def test_one_version():
    with (ROOT / "pyproject.toml").open("rb") as file:
        version = tomllib.load(file)["project"]["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == version
    newest = re.search(r"^## (\S+) \((\S+)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest.groups() == (version, str(citation["date-released"]))


def test_citation_names_the_paper():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["preferred-citation"]["title"] == "Linear Log-Normal Attention with Unbiased Concentration"


def test_every_module_imports_and_has_a_docstring():
    for path in sorted((ROOT / "src/lln").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
        if name.startswith("lln.backends.triton.") and importlib.util.find_spec("triton") is None:
            assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), name
        else:
            assert importlib.import_module(name).__doc__, name


def test_no_file_of_code_has_more_than_400_lines():
    files = [x for folder in ("src", "tests") for x in (ROOT / folder).rglob("*.*") if x.suffix in CODE]
    assert len(files) > 100
    assert [str(x) for x in files if len(x.read_text(encoding="utf-8").splitlines()) > 400] == []


def test_make_lists_its_targets():
    listed = subprocess.run(["make", "-C", str(ROOT)], capture_output=True, text=True, check=True).stdout
    for target in ("demo", "test", "lint", "bench", "docs", "wheel", "clean"):
        assert re.search(rf"^{target}\s+\S", listed, re.MULTILINE), listed
