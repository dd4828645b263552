"""The model of `lln bench distributed`: it counts what is sent, and finds the coefficients that made its input."""

from pathlib import Path

import pytest

pytest.importorskip("scipy")

from lln.bench.distributed import is_measured, jobs
from lln.distributed import statistics
from lln.report.distributed import EXCHANGES, FEW, PREDICTED_PROCESSES, distributed_tables, fit, predict, traffic
from lln.results import Result, read_results

RECORD = Path(__file__).parents[2] / "results/distributed.jsonl"


def test_predicted_bytes_are_those_that_were_sent():
    result = read_results(RECORD, made_by="lln bench distributed")["distributed"]
    rows = [row for row in result.rows if row.get("processes", 1) > 1]
    assert {row["processes"] for row in rows} == {2, 4}
    for row in rows:
        numbers = traffic(row["tokens"], row["processes"], row["heads"], result.settings["head_dim"])["lln"][2]
        assert 4 * numbers == row["sent_bytes"]
    columns = [table.columns for table in distributed_tables(result)]
    is_quiet = all(x["quiet"] for x in result.origin["noise"])
    assert ("ms" in columns[0]) == is_quiet
    assert len(columns[1]) in ((5, 12) if is_quiet else (5,))


def test_a_million_tokens_are_measured_with_and_without_blocks():
    todo = jobs(networks=False, million=True, heads=4, head_dim=64)[3:]
    assert [(size, x["attention"], x["tokens"]) for _, size, x in todo] == [
        (size, attention, (2**20,)) for attention in ("lln", "lln_diag") for size in (1, 4)
    ]
    row = {"network": "machine", "processes": 4, "heads": 1, "tokens": 2**20, "attention": "lln_diag"}
    assert [is_measured(row, *x) for x in todo] == [False, False, False, True]


def rows_of(a, b, c, d, e, *, slowed=1.0):
    """What a machine with two processors would measure, one of the times `slowed`."""
    rows = []
    for size in (1, 2, 4):
        for megabits, delay in ((None, 0.0), (1000, 0.2), (100, 5.0)):
            for tokens in (10_000, 50_000):
                sent = 0 if size == 1 else 1e5 * size
                wire = 0 if megabits is None or size == 1 else d * sent
                cpu = a * tokens / (size if size > 1 else 3) + b * EXCHANGES * (size - 1)  # one process has other code
                seconds = cpu * max(1, size / 2) + c * EXCHANGES * (delay if size > 1 else 0.0) / 1e3
                seconds += wire * 8 / (megabits * 1e6) if megabits else 0.0
                seconds += e * EXCHANGES * max(1, size / 2) if size > 1 else 0.0
                place = {"network": str(megabits), "processes": size, "tokens": tokens, "heads": 4}
                place |= {"megabits": megabits, "delay": delay, "messages": 0, "peak_bytes": 0}
                rows.append(place | {"seconds": seconds, "cpu_seconds": cpu, "sent_bytes": sent, "wire_bytes": wire})
    rows[-1]["seconds"] *= slowed
    return [*rows, {"softmax_seconds": 1.0, "tokens": 1000, "megabits": None}]


def test_the_fit_finds_what_made_the_times():
    a, b, c, d, e = 2e-6, 3e-5, 2.5, 1.05, 4e-4
    found = fit(rows_of(a, b, c, d, e), processors=2)
    assert list(found.values()) == pytest.approx([a, b, c, d, e, 0.0, 1e-6], rel=1e-6, abs=1e-9)
    predicted = list(predict(found, heads=16, width=64))
    for row in predicted:
        assert row["processes"] in PREDICTED_PROCESSES
        assert (row["ulysses_bytes"] is None) == (row["processes"] > 16)
        assert row["lln_bytes"] < row["ring_bytes"]
    # A longer input takes longer, and bytes of LLN stay.
    places = {(row["network"], row["processes"], row["tokens"]): row for row in predicted}
    for (network, size, tokens), row in places.items():
        longer = places.get((network, size, 10 * tokens))
        if longer is not None:
            assert longer["lln_bytes"] == row["lln_bytes"]
            for name in ("lln", "ring", "ulysses"):
                assert row[f"{name}_seconds"] is None or row[f"{name}_seconds"] < longer[f"{name}_seconds"]


def test_times_are_not_predicted_from_a_bad_fit():
    origin, settings = {"machine": {"cores": 2}}, {"heads": 4, "head_dim": 64}
    good, bad = (
        Result("distributed", origin, settings, tables={"rows": rows_of(2e-6, 3e-5, 2.5, 1.05, 4e-4, slowed=x)})
        for x in (1.1, 2.0)
    )
    assert any("s in all" in column for column in distributed_tables(good)[1].columns)
    table = distributed_tables(bad)[1]
    assert table.columns == ("tokens", "processes", "lln, MB", "ring, MB", "ulysses, MB")
    assert "times are not predicted" in table.notes[0]


@pytest.mark.parametrize("heads", [2, 4, 12])
def test_predicted_traffic_is_below_what_is_promised(heads):
    for size in PREDICTED_PROCESSES:
        assert traffic(1_000_000, size, heads, 64)["lln"][2] <= 4 * heads * (64 * 64 + 64 * 64 + 3 * 64)
    assert FEW == statistics.FEW


def test_windows_exceed_it_from_six_processes_on():
    """As in docs/distributed.md: the halo of windows of 64 stays, what is shared by all approaches its limit."""
    heads = 12
    limit, halo = 4 * heads * (64 * 64 + 64 * 64 + 3 * 64), 2 * 63 * heads * 2 * 64
    shares = {size: (traffic(1_000_000, size, heads, 64)["lln"][2] + halo) / limit for size in (2, 5, 6, 8, 16, 1024)}
    assert shares[2] < shares[5] <= 1 < shares[6]
    assert [round(shares[size], 2) for size in (8, 16, 1024)] == [1.03, 1.07, 1.15]
