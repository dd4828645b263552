"""`lln bench spine`."""

import sys
from pathlib import Path

import pytest

import lln
from lln.bench import spine

ROOT = Path(__file__).parents[1]


def test_every_comparison_gives_its_row(monkeypatch):
    monkeypatch.setattr(spine, "HEADS", 2)
    monkeypatch.setattr(spine, "HEAD_DIM", 8)
    parts = ("call", "before", "forms", "window", "prefill")
    rows = list(spine.compare_spine(parts, (16,), before=ROOT, seconds=0.001))
    assert len(rows) == spine.number_of_rows(parts, (16,), before=True, model=False)
    assert all(row["ratio"] > 0 and ("goal" in row or "goal_milliseconds" in row) for row in rows)
    assert {row["part"] for row in rows} == set(parts)


def test_an_earlier_checkout_stands_beside_this_one():
    other = spine.load_checkout(ROOT)
    assert other is not lln
    assert other.lln_attention is not lln.lln_attention
    assert sys.modules["lln"] is lln


def test_what_cannot_be_compared_is_refused(tmp_path):
    with pytest.raises(ValueError, match="parts must be some of call, before"):
        list(spine.compare_spine(("calls",)))
    with pytest.raises(ValueError, match="is no checkout of this library"):
        spine.load_checkout(tmp_path)
