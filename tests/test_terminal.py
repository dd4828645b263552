"""Terminal output: names and options are text, not markup; progress is for terminals alone."""

import json
import os
import subprocess
import sys

import pytest

import lln.terminal
from lln.report.table import Table
from lln.tasks.display import Display
from lln.terminal import Progress, print_table


def test_a_bar_shows_the_label_as_it_is(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setenv("COLUMNS", "200")
    display = Display("listops-lln:a=[/x]", 4, 0, quiet=False)
    display.line({"step": 2, "loss": 1.5, "tokens_per_second": 3.0})
    display.print("Continuing a[/x]:key:" + "/long" * 60)
    display.close()
    shown = capsys.readouterr().err
    assert "listops-lln:a=[/x]" in shown
    assert "Continuing a[/x]:key:" + "/long" * 60 in shown


def test_a_table_in_a_pipe_is_not_folded(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(lln.terminal, "console", lln.terminal.plain_console())
    cells = [f"{number}.25" for number in range(100, 125)]
    print_table(Table("title", ["layer", *map(str, range(24))], [cells]))
    assert any(all(cell in line for cell in cells) for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize("quiet", [False, True])
def test_where_there_is_no_terminal_progress_is_silent_and_results_are_printed(capsys, quiet):
    with Progress("tokenising", 3, quiet=quiet) as bar:
        bar.advance()
        bar.update(3, "almost")
    display = Display("mlm lln", 4, 0, quiet=quiet)
    display.line({"step": 2, "loss": 1.5, "tokens_per_second": 3.0})
    display.evaluating(0.5)
    display.line({"step": 4, "eval_loss": 1.25, "eval_seconds": 3.0})
    display.close()
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == ("" if quiet else "mlm lln step 4: validation loss 1.2500\n")


def test_a_table_is_printed_as_it_is_or_as_json(capsys):
    table = Table("[/t]", ["[/c]", "d"], [["[red]r", ":key:"]], ["[/n]"])
    print_table(table)
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("[/t]", "[/c]", "[red]r", ":key:", "[/n]"))
    print_table(table, as_json=True)
    assert json.loads(capsys.readouterr().out) == {
        "title": "[/t]",
        "columns": ["[/c]", "d"],
        "rows": [["[red]r", ":key:"]],
        "notes": ["[/n]"],
    }


def lln_process(*arguments, **environment):
    script = "import sys; sys.argv[0] = 'lln'; from lln.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_other_libraries_show_no_bars_where_there_is_no_terminal(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 16}
    transformers.BertModel(transformers.BertConfig(vocab_size=300, **sizes)).save_pretrained(tmp_path)
    (tmp_path / "text").write_text("a text of some bytes")
    done = lln_process("inspect", str(tmp_path), "--text", str(tmp_path / "text"))
    assert done.returncode == 0, done.stderr
    assert "it/s" not in done.stderr
    assert "entropy" in done.stdout


def test_completion_lists_the_verbs():
    done = lln_process(_LLN_COMPLETE="complete_bash", COMP_WORDS="lln li", COMP_CWORD="1")
    assert done.stdout.split() == ["linearize"]
    done = lln_process("--help")
    assert "--install-completion" in done.stdout
    assert "--show-completion" in done.stdout
