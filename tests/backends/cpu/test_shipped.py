"""Libraries that came with a wheel: which one is taken, and what happens where it is damaged or does not load."""

import hashlib
import platform
import re
import shutil
import subprocess

import pytest

from lln.backends.cpu import build, build_problem
from lln.backends.cpu.flavours import FLAVOURS

pytestmark = pytest.mark.skipif(build_problem() is not None, reason="no C compiler")


@pytest.fixture
def shipped(tmp_path, monkeypatch, compiled):
    """A library beside the package, undamaged; `load` starts without a library."""
    library = tmp_path / f"fused-{build.choose_flavour()}-{hashlib.sha256(compiled).hexdigest()}.so"
    library.write_bytes(compiled)
    monkeypatch.setattr(build, "shipped_library", lambda flavour: library if flavour in library.name else None)
    monkeypatch.setattr(build, "load", build.load.__wrapped__)
    return library


def replace(library, content):
    """Other contents, with the sum of them in the name."""
    library.write_bytes(content)
    return library.rename(library.with_name(f"fused-portable-{hashlib.sha256(content).hexdigest()}.so"))


def test_it_is_loaded_and_nothing_is_built(shipped, folder, compiler):
    assert build.load()._name == str(shipped)
    assert not compiler.read_text()


@pytest.mark.parametrize("size", [0, 150_000])
def test_a_damaged_one_is_not_loaded_but_built_with_a_warning(shipped, folder, size):
    shipped.write_bytes(shipped.read_bytes()[:size])
    reason = f"{shipped} is damaged: install lln-attention again; until then the fused code is built here"
    with pytest.warns(UserWarning, match=re.escape(reason)):
        assert str(folder) in build.load()._name


def test_without_a_compiler_the_reason_names_the_damage(shipped, monkeypatch):
    shipped.write_bytes(b"")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(build.BuildError, match="is damaged: install lln-attention again; no C compiler found"):
        build.load()


def test_one_of_another_c_library_is_replaced_without_a_warning(shipped, folder, monkeypatch):
    other = replace(shipped, b"for another system")
    monkeypatch.setattr(build, "shipped_library", lambda flavour: other)
    assert str(folder) in build.load()._name
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC")
    with pytest.raises(build.BuildError, match=r"the built library does not load: .*; no C compiler found"):
        build.load()


# What gcc and clang define for an instruction set, and what Linux calls it. All x86-64 have what is missing here.
MACROS = {
    "__SSSE3__": "ssse3",
    "__SSE4_1__": "sse4_1",
    "__SSE4_2__": "sse4_2",
    "__POPCNT__": "popcnt",
    "__LAHF_SAHF__": "lahf_lm",
    "__GCC_HAVE_SYNC_COMPARE_AND_SWAP_16": "cx16",
    "__LZCNT__": "abm",
    "__BMI__": "bmi1",
    **{f"__{name.upper()}__": name for name in ("avx", "avx2", "bmi2", "f16c", "fma", "movbe")},
    **{f"__AVX512{name.upper()}__": f"avx512{name}" for name in ("f", "bw", "cd", "dq", "vl")},
}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="is about x86-64")
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_flavour_needs_all_that_its_compiler_may_use(flavour):
    flags, needs = FLAVOURS[flavour]
    compiler = next(filter(None, map(shutil.which, ("gcc", "clang"))), None)
    if compiler is None:
        pytest.skip("neither gcc nor clang")
    command = [compiler, *flags, "-dM", "-E", "-x", "c", "/dev/null"]
    defined = set(re.findall(r"#define (\w+)", subprocess.run(command, capture_output=True, text=True).stdout))
    assert "__x86_64__" in defined
    assert needs == {flag for macro, flag in MACROS.items() if macro in defined}
    extensions = {
        name for name in defined if re.fullmatch(r"__(AVX\w*|BMI2?|FMA4?|F16C|LZCNT|MOVBE|XOP|ADX|AES)__", name)
    }
    assert extensions <= set(MACROS)


def test_a_cpu_that_lacks_one_of_them_gets_the_next_flavour(monkeypatch):
    for flavour, following in zip(FLAVOURS, [*FLAVOURS][1:], strict=False):
        needs = FLAVOURS[flavour][1]
        monkeypatch.setattr(build, "cpu_flags", lambda needs=needs: needs)
        assert build.choose_flavour() == flavour
        for missing in needs - FLAVOURS[following][1]:
            monkeypatch.setattr(build, "cpu_flags", lambda flags=needs - {missing}: flags)
            assert build.choose_flavour() == following
