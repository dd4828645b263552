"""The model of `lln bench distributed`: it counts what is sent, and finds the coefficients that made its input."""

from pathlib import Path

import pytest

pytest.importorskip("scipy")

from lln.bench.distributed import is_measured, jobs
from lln.report.distributed import EXCHANGES, PREDICTED_PROCESSES, distributed_tables, fit, predict, traffic
from lln.results import read_results

RECORD = Path(__file__).parents[2] / "results/distributed.jsonl"


def test_predicted_bytes_are_those_that_were_sent():
    result = read_results(RECORD, made_by="lln bench distributed")["distributed"]
    rows = [row for row in result.rows if row.get("processes", 1) > 1]
    assert {row["processes"] for row in rows} == {2, 4}
    for row in rows:
        numbers = traffic(row["tokens"], row["processes"], row["heads"], result.settings["head_dim"])["lln"][2]
        assert 4 * numbers == row["sent_bytes"]
    assert [len(table.columns) for table in distributed_tables(result)] == [10, 12]


def test_a_million_tokens_are_measured_with_and_without_blocks():
    todo = jobs(networks=False, million=True, heads=4, head_dim=64)[3:]
    assert [(size, x["attention"], x["tokens"]) for _, size, x in todo] == [
        (size, attention, (2**20,)) for attention in ("lln", "lln_diag") for size in (1, 4)
    ]
    row = {"network": "machine", "processes": 4, "heads": 1, "tokens": 2**20, "attention": "lln_diag"}
    assert [is_measured(row, *x) for x in todo] == [False, False, False, True]


def test_the_fit_finds_what_made_the_times():
    a, b, c, d = 2e-6, 3e-5, 2.5, 1.05
    rows = []
    for size in (1, 2, 4):
        for megabits, delay in ((None, 0.0), (1000, 0.2), (100, 5.0)):
            for tokens in (10_000, 50_000):
                sent = 0 if size == 1 else 1e5 * size
                wire = 0 if megabits is None or size == 1 else d * sent
                seconds = a * tokens / min(size, 2)
                if size > 1:
                    seconds += b * EXCHANGES * (size - 1) + c * EXCHANGES * delay / 1e3
                    seconds += wire * 8 / (megabits * 1e6) if megabits else 0.0
                place = {"processes": size, "tokens": tokens, "megabits": megabits, "delay": delay}
                rows.append(place | {"seconds": seconds, "sent_bytes": sent, "wire_bytes": wire})
    rows.append({"softmax_seconds": 1.0, "tokens": 1000})
    found = fit(rows, processors=2)
    assert list(found.values()) == pytest.approx([a, b, c, d, 0.0, 1e-6], rel=1e-6, abs=1e-9)
    for row in predict(found, heads=16, width=64):
        assert row["processes"] in PREDICTED_PROCESSES
        assert (row["ulysses_bytes"] is None) == (row["processes"] > 16)
        assert row["lln_bytes"] < row["ring_bytes"]
