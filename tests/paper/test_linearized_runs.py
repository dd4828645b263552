import json

import pytest
from typer.testing import CliRunner

from lln.cli import app
from lln.linearize.config import LinearizeConfig
from lln.paper.linearized_runs import MODELS, RUNS, STEPS, command


@pytest.fixture
def models(tmp_path):
    for name in MODELS:
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "config.json").write_text(json.dumps({"model_type": "bert"}))
    return tmp_path / "models"


def test_all_methods_of_a_model_have_the_same_budget(models, tmp_path):
    for run in RUNS:
        words = command(run, models, tmp_path / "out", tmp_path)
        assert words[:2] == ["linearize", str(models / run.task)]
        steps = [int(words[words.index(f"--{stage}-steps") + 1]) for stage in STEPS[run.task]]
        assert sum(steps) == sum(STEPS[run.task].values())
        assert ("--steps" in words) == (not run.is_trained)
    budgets = STEPS["minilm"], MODELS["minilm"]
    defaults = LinearizeConfig()  # what `lln linearize` does by itself is what is recorded
    assert budgets[0] == defaults.stage_steps()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--model must name a folder"),
        (["--model", "{models}"], "give --data-dir"),
        (["--model", "{models}", "--data-dir", "{models}", "--seed", "1"], "has no seed 1; there are: 0"),
        (["--model", "{models}", "--data-dir", "{models}", "--method", "tnn"], "has no method tnn; there are: lln, "),
        (
            ["--model", "{models}", "--data-dir", "{models}", "--task", "gpt"],
            "has no task gpt; there are: minilm, stories15m, smollm2",
        ),
    ],
)
def test_what_is_missing_is_reported_before_anything_runs(models, tmp_path, monkeypatch, arguments, message):
    monkeypatch.delenv("LLN_DATA", raising=False)
    given = [x.format(models=models) for x in arguments]
    places = ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    found = CliRunner().invoke(app, ["reproduce", "linearized", *given, *places])
    assert found.exit_code != 0
    assert message in str(found.exception) + found.output
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("model", "align"), [("minilm", 1), ("other", STEPS["minilm"]["align"])])
def test_a_folder_of_another_model_or_with_other_steps_is_refused(models, tmp_path, model, align):
    folder = tmp_path / "runs" / "linearized" / "minilm-lln_diag"
    (folder / "work").mkdir(parents=True)
    (folder / "work" / "summary.json").write_text("{}")
    steps = {f"{stage}_steps": count for stage, count in (STEPS["minilm"] | {"align": align}).items()}
    (folder / "report.json").write_text(json.dumps({"origin": {"model": f"/models/{model}"}, "settings": steps}))
    places = ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results"), "--data-dir", str(models)]
    given = ["--model", str(models), "--task", "minilm", "--method", "lln_diag"]
    found = CliRunner().invoke(app, ["reproduce", "linearized", *given, *places])
    assert found.exit_code != 0
    assert "was made from another model or with other steps" in str(found.exception) + found.output
