"""The cache of the fused code: what is loaded from it, and what happens where it is damaged, refused or cannot be used.

A script takes the place of the compiler, see the fixtures.
"""

import hashlib
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lln import cache
from lln.backends.cpu import build, build_problem

pytestmark = [
    pytest.mark.skipif(build_problem() is not None, reason="no C compiler"),
    pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs owners and modes of POSIX"),
]

OTHER = 54321  # the ID of a user and of a group
is_root = hasattr(os, "geteuid") and os.geteuid() == 0
needs_root = pytest.mark.skipif(not is_root, reason="only root can give files to another user")


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def runs(compiler):
    return len(compiler.read_text().splitlines())


def assert_private(library, folder):
    """Built outside of the cache, where no other user can reach it."""
    assert folder not in library.parents
    assert (mode(library), mode(library.parent)) == (0o600, 0o700)
    build.open_library(library)


def user(code=""):
    """What a user gets in a new process: the output, with warnings."""
    script = f"""
import warnings, torch, lln
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    x = torch.ones(1, 1, 9, 8)
    assert torch.allclose(lln.lln_attention(x, x, x), x)
    print(lln.backends.explain(x, x, x))
print(*(f"warning: {{x.message}}" for x in caught), sep="\\n")
{code}
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("cpu: yes")
    return done.stdout


def test_what_is_built_is_private_whatever_the_umask_and_is_built_once(folder, compiler):
    before = os.umask(0)
    try:
        library = build.build("portable")
        assert build.build("portable") == library
    finally:
        os.umask(before)
    assert compiler.read_text() == "700\n"
    assert library.parent == folder / "kernels"
    assert [mode(x) for x in (folder.parent, folder, library.parent, library)] == [0o700, 0o700, 0o700, 0o600]
    assert hashlib.sha256(library.read_bytes()).hexdigest() in library.name
    assert list(library.parent.iterdir()) == [library]
    assert not list(Path(os.environ["TMPDIR"]).iterdir())


DAMAGE = {
    "half": lambda raw: raw[: len(raw) // 2],
    "empty": lambda raw: b"",
    "a-bit": lambda raw: raw[:5000] + bytes([raw[5000] ^ 1]) + raw[5001:],
    "longer": lambda raw: raw + b"\0",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_library_is_rebuilt_with_one_warning(folder, compiler, compiled, damage):
    library = build.build("portable")
    library.write_bytes(damage(compiled))
    with pytest.warns(UserWarning, match=re.escape(f"{library} is damaged: the fused code was rebuilt")):
        assert build.build("portable") == library
    assert library.read_bytes() == compiled
    assert build.build("portable") == library  # without a warning, which would be an error
    assert runs(compiler) == 2


def test_a_damaged_library_does_not_crash_attention(folder):
    library = build.build(build.choose_flavour())
    os.truncate(library, library.stat().st_size // 2)
    assert "is damaged" in user()
    assert build.build(build.choose_flavour()) == library  # without a warning, which would be an error


def test_where_warnings_are_errors_the_library_is_repaired_all_the_same(folder):
    library = build.build("portable")
    library.write_bytes(b"")
    with pytest.raises(UserWarning, match="is damaged"):
        build.build("portable")
    assert build.build("portable") == library


def test_only_a_regular_file_is_loaded(folder, tmp_path):
    library = build.build("portable")
    library.rename(tmp_path / "elsewhere.so")
    library.symlink_to(tmp_path / "elsewhere.so")
    with pytest.warns(UserWarning, match="is not a regular file: the fused code was rebuilt"):
        assert build.build("portable") == library
    assert not library.is_symlink()


def test_a_library_that_others_can_write_is_rebuilt(folder, compiler):
    library = build.build("portable")
    library.chmod(0o666)
    with pytest.warns(UserWarning, match=re.escape(f"other users can write to {library} (mode 0666)")):
        assert build.build("portable") == library
    assert (mode(library), runs(compiler)) == (0o600, 2)


@needs_root
def test_a_library_of_another_user_is_rebuilt(folder, compiler):
    library = build.build("portable")
    os.chown(library, OTHER, OTHER)
    with pytest.warns(UserWarning, match=re.escape(f"{library} belongs to another user (user ID {OTHER})")):
        assert build.build("portable") == library
    assert (library.stat().st_uid, runs(compiler)) == (0, 2)


@pytest.mark.parametrize("where", [".", "kernels", ".."], ids=["cache", "kernels", "above"])
@pytest.mark.parametrize("filled", [True, False], ids=["filled", "new"])
def test_a_cache_that_others_can_write_is_refused(folder, filled, where):
    (folder / "kernels").mkdir(parents=True)
    if filled:
        build.build("portable")
    before = sorted((folder / "kernels").iterdir())
    open_folder = (folder / where).resolve()
    open_folder.chmod(0o777)
    reason = re.escape(f"other users can write to {open_folder} (mode 0777)") + ".*set LLN_CACHE to a folder"
    with pytest.warns(UserWarning, match=reason) as caught:
        library = build.build("portable")
    assert len(caught) == 1
    assert str(folder / "kernels") in str(caught[0].message)
    assert_private(library, folder)
    assert sorted((folder / "kernels").iterdir()) == before


@needs_root
@pytest.mark.parametrize("where", [".", "kernels", ".."], ids=["cache", "kernels", "above"])
def test_a_cache_of_another_user_is_refused(folder, where):
    build.build("portable")
    foreign = (folder / where).resolve()
    os.chown(foreign, OTHER, OTHER)
    with pytest.warns(UserWarning, match=re.escape(f"{foreign} belongs to another user (user ID {OTHER})")):
        assert_private(build.build("portable"), folder)


def test_nothing_is_created_below_a_folder_that_others_can_write(folder):
    folder.parent.mkdir()
    folder.parent.chmod(0o777)
    with pytest.warns(UserWarning, match="other users can write"):
        build.build("portable")
    assert not folder.exists()


def test_a_sticky_folder_may_be_above_the_cache_but_not_be_it(folder):
    folder.mkdir(parents=True)
    folder.chmod(0o1777)
    library = build.build("portable")
    assert library.parent == folder / "kernels"
    (folder / "kernels").chmod(0o1777)
    with pytest.warns(UserWarning, match=r"other users can write to .*kernels \(mode 1777\)"):
        assert_private(build.build("portable"), folder)


def test_links_are_followed_to_a_folder_that_is_checked(folder, tmp_path, compiler):
    folder.parent.mkdir()
    (tmp_path / "up").mkdir()
    folder.symlink_to("../up/../scratch")  # which does not exist
    library = build.build("portable")
    assert library.parent == tmp_path / "scratch" / "kernels"
    assert build.build("portable") == library
    assert runs(compiler) == 1
    (tmp_path / "scratch").chmod(0o777)
    with pytest.warns(UserWarning, match=r"other users can write to .*scratch \(mode 0777\), on the path to .*kernels"):
        assert_private(build.build("portable"), folder)


@needs_root
def test_a_link_of_another_user_is_refused(folder, tmp_path):
    folder.parent.mkdir()
    (tmp_path / "scratch").mkdir()
    folder.symlink_to(tmp_path / "scratch")
    os.chown(folder, OTHER, OTHER, follow_symlinks=False)
    with pytest.warns(UserWarning, match=re.escape(f"{folder} belongs to another user")):
        assert_private(build.build("portable"), folder)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("file", "Not a directory.*file"),
        ("file/below", "Not a directory.*file"),
        ("loop", "Too many levels of symbolic links.*loop"),
        ("~no such user/cache", "~no such user/cache .*set LLN_CACHE"),
    ],
    ids=["file", "below-a-file", "loop", "no-user"],
)
def test_where_there_can_be_no_cache_the_code_runs_with_a_warning(folder, tmp_path, monkeypatch, name, reason):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop/loop")
    monkeypatch.setenv("LLN_CACHE", name if name.startswith("~") else str(tmp_path / name))
    with pytest.warns(UserWarning, match=reason):
        assert_private(build.build("portable"), folder)


@pytest.mark.parametrize("call", ["tempfile.mkstemp", "os.fsync", "os.replace"])
def test_a_full_or_read_only_cache_is_read_but_not_needed(folder, monkeypatch, call):
    def fail(*arguments, **options):
        raise OSError(28, "No space left on device")

    library = build.build("portable")
    with monkeypatch.context() as patch:
        patch.setattr(call, fail)
        assert build.build("portable") == library
        library.unlink()
        with pytest.warns(UserWarning, match="the kernel cache is not used, because .*No space left on device"):
            assert_private(build.build("portable"), folder)
    assert not list(library.parent.iterdir())


def test_a_damaged_library_in_a_read_only_cache_is_not_loaded(folder, monkeypatch):
    library = build.build("portable")
    library.write_bytes(b"")

    def fail(*arguments, **options):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.mkstemp", fail)
    with pytest.warns(UserWarning, match=r"is damaged; .*Read-only file system") as caught:
        assert_private(build.build("portable"), folder)
    assert len(caught) == 1


@pytest.mark.skipif(not is_root, reason="only root can become another user")
def test_a_cache_of_root_serves_other_users(folder, monkeypatch):
    library = build.build("portable")
    monkeypatch.setattr("os.geteuid", lambda: OTHER)
    assert build.build("portable") == library
    os.chown(library, OTHER + 1, -1)
    with pytest.warns(UserWarning, match="belongs to another user"):
        build.build("portable")


def test_contents_reach_the_disk_before_the_name_and_the_name_before_it_is_used(folder, monkeypatch):
    calls = []
    sync, replace = os.fsync, os.replace

    def fsync(descriptor):
        calls.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        sync(descriptor)

    monkeypatch.setattr("os.fsync", fsync)
    monkeypatch.setattr("os.replace", lambda *names: (calls.append("rename"), replace(*names)))
    build.build("portable")
    assert calls == ["file", "rename", "folder"]


def test_a_compiler_that_does_not_repeat_itself_and_a_stopped_process_do_no_harm(folder, tmp_path, compiler, compiled):
    first = build.build("portable")
    first.rename(tmp_path / "first.so")
    (first.parent / ".fused-draft").write_bytes(compiled[:1000])  # of a process that was stopped
    (tmp_path / "made.so").write_bytes(compiled + b"\0")
    second = build.build("portable")
    assert second.name != first.name
    (tmp_path / "first.so").rename(first)  # as if another process had built at the same time
    for damaged, other in ((first, second), (second, first)):
        content = damaged.read_bytes()
        damaged.write_bytes(b"")
        assert build.build("portable") == other
        damaged.write_bytes(content)
    first.write_bytes(b"")
    second.write_bytes(b"")
    with pytest.warns(UserWarning, match="is damaged; .* is damaged: the fused code was rebuilt"):
        assert build.build("portable") == second
    assert not first.exists()
    assert runs(compiler) == 3


def test_an_old_library_without_a_sum_is_not_loaded(folder, compiler):
    library = build.build("portable")
    old = library.with_name(library.stem.rpartition("-")[0] + ".so")
    library.rename(old)
    assert build.build("portable") == library
    assert runs(compiler) == 2


def test_without_owners_and_modes_the_contents_are_still_checked(folder, monkeypatch):
    monkeypatch.delattr("os.geteuid")
    library = build.build("portable")
    assert build.build("portable") == library
    library.write_bytes(b"")
    with pytest.warns(UserWarning, match="is damaged"):
        assert build.build("portable") == library


def test_a_group_counts_as_others_unless_the_user_is_alone_in_it(tmp_path, monkeypatch):
    group = os.getgid() or OTHER
    folder = tmp_path / "kernels"
    folder.mkdir()
    os.chown(folder, -1, group)
    folder.chmod(0o775)
    me = SimpleNamespace(pw_name="me", pw_gid=group)
    monkeypatch.setattr("pwd.getpwuid", lambda user_id: me)
    for name, members, attributes, trusted in (
        ("me", [], [], True),
        ("me", ["me"], ["user.comment"], True),
        ("me", ["me", "you"], [], False),
        ("staff", [], [], False),
        ("me", [], ["system.posix_acl_access"], False),
    ):
        entry = SimpleNamespace(gr_name=name, gr_mem=members)
        monkeypatch.setattr("grp.getgrgid", lambda group_id, entry=entry: entry)
        monkeypatch.setattr("os.listxattr", lambda path, found=attributes: found, raising=False)
        assert (cache.untrusted_reason(folder) is None) == trusted
    me.pw_gid = group + 1
    assert "other users can write" in cache.untrusted_reason(folder)


def test_the_temporary_folder_lasts_until_its_process_ends(folder):
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    place = Path(os.environ["TMPDIR"])
    # Neither a forked child nor a worker that inherits the library removes it; a worker that builds removes its own.
    out = user("""
import glob, multiprocessing, os, sys, tempfile
from lln.backends.cpu import build
def count():
    return len(glob.glob(tempfile.gettempdir() + "/lln-kernels-*/fused.so"))
def work(build_again):
    if build_again:
        warnings.simplefilter("ignore")
        build.build(build.choose_flavour())
        assert count() == 2
    assert torch.allclose(lln.lln_attention(x, x, x), x)
assert count() == 1
child = os.fork()
if child == 0:
    work(False)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
for build_again in (False, True):
    worker = multiprocessing.get_context("fork").Process(target=work, args=(build_again,))
    worker.start()
    worker.join()
    assert (worker.exitcode, count()) == (0, 1)
""")
    assert out.count("warning") == 1
    assert "other users can write" in out
    assert not list(place.iterdir())
