"""Figures 6 and 7 state what they show, whatever the number of tokens."""

import pytest

pytest.importorskip("matplotlib")

from lln.paper import figure6, figure7
from lln.report.plot import Setup


def test_figure_6_does_not_depend_on_tokens() -> None:
    few, many = (list(figure6.measure(Setup("figure6", 8, tokens, 0, None))) for tokens in (8, 1024))
    assert few == many


def test_figure_7_does_not_claim_an_exact_variance() -> None:
    setup = Setup("figure7", 8, 16, 0, None)
    figure = figure7.draw(setup, list(figure7.measure(setup)))
    assert "about 1" in figure.get_suptitle()
