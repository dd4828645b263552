"""The page of speed: goals, table 2, and what is made of the result files."""

from lln.bench import attention, model
from lln.paper import speed, table2
from lln.report import goals
from lln.results import Result, write_results


def attention_result(rows, run="attention-float32"):
    settings = {"heads": 12, "head_dim": 64, "dtype": "float32", "causal": False, "origins": {}}
    origin = {"command": "lln bench", "commit": "abc", "torch": "2", "kernel": {}, "noise": [], "threads": 2}
    return Result(run, origin | {"machine": {"processor": "P", "cores": 2}}, settings, tables={"rows": rows})


def ideal_rows(lln_slower=1.0):
    """Times and memory that meet every goal, unless LLN is slower."""
    times = {"softmax": lambda n: n * n, "paper": lambda n: 40 * n, "floor": lambda n: 8 * n, "lln": lambda n: 10 * n}
    times |= {"lln_diag": lambda n: 20 * n, "lln_torch": lambda n: 20 * n}
    return [
        {
            "pass": pass_,
            "tokens": n,
            "mechanism": name,
            "milliseconds": time(n) * (lln_slower if name == "lln" else 1.0),
            "quartiles": [time(n), time(n)],
            "peak_bytes": 4 * n,
            "extra_bytes": n,
        }
        for pass_ in attention.PASSES
        for n in attention.LENGTHS
        for name, time in times.items()
    ]


def test_goals_are_met_missed_or_not_measured():
    def verdicts(rows):
        return {o.goal.text: o.verdict for o in goals.check(goals.ATTENTION_GOALS, attention_result(rows))}

    met = verdicts(ideal_rows())
    assert set(met.values()) == {"met"}
    text = "LLN forward is at least 3x as fast as softmax (SDPA) at 256 tokens"
    assert text in met
    slower = verdicts(ideal_rows(lln_slower=10.0))
    assert slower[text] == "missed"
    assert (
        slower["LLN+Diag forward takes at most 2.1x the time of LLN at every length from 128 to 16,384 tokens"] == "met"
    )
    assert set(verdicts([]).values()) == {"not measured"}
    one_missing = verdicts([row for row in ideal_rows() if (row["tokens"], row["mechanism"]) != (512, "paper")])
    assert list(one_missing.values()).count("not measured") == 3


def model_result():
    rows = [
        {"tokens": 512, "mechanism": name, "seconds": 4.0, "quartiles": [4, 4], "repeats": 1, "peak_bytes": 3e9}
        for name in model.MECHANISMS
    ]
    rows.append({"tokens": 8192, "mechanism": "eager", "skipped": "would take 99 GiB", "predicted_seconds": 1234.0})
    return attention_result(rows, "model")


def test_table_2_has_the_published_numbers_beside_ours(tmp_path):
    text = "\n".join(table.markdown() for table in table2.parts(model_result()))
    assert "| LLN | here | 4 |  |" in text
    assert "| LLN | published | 1 | 6.1 |" in text
    assert "| LLN+Diag | published | 4.1 | 13.4 |" in text
    assert "| softmax, explicit matrix | here | 4 | ~1,234 |" in text
    assert "| softmax, explicit matrix | published | 0.95 | OOM |" in text
    assert "left out at 8,192 tokens: would take 99 GiB" in text
    png, *_ = table2.draw(model_result(), tmp_path)
    assert png.read_bytes()[1:4] == b"PNG"


def test_the_page_is_made_from_the_results(tmp_path):
    assert "Nothing has been measured yet" in speed.make(tmp_path)
    write_results(tmp_path / "attention.jsonl", [attention_result(ideal_rows())])
    write_results(tmp_path / "table2.jsonl", [model_result()])
    made = speed.make(tmp_path)
    for words in ("times as fast as softmax (SDPA)", "Table 2", "commit abc"):
        assert words in made
    assert "| met |" in speed.goals(tmp_path)
