"""Results record where they come from, and only what is true."""

import subprocess
from pathlib import Path

import lln
from lln import provenance


def test_a_result_carries_machine_versions_commit_and_seed():
    record = provenance.provenance(seed=3, command="lln demo")
    assert record["seed"] == 3
    assert record["command"] == "lln demo"
    assert record["machine"]["processor"]
    assert record["torch"]


def test_commit_is_only_that_of_our_own_checkout(monkeypatch):
    package = Path(lln.__file__).resolve().parent

    def git_says(top, changes=""):
        def run(command, **options):
            stdout = changes if "status" in command else f"{top}\nabc1234\n"
            return subprocess.CompletedProcess(command, 0, stdout=stdout)

        monkeypatch.setattr(subprocess, "run", run)

    ours = package.parents[1]
    git_says(ours)
    assert provenance.commit() == ("abc1234" if package.parent.name == "src" else None)
    git_says(ours, changes=" M src/lln/nn.py")
    assert provenance.commit() == ("abc1234+" if package.parent.name == "src" else None)
    git_says("/somebody/else")
    assert provenance.commit() is None

    def no_git(*args, **options):
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", no_git)
    assert provenance.commit() is None


def test_commit_records_whether_the_code_was_changed(tmp_path, monkeypatch):
    module, result = tmp_path / "src" / "lln" / "provenance.py", tmp_path / "results" / "speed.json"
    for path in (module, result):
        path.parent.mkdir(parents=True)
        path.touch()
    who = ["-c", "user.name=lln", "-c", "user.email=lln@localhost"]
    for arguments in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "All"]):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True)
    monkeypatch.setattr(provenance, "__file__", str(module))
    clean = provenance.commit()
    assert clean
    assert not clean.endswith("+")
    result.write_text("{}")
    assert provenance.commit() == clean
    (module.parent / "new.py").touch()
    assert provenance.commit() == f"{clean}+"
