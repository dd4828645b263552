"""The page of `lln inspect --html`: in a real browser, and its size."""

import csv
import math
from pathlib import Path

import pytest
import torch
from browser import Browser, missing_reason
from typer.testing import CliRunner

from lln.cli import app
from lln.instruments.details import HeadDetails, head_details, sample_queries
from lln.instruments.inspect import Inspection, inspect_details, inspect_network
from lln.report.heads_page import NUMBERS, heads_page, write_heads_page

transformers = pytest.importorskip("transformers")
TEXT = "The queen asked </script> the gardener why the roses were red & said <b>nothing</b>. " * 3
needs_browser = pytest.mark.skipif(missing_reason() is not None, reason=str(missing_reason()))


def shown(value: str) -> str | None:
    """A number of the CSV as the page shows it: four digits of the six that it holds."""
    return None if value == "" else f"{float(f'{float(value):.6g}'):.4g}"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    (folder / "text.txt").write_text(TEXT)
    arguments = ["inspect", "bert", "--text", str(folder / "text.txt"), "--tokens", "41", "--compare", "gpt2"]
    done = CliRunner().invoke(app, [*arguments, "--out", str(folder), "--html", str(folder / "page.html")])
    assert done.exit_code == 0, done.output
    return folder / "page.html"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory):
    made = Browser(tmp_path_factory.mktemp("profile"), 1300, 900)
    yield made
    made.close()


@pytest.fixture
def opened(browser: Browser, page: Path) -> Browser:
    browser.go(page.as_uri())
    return browser


def numbers(browser: Browser, model: int) -> dict[str, float]:
    found = browser.run(
        "const part = document.querySelector(`[data-model='${arguments[0]}'] dl`);"
        "return [...part.querySelectorAll('dt')].map((one) => [one.textContent, one.nextSibling.textContent])",
        model,
    )
    return {title: float(value) for title, value in found}


@needs_browser
def test_a_click_shows_the_numbers_of_the_table(opened: Browser, page: Path) -> None:
    for model, stem in enumerate(("inspect", "compare")):
        with (page.parent / f"{stem}.csv").open() as file:
            rows = list(csv.DictReader(file))
        cells = opened.run(
            "return [...document.querySelectorAll('td')].map((one) => [one.dataset.at, one.textContent])"
        )
        texts: dict[str, list[str]] = {}
        for at, text in cells:
            texts.setdefault(at, []).append(text)
        for number, row in enumerate(rows):
            layer, head = divmod(number, 4)
            columns = ("temperature", "entropy", "gap", "bias", "ks_distance")
            assert texts[f"{model},{layer},{head}"] == [f"{float(row[x]):.2f}" if row[x] else "-" for x in columns]
        for layer, head in ((0, 0), (2, 1), (3, 3)):
            opened.click(f"[data-at='{model},{layer},{head}']")
            assert opened.run("return document.getElementById('chosen').textContent") == f"Layer {layer}, head {head}"
            row = rows[4 * layer + head]
            expected = {title: shown(row[name]) for name, title in NUMBERS.items() if row[name] != ""}
            assert numbers(opened, model) == {title: float(value or "nan") for title, value in expected.items()}
    assert opened.messages() == []


@needs_browser
def test_keyboard(opened: Browser) -> None:
    assert opened.run("return document.querySelectorAll('td[tabindex=\"0\"]').length") == 10  # one in each grid
    opened.press("Tab")
    focus = "return document.activeElement.dataset.at || document.activeElement.id"
    assert opened.run(focus) == "0,0,0"
    opened.press("ArrowDown")
    opened.press("ArrowRight")
    assert opened.run(focus) == "0,1,1"
    assert opened.run("return document.getElementById('chosen').textContent") == "Layer 1, head 1"
    selected = "return [...document.querySelectorAll('[aria-selected=true]')].map((one) => one.dataset.at)"
    assert sorted(opened.run(selected)) == ["0,1,1"] * 5 + ["1,1,1"] * 5
    opened.press("Enter")
    assert opened.run(focus) == "chosen"
    opened.press("Escape")
    assert opened.run(focus) == "0,1,1"
    assert opened.messages() == []


@needs_browser
def test_another_query_colours_the_text(opened: Browser) -> None:
    part = "[data-model='0'] "
    text = f'return document.querySelector("{part}.text").textContent'
    assert opened.run(text) == TEXT[:41]
    opened.run(
        f"const select = document.querySelector(\"{part}select\"); select.value = '3';"
        "select.dispatchEvent(new Event('change'))"
    )
    queries = "return [...document.querySelectorAll('.text .query')].map((one) => one.title.split(':')[0])"
    assert opened.run(queries) == [str(sample_queries(41, 41, 16)[3])] * 2  # the other model follows
    assert opened.messages() == []


@needs_browser
def test_accessible_names_and_no_network(opened: Browser, page: Path) -> None:
    unnamed = (
        "return [...document.querySelectorAll('[role=grid], [role=img], select, article')]"
        ".filter((one) => !one.getAttribute('aria-label') && !one.labels?.length).length"
    )
    assert opened.run(unnamed) == 0
    assert opened.run("return performance.getEntriesByType('resource').length") == 0
    assert opened.run("return document.documentElement.lang") == "en"
    assert opened.run("return document.querySelectorAll('b').length") == 0  # text of the model is text


# The contrast of an element's text with its background, as WCAG 2 defines it; colours become numbers on a canvas.
CONTRAST = """
const context = Object.assign(document.createElement('canvas'), { width: 1, height: 1 }).getContext('2d');
const luminance = (color) => {
  context.fillStyle = color; context.fillRect(0, 0, 1, 1);
  const [r, g, b] = [...context.getImageData(0, 0, 1, 1).data].map((x) => x / 255)
    .map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const contrast = (one) => {
  const style = getComputedStyle(one), both = [style.color, style.backgroundColor].map(luminance).sort((a, b) => a - b);
  return (both[1] + 0.05) / (both[0] + 0.05);
};
const least = (selector) => Math.min(...Array.from({ length: 101 }, (_, share) => {
  const one = document.querySelector(selector);
  one.style.setProperty('--share', `${share}%`);
  return contrast(one);
}));
return [least('td[style]'), least('.text span')];
"""


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_on_every_colour_of_the_scale(opened: Browser, scheme: str) -> None:
    opened.color_scheme(scheme)
    for least in opened.run(CONTRAST):
        assert least >= 4.5


@needs_browser
def test_dark_and_narrow(page: Path, tmp_path: Path) -> None:
    narrow = Browser(tmp_path / "profile", 500, 800)
    try:
        narrow.go(page.as_uri())
        color = "return getComputedStyle(document.body).backgroundColor"
        light = narrow.run(color)
        assert narrow.run("return document.documentElement.scrollWidth <= innerWidth")
        narrow.click("[data-at='0,2,2']")
        assert narrow.run(
            "const box = document.getElementById('details').getBoundingClientRect(); return box.top < 800"
        )
        narrow.color_scheme("dark")
        assert narrow.run(color) != light
        assert narrow.messages() == []
        (tmp_path / "dark.png").write_bytes(narrow.picture())
    finally:
        narrow.close()


def test_twelve_layers_of_twelve_heads_are_below_3_mb(tmp_path: Path) -> None:
    chance = torch.Generator().manual_seed(0)
    queries = sample_queries(512, 512, 144)
    assert len(queries) == 12
    record = dict.fromkeys(NUMBERS, 1 / 3) | {"tokens": 512, "keys": 512, "note": ""}
    details = HeadDetails(
        weights=torch.rand(12, 512, generator=chance, dtype=torch.float64),
        entropy=torch.rand(128, generator=chance, dtype=torch.float64),
        limit=torch.full((128,), 9.0, dtype=torch.float64),
        histogram=torch.full((50,), 0.02, dtype=torch.float64),
    )
    records = [{"layer": f"layer.{layer}", "head": head} | record for layer in range(12) for head in range(12)]
    model = Inspection("model", records, ["piece "] * 512, queries, [details] * 144)
    assert write_heads_page([model, model], tmp_path / "page.html").stat().st_size < 3e6


def test_details_agree_with_the_records() -> None:
    found = inspect_details("gpt2", TEXT, tokens=41)
    for record, details in zip(found.records, found.details, strict=True):
        assert details is not None
        assert float(details.entropy.mean()) == pytest.approx(record["entropy"], abs=1e-5)
        assert float(details.limit.mean()) == pytest.approx(record["limit"], abs=1e-9)
        assert details.weights.sum(dim=1).tolist() == pytest.approx([1.0] * len(found.queries), abs=1e-5)
        assert not details.weights[0, found.queries[0] + 1 :].any()  # causal
        assert float(details.histogram.sum()) == pytest.approx(1.0, abs=1e-9)
        centres = (torch.arange(50) + 0.5) / 5 - 5
        assert float((details.histogram * centres).sum()) == pytest.approx(0.0, abs=0.1)
    assert "".join(found.pieces) == TEXT[:41]


def test_a_model_in_memory_stays_as_it_was() -> None:
    config = transformers.BertConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48
    )
    network = transformers.BertModel(config).train()
    found = inspect_network(network, {"input_ids": torch.arange(20)[None]}, name="mine")
    assert network.training
    assert [record["layer"][:16] for record in found.records] == ["encoder.layer.0."] * 2 + ["encoder.layer.1."] * 2
    assert "mine" in heads_page([found])


def test_a_dash_is_explained_where_there_is_one() -> None:
    found = inspect_details("bert", TEXT, tokens=10)
    assert "A dash" not in heads_page([found])
    found.records[0]["temperature"] = None
    assert heads_page([found]).count("A dash: not finite, as the temperature of nearly uniform attention") == 1


def test_refusals() -> None:
    bare = inspect_details("bert", TEXT, tokens=10, with_details=False)
    with pytest.raises(ValueError, match="has no details"):
        heads_page([bare])
    with pytest.raises(ValueError, match="one model or two, got 0"):
        heads_page([])


def test_heads_without_finite_values_have_no_details() -> None:
    from lln.instruments.capture import Capture
    from lln.instruments.reading import Options

    query = torch.full((1, 2, 5, 4), math.nan)
    assert head_details(Capture([0, 1], query, query, Options(kind="softmax")), [0]) == [None, None]
