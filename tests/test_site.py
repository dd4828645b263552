"""The documentation site and the workflows, as files; `make docs` builds the site."""

import importlib
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
WORKFLOWS = ROOT / ".github/workflows"
OPTION = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)


def site() -> dict:
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def pages(nav) -> list[str]:
    found = []
    for entry in nav:
        for target in entry.values():
            found += [target] if isinstance(target, str) else pages(target)
    return found


def test_every_page_is_in_the_navigation():
    listed = pages(site()["nav"])
    assert len(set(listed)) == len(listed)
    assert set(listed) == {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}


def test_nothing_is_fetched_when_a_page_is_read():
    settings = site()
    assert settings["theme"]["font"] is False
    assert not [name for name in settings.get("extra_javascript", []) if "//" in name]
    assert "//" not in (DOCS / "site.css").read_text().replace("*/", "")
    for path in DOCS.rglob("*.md"):
        assert not re.search(r"!\[[^]]*\]\(http|<(?:img|script)[^>]+http", path.read_text(encoding="utf-8")), path


@pytest.mark.parametrize("page", sorted((DOCS / "api").glob("*.md")), ids=lambda path: path.stem)
def test_the_api_has_every_public_name(page):
    pytest.importorskip("accelerate")
    module = importlib.import_module("lln" if page.stem == "lln" else f"lln.{page.stem}")
    documented = {}
    for path in OPTION.findall(page.read_text(encoding="utf-8")):
        owner, _, name = path.rpartition(".")
        documented[name] = getattr(importlib.import_module(owner), name)
        assert documented[name].__doc__, path
    if page.stem == "reference":
        return
    assert set(documented) == set(module.__all__) - {"reference"}
    for name, value in documented.items():
        assert getattr(module, name) is value, name


def test_speed_is_a_summary_and_goals_are_for_developers():
    text = (DOCS / "speed.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 100
    assert text.count("![") >= 3
    assert "speed-tables.md" in text
    for name in ("speed.md", "speed-tables.md", "index.md"):
        assert "| missed |" not in (DOCS / name).read_text(encoding="utf-8")
    assert "| missed |" in (DOCS / "developers.md").read_text(encoding="utf-8")


def test_no_table_predicts_that_a_longer_input_takes_less_time():
    tables = re.findall(r"^\| tokens \|.*?\n\n", (DOCS / "speed-tables.md").read_text(), re.MULTILINE | re.DOTALL)
    tables += re.findall(r"^\| attention \|.*?\n\n", (DOCS / "speed-tables.md").read_text(), re.MULTILINE | re.DOTALL)
    predicted = 0
    for table in tables:
        for line in table.splitlines()[2:]:
            cells = [re.sub(r" ±.*", "", cell).replace(",", "") for cell in line.strip("| ").split(" | ")[1:]]
            values = [float(cell.lstrip("~")) if re.fullmatch(r"~?[\d.]+", cell) else None for cell in cells]
            for place, cell in enumerate(cells):
                if cell.startswith("~"):
                    predicted += 1
                    assert all(x is None or x <= values[place] for x in values[:place]), line
    assert predicted > 5


def test_workflows():
    names = {path.name for path in WORKFLOWS.glob("*.yml")}
    assert names == {"tests.yml", "wheels.yml", "docs.yml"}
    for name in names:
        workflow = yaml.safe_load((WORKFLOWS / name).read_text(encoding="utf-8"))
        assert {"push", "pull_request"} <= set(workflow[True])  # YAML reads `on` as true
        for job in workflow["jobs"].values():
            assert "runs-on" in job
            assert all(("run" in step) != ("uses" in step) for step in job["steps"])
            for step in job["steps"]:
                for target in re.findall(r"\bmake ((?:[a-z-]+ ?)+)", step.get("run", "")):
                    for one in target.split():
                        assert re.search(rf"^{one}:", (ROOT / "Makefile").read_text(), re.MULTILINE), one
    matrix = yaml.safe_load((WORKFLOWS / "tests.yml").read_text())["jobs"]["test"]["strategy"]["matrix"]["include"]
    assert {row["python"] for row in matrix} == {"3.11", "3.12", "3.13", "3.14"}
    assert {row["torch"] for row in matrix} == {"2.6", "newest"}
