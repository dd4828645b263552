"""The command as its user meets it: good input, bad input, and an interrupt."""

import errno
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import lln.demo
import lln.instruments.inspect
import lln.matching.calibration
import lln.paper
import lln.report.plot
import lln.report.table
from lln import cli
from lln.cli import docs
from lln.results import read_results

ROOT = Path(__file__).parents[1]
DOCS, RESULTS = ROOT / "docs", ROOT / "results"


def run(*arguments):
    return CliRunner().invoke(cli.app, list(arguments))


@pytest.fixture
def small_demo(monkeypatch, tmp_path, new_cache):
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"{i} is followed by {i + 1}, " * 9}) + "\n" for i in range(200)))
    small = {"source": str(text), "vocab_size": 300, "steps": 4, "eval_every": 2, "save_every": 4, "record_every": 2}
    small |= {"layers": 1, "width": 16, "heads": 1, "feedforward": 16, "length": 32}
    monkeypatch.setattr(lln.demo, "SETTINGS", lln.demo.SETTINGS | small)
    monkeypatch.setattr(lln.demo, "TEMPERATURES", (1.0, 0.5))
    monkeypatch.setattr(lln.demo, "TOKENS", 32)
    monkeypatch.setattr(lln.demo, "LENGTHS", (512,))


def test_demo_writes_tables_and_pictures(small_demo, tmp_path):
    done = run("demo", "--out", str(tmp_path / "new"))
    assert done.exit_code == 0, done.output
    results = read_results(tmp_path / "new/demo.jsonl", made_by="lln demo")
    concentration = results["concentration"]
    assert {row["attention"] for row in concentration.rows} == {"softmax", "unmatched", "variance", "entropy"}
    assert {"commit", "machine", "seed", "command"} <= concentration.origin.keys()
    cost = results["cost"]
    assert {row["mechanism"] for row in cost.rows} == {"softmax", "lln", "lln_diag"}
    assert all(row["peak_bytes"] > 0 and row["milliseconds"] > 0 for row in cost.rows)
    for part in ("concentration", "cost", "training"):
        assert (tmp_path / f"new/{part}.png").read_bytes()[1:4] == b"PNG"
    assert "LLN unmatched" in done.output
    assert "speed-up" in done.output
    assert "tokens/s" in done.output
    for attention in ("softmax", "lln_diag"):
        assert (tmp_path / f"new/training/{attention}/summary.json").is_file()


def test_demo_shows_that_matching_matches(small_demo):
    rows = {(row["temperature"], row["attention"]): row for row in lln.demo.concentration_rows(0)}
    for temperature in (1.0, 0.5):
        softmax, unmatched, variance, entropy = (
            rows[temperature, name] for name in ("softmax", "unmatched", "variance", "entropy")
        )
        assert variance["log_variance"] == pytest.approx(softmax["log_variance"], rel=0.25)
        assert unmatched["log_variance"] < 0.2 * softmax["log_variance"]
        for column in ("entropy_bits", "spectral_gap"):
            distance = abs(entropy[column] - softmax[column])
            assert distance < abs(unmatched[column] - softmax[column])


@pytest.mark.skipif(os.name != "posix", reason="sends an interrupt")
def test_an_interrupted_demo_keeps_what_was_finished(tmp_path):
    small = "import lln.cli, lln.demo as demo; demo.TEMPERATURES, demo.TOKENS = (1.0, 0.5), 32; lln.cli.main()"
    command = [sys.executable, "-c", small, "demo", "--out", str(tmp_path)]
    # A job in the background of a shell ignores interrupts, and so would the processes that it starts.
    options = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    deadline = time.time() + 120
    while not (tmp_path / "concentration.png").exists() and time.time() < deadline:
        time.sleep(0.2)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert read_results(tmp_path / "demo.jsonl", made_by="lln demo")["concentration"].rows
    assert (tmp_path / "concentration.png").exists()


def test_an_interrupt_inside_a_part_writes_the_rows_so_far(small_demo, tmp_path):
    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lln.demo.measure("concentration", tmp_path, seed=0, on_row=stop)
    assert len(read_results(tmp_path / "demo.jsonl", made_by="lln demo")["concentration"].rows) == 1


def test_calibrate_explains(monkeypatch):
    monkeypatch.setattr(lln.matching.calibration, "DRAWS", 1)
    monkeypatch.setattr(lln.matching.calibration, "FIT_ENDS", (19.0,))
    monkeypatch.setattr(lln.matching.calibration, "ERROR_HEAD_DIMS", (8,))
    monkeypatch.setattr(lln.matching.calibration, "ERROR_VARIANCES", (1.0,))
    monkeypatch.setattr(lln.matching.calibration, "ERROR_DRAWS", 1)
    done = run("calibrate", "--explain-only")
    assert done.exit_code == 0, done.output
    for text in ("0.14855", "-0.35487", "published", "variance", "entropy", "linear"):
        assert text in done.output


def test_calibrate_reports_whether_the_table_is_the_shipped_one(monkeypatch, tmp_path):
    for name, value in (("FIT_ENDS", ()), ("ERROR_HEAD_DIMS", ())):
        monkeypatch.setattr(lln.matching.calibration, name, value)
    from lln.matching.curves import TABLE, TABLE_PATH

    monkeypatch.setattr(lln.matching.calibration, "calibrate", lambda on_step: TABLE)
    done = run("calibrate", "--out", str(tmp_path / "curves.json"))
    assert "identical" in done.output
    assert (tmp_path / "curves.json").read_text() == TABLE_PATH.read_text()
    monkeypatch.setattr(lln.matching.calibration, "calibrate", lambda on_step: TABLE | {"seed": 1})
    assert "not the shipped one" in " ".join(run("calibrate").output.split())


def test_zoo():
    assert "transnormer_t1" in run("zoo").output
    assert "Toeplitz" in run("zoo", "tnn").output
    assert "block_size: int = 64" in run("zoo", "lln_diag").output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["zoo", "nothing"], "no mechanism is called 'nothing'"),
        (["bench", "attention", "--lengths", "1,x"], "positive numbers separated by commas"),
        (["bench", "attention", "--lengths", "0"], "positive numbers separated by commas"),
        (["bench", "attention", "--dtype", "int8"], "dtype must be one of float32, bfloat16"),
        (["show", "figure99"], "there is no 'figure99'"),
        (["show", "figure2", "--tokens", "1"], "tokens must be an int from 16"),
    ],
    ids=str,
)
def test_mistakes_are_messages_not_tracebacks(arguments, text):
    done = run(*arguments)
    assert done.exit_code == 2
    output = " ".join((done.stdout + done.stderr).replace("│", " ").split())
    assert text in output
    assert "Traceback" not in output


def test_a_mistake_ends_the_process_with_a_message():
    done = subprocess.run([sys.executable, "-m", "lln.cli", "zoo", "nothing"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "no mechanism is called 'nothing'" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


# What rich would read as markup, as an emoji code and as a style, in a text too long for a line.
FOREIGN = "a[/x]/:key:/[red]b[hf]" + "/long" * 40


def fail(error):
    def verb(*args, **kwargs):
        raise error

    return verb


@pytest.mark.parametrize(
    "error",
    [
        ImportError(f"pip install 'lln-attention[hf]' {FOREIGN}"),
        ValueError(FOREIGN),
        FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), FOREIGN),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_are_printed_as_they_are(monkeypatch, error):
    monkeypatch.setattr(lln.instruments.inspect, "read_text", fail(error))
    done = run("inspect", "roberta", "--text", "text.txt")
    assert done.exit_code == 2
    assert done.stderr == f"Error: {error}\n"
    assert not done.stdout


def test_paths_and_cells_are_printed_as_they_are(monkeypatch, tmp_path):
    monkeypatch.setattr(lln.paper, "figure", lambda *args, **kwargs: (Path(FOREIGN),))
    assert run("show", "figure2").stdout == f"{FOREIGN}\n"
    made = lln.report.table.Table("[/t] title", ["[/c]", "accuracy [%]"], [["[red]r[/]", ":key:"]], ["[/n]"])
    monkeypatch.setattr(lln.paper, "table", lambda *args, **kwargs: (made, Path(FOREIGN)))
    shown = run("show", "table3").stdout
    for text in ("[/t] title", "[/c]", "accuracy [%]", "[red]r[/]", ":key:", "[/n]", f"\n{FOREIGN}\n"):
        assert text in shown
    assert "no mechanism is called '[/x]'" in run("zoo", "[/x]").stderr


def test_version_and_json(tmp_path):
    assert run("--version").stdout.startswith("lln-attention ")
    tables = [json.loads(line) for line in run("zoo", "--json").stdout.splitlines()]
    assert tables[0]["columns"] == ["name", "time", "causal", "padding", "cross", "random", "learned"]
    assert "tnn" in [row[0] for row in tables[0]["rows"]]
    shown = run("show", "table3", "--json", "--results", str(RESULTS), "--out", str(tmp_path)).stdout
    (table,) = [json.loads(line) for line in shown.splitlines()]
    assert table["title"] == "Table 3: ViT on Dogs vs Cats"


def verbs(command, name=()):
    """Every verb with its name; groups have others below them."""
    below = getattr(command, "commands", None)
    return {name: command} if below is None else {k: v for x in below for k, v in verbs(below[x], (*name, x)).items()}


def test_every_verb_that_prints_tables_takes_json():
    found = verbs(typer.main.get_command(cli.app))
    sources = {name: inspect.getsource(inspect.unwrap(verb.callback)) for name, verb in found.items()}
    printing = {name for name, source in sources.items() if re.search(r"print_tables?\(|finish\(", source)}
    assert {("show",), ("zoo",), ("bench", "growth")} <= printing
    assert [name for name in printing if "json" not in {x.name for x in found[name].params}] == []


def test_every_verb_with_a_mechanism_takes_its_options():
    for name, verb in verbs(typer.main.get_command(cli.app)).items():
        flags = {flag for x in verb.params for flag in x.opts}
        if flags & {"--attention", "--mechanisms"}:
            assert "--option" in flags, name


def copied_docs(folder):
    """The pages that are made from results, without pictures."""
    (folder / "docs").mkdir()
    for page in docs.PAGES:
        (folder / "docs" / page).write_text((DOCS / page).read_text())
    return folder / "docs"


def test_no_page_of_the_documentation_is_stale(tmp_path):
    done = run("docs", str(DOCS), "--results", str(RESULTS), "--check")
    assert done.exit_code == 0, done.output
    copy = copied_docs(tmp_path)
    for page in docs.PAGES:
        changed = re.sub(r"(: begin -->\n)", r"\1 stale\n", (copy / page).read_text(), count=1)
        (copy / page).write_text(changed)
    (copy / "images").mkdir()
    (copy / docs.DRAWN).write_text(re.sub("(?m)^(headline|decode),.*$", r"\1,other", (DOCS / docs.DRAWN).read_text()))
    stale = run("docs", str(copy), "--results", str(RESULTS), "--check")
    assert stale.exit_code == 2
    assert "stale: " in stale.stderr
    for name in ("speed.md", "README.md", "drawn.csv"):
        assert name in stale.stderr
    count = len(docs.PAGES) + 1
    assert f"{count} files, {count} of them changed" in run("docs", str(copy), "--results", str(RESULTS)).stdout
    assert (copy / docs.DRAWN).read_text() == (DOCS / docs.DRAWN).read_text()
    assert {path.name for path in (copy / "images").glob("*.png")} == {"headline.png", "decode.png"}
    assert run("docs", str(copy), "--results", str(RESULTS), "--check").exit_code == 0


def test_pictures_of_the_documentation_are_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(lln.report.plot, "DPI", 30)  # fewer pixels take less time
    monkeypatch.setattr(lln.paper, "NAMES", ("figure1", "table2"))  # tests/paper draws the other figures
    copy = copied_docs(tmp_path)
    for page in docs.PAGES:
        (copy / page).write_text("<!-- zoo: begin -->\n<!-- zoo: end -->\n")
    done = run("docs", str(copy), "--results", str(RESULTS), "--pictures")
    assert done.exit_code == 0, done.output
    drawn = {path.name for path in (copy / "images").iterdir()}
    assert drawn <= {path.name for path in (DOCS / "images").iterdir()}
    assert {"headline.png", "figure1.png", "attention-float32.png", "decode.png", "table2.png"} <= drawn


def test_an_interrupt_is_no_traceback(monkeypatch):
    monkeypatch.setattr(lln.instruments.inspect, "read_text", fail(KeyboardInterrupt()))
    done = run("inspect", "roberta", "--text", "text.txt")
    assert done.exit_code == 130
    assert done.stderr == "\nInterrupted; what was finished is written.\n"


def test_output_that_nobody_reads_is_no_error(monkeypatch):
    monkeypatch.setattr(lln.instruments.inspect, "read_text", fail(BrokenPipeError(errno.EPIPE, "Broken pipe")))
    done = run("inspect", "roberta", "--text", "text.txt")
    assert (done.exit_code, done.output) == (1, "")


@pytest.mark.parametrize(
    "verb",
    [
        ["train", "mlm", "--out", "out", "--attention", "lln_diag", "--option", "{}"],
        ["train", "vision", "--out", "out", "--attention", "lln_diag", "--option", "{}"],
        ["train", "lra", "--out", "out", "--attention", "lln_diag", "--option", "{}"],
    ],
    ids=["mlm", "vision", "lra"],
)
@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("blok=3", "lln_diag has no option blok; its options are: block_size: int = 64; "),
        ("block_size=abc", "the option block_size of lln_diag cannot be 'abc'; expected block_size: int = 64"),
        ("block_size={[]}", "the option block_size of lln_diag cannot be '{[]}'"),
        ("combine=[/x]", "the option combine of lln_diag cannot be '[/x]'; expected combine: Literal['average', "),
        ("block_size=0", "block_size must be at least 1, got 0"),
        ("share=2", "share must be between 0 and 1, got 2"),
        ("block_size", "takes name=value, as block_size=64; got 'block_size'"),
    ],
    ids=["unknown", "text", "set", "choice", "zero", "too much", "no value"],
)
def test_options_are_refused_before_a_folder_is_made(monkeypatch, tmp_path, verb, option, text):
    monkeypatch.chdir(tmp_path)
    # The preset of the others has it.
    more = ["--option", "combine=ratio"] if verb[1] == "lra" and option == "share=2" else []
    done = run(*verb[:-1], verb[-1].replace("{}", option), *more)
    assert done.exit_code == 2, done.output
    assert text in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--source", "nowhere[/x].txt"], "unknown text source 'nowhere[/x].txt'"),
        (["--source", "empty.txt"], "source 'empty.txt' has no train documents"),
        (["--tokenizer", "nowhere"], "unknown tokenizer 'nowhere'"),
        (["--data-dir", "nowhere"], "--data-dir must name a folder with data, and nowhere is none"),
        (["--source", "wikipedia", "--data-dir", "."], "wikipedia is missing"),
        (["--preset", "phone"], "there is no preset 'phone'"),
        (["--attention", "magic"], "no mechanism is called 'magic'"),
        (["--heads", "3"], "a width of 16 does not divide into 3 heads"),
        (["--heads", "0"], "heads must be at least 1, got 0"),
        (["--dropout", "3"], "dropout probability has to be between 0 and 1"),
    ],
    ids=str,
)
def test_a_failed_start_leaves_nothing(monkeypatch, tmp_path, arguments, text):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LLN_DATA", raising=False)
    Path("empty.txt").touch()
    rows = (json.dumps({"text": f"{i} is followed by {i + 1}, " * 9}) + "\n" for i in range(200))
    Path("text.jsonl").write_text("".join(rows))
    Path("mine").mkdir()
    small = ["--source", "text.jsonl", "--vocab-size", "300", "--length", "32", "--layers", "1", "--width", "16"]
    small += ["--heads", "1", "--feedforward", "16", "--steps", "1"]
    for out in ("new/run", "mine"):
        done = run("train", "mlm", *small, *arguments, "--out", out)
        assert done.exit_code == 2, done.output
        assert text in done.stderr
    assert {path.name for path in tmp_path.iterdir()} - {"cache"} == {"empty.txt", "text.jsonl", "mine"}
    assert not list(Path("mine").iterdir())


@pytest.mark.parametrize("out", ["file", "file/run"])
def test_an_output_that_cannot_be_written(monkeypatch, tmp_path, out):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    for verb in (
        ["train", "mlm", "--source", "stdlib"],
        ["train", "lra", "--attention", "lln"],
        ["show", "figure2"],
    ):
        done = run(*verb, "--out", out)
        assert done.exit_code == 2, done.output
        assert "Traceback" not in done.output
        assert "file" in done.stderr
    for verb in (["bench", "attention"], ["bench", "lra", "--tasks", "text"], ["calibrate"]):
        done = run(*verb, "--out", "file/record.jsonl")
        assert "file/record.jsonl cannot be written" in done.stderr
        assert "--out must be a file, and . is a folder" in run(*verb, "--out", ".").stderr
