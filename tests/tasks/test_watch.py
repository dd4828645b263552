"""What is shown of a run: names and options are text, not markup."""

from lln.tasks.watch import Display


def test_a_bar_shows_the_label_as_it_is(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setenv("COLUMNS", "200")
    display = Display("listops-lln:a=[/x]", 4, 0, quiet=False)
    display.line({"step": 2, "loss": 1.5, "tokens_per_second": 3.0})
    display.say("Continuing a[/x]:key:" + "/long" * 60)
    display.close()
    shown = capsys.readouterr().err
    assert "listops-lln:a=[/x]" in shown
    assert "Continuing a[/x]:key:" + "/long" * 60 in shown
