"""Folders, caches and text files: everything that is wrong is named by file and line."""

import gzip
import hashlib

import pytest

from lln.tasks.data import folder
from lln.tasks.data.lines import read_jsonl, read_lines, read_table


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LLN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LLN_DATA", raising=False)


def test_the_data_folder_is_the_given_one_or_that_of_the_environment(tmp_path, monkeypatch):
    assert folder.data_dir() is None
    monkeypatch.setenv("LLN_DATA", str(tmp_path))
    assert folder.data_dir() == tmp_path
    (tmp_path / "other").mkdir()
    assert folder.data_dir(tmp_path / "other") == tmp_path / "other"
    with pytest.raises(ValueError, match="--data-dir must name a folder"):
        folder.data_dir(tmp_path / "nowhere")
    monkeypatch.setenv("LLN_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="LLN_DATA must name a folder"):
        folder.data_dir()


def test_the_cache_folder_is_chosen_and_made(tmp_path, monkeypatch):
    assert folder.cache_dir() == tmp_path / "cache"
    assert folder.cache_dir().is_dir()
    monkeypatch.delenv("LLN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert folder.cache_dir() == tmp_path / "xdg" / "lln"
    (tmp_path / "file").touch()
    monkeypatch.setenv("LLN_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(ValueError, match="set LLN_CACHE"):
        folder.cache_dir()


def test_require_names_what_is_missing(tmp_path):
    assert folder.require(tmp_path, "a folder") == tmp_path
    with pytest.raises(ValueError, match=r"train\.txt is missing: expected WikiText"):
        folder.require(tmp_path / "train.txt", "WikiText")


def test_digests_distinguish_lists():
    assert folder.digest(["ab"]) != folder.digest(["a", "b"])
    assert folder.digest(["a", "b"]) == folder.digest([b"a", b"b"])


def test_the_share_of_hashed_keys_is_even():
    shares = [folder.hashed_share(str(i)) for i in range(4000)]
    assert sum(share < 0.25 for share in shares) == pytest.approx(1000, abs=80)


def test_a_cached_file_is_made_once_and_again_when_damaged():
    calls = []

    def make(path):
        calls.append(path)
        path.write_text("precious")

    path = folder.cached_file("thing.txt", make)
    assert folder.cached_file("thing.txt", make) == path
    assert len(calls) == 1
    for damage in (lambda: path.write_text("precioux"), lambda: path.with_name("thing.txt.sha256").unlink()):
        damage()
        with pytest.warns(UserWarning, match="making it again"):
            folder.cached_file("thing.txt", make)
        assert path.read_text() == "precious"
    assert len(calls) == 3
    assert sorted(file.name for file in path.parent.iterdir()) == ["thing.txt", "thing.txt.sha256"]
    sum_line = f"{hashlib.sha256(b'precious').hexdigest()}  thing.txt\n"  # as sha256sum --check reads it
    assert path.with_name("thing.txt.sha256").read_text() == sum_line


def test_an_interrupted_cached_file_leaves_nothing_behind():
    def stop(path):
        path.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        folder.cached_file("thing.txt", stop)
    assert not list(folder.cache_dir().iterdir())

    def full(path):
        raise OSError(28, "No space left on device")

    with pytest.raises(ValueError, match=r"thing\.txt.*No space left.*LLN_CACHE"):
        folder.cached_file("thing.txt", full)


def test_lines_lose_byte_order_mark_and_windows_ends(tmp_path):
    raw = "\ufefffirst\r\n\r\nthird \ufeff\nlast".encode()
    (tmp_path / "a.txt").write_bytes(raw)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(raw))
    expected = [(1, "first"), (2, ""), (3, "third \ufeff"), (4, "last")]
    assert list(read_lines(tmp_path / "a.txt")) == expected
    assert list(read_lines(tmp_path / "a.txt.gz")) == expected


def test_broken_text_files_are_named_with_the_line(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("good\nbad \xe4\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"a\.txt, line 2: expected UTF-8"):
        list(read_lines(path))
    packed = gzip.compress(b"".join(b"%d line\n" % i for i in range(20000)))
    cut = tmp_path / "cut.gz"
    for raw in (packed[: len(packed) // 2], packed[:-12] + b"\0" * 12, b"no gzip"):
        cut.write_bytes(raw)
        with pytest.raises(ValueError, match=r"cut\.gz, after line \d+: damaged or truncated gzip"):
            list(read_lines(cut))
    with pytest.raises(ValueError, match=r"none\.txt is missing"):
        list(read_lines(tmp_path / "none.txt"))
    with pytest.raises(ValueError, match="is a folder"):
        list(read_lines(tmp_path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', "not JSON"),
        ('["a"]', "a JSON list"),
        ('{"label": 1}', "no 'text' in \\['label'\\]; expected an object with text \\(text\\), label"),
        ('{"text": 3, "label": 1}', "'text' is a int; expected text"),
        ('{"text": "a", "label": true}', "'label' is a bool; expected a whole number or text"),
        ('{"text": "\\ud800", "label": 1}', "'text' holds half a surrogate pair"),
    ],
)
def test_broken_json_lines_are_named(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "", "label": "x"}\n\n' + line + "\n")
    with pytest.raises(ValueError, match=r"a\.jsonl, line 3: " + message):
        list(read_jsonl(path, {"text": str, "label": (int, str)}))


def test_tables_are_read_by_the_names_of_their_columns(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_bytes(b'\xef\xbb\xbfsentence\tlabel\r\na "quoted\t1\r\n\t0\r\n')
    rows = [(2, {"sentence": 'a "quoted', "label": "1"}), (3, {"sentence": "", "label": "0"})]
    assert list(read_table(path, ["label", "sentence"])) == rows
    for text, message in (
        ("text\tlabel\n", "line 1: no column 'sentence'"),
        ("sentence\tlabel\na\t1\nb\n", "line 3: 1 cells; expected 2"),
        ("", "is empty"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            list(read_table(path, ["sentence"]))
