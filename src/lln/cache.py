"""Where things that take long to make are kept for the next time: built kernels, tokenizers, prepared data."""

import errno
import os
import stat
import sys
from pathlib import Path

MAX_LINKS = 40  # symbolic links on one path, the limit of Linux


def cache_folder() -> Path:
    """The environment variable LLN_CACHE, else lln in the user's cache folder. It may not exist yet."""
    chosen = os.environ.get("LLN_CACHE")
    users = "~/Library/Caches" if sys.platform == "darwin" else os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(chosen).expanduser() if chosen else Path(users).expanduser() / "lln"
    except RuntimeError as error:  # no HOME and no entry for the user, or ~name of an unknown user
        raise ValueError(f"cannot expand {chosen or users} ({error}): set LLN_CACHE to an absolute path") from error


def trusted_folder(folder: Path) -> Path:
    """The folder with its symbolic links followed, created with mode 0700 (as are missing parents) if it is new.

    Code may be loaded from the folder: no user other than the current one and root can change or replace what is in it.
    Each step of the path is checked before the next one is taken, so what was checked cannot be replaced afterwards.

    Raises:
        PermissionError: The folder, one above it, or a symbolic link on the path belongs to another user, or others can
            write to it. Folders above it may be open to all if they are sticky, as /tmp is.
        OSError: The folder cannot be created or read.
    """
    folder = folder.absolute()
    current, ahead, links = Path(folder.anchor), [*reversed(folder.parts[1:])], 0
    while ahead:
        _require_trusted(current, folder)
        name = ahead.pop()
        step = current.parent if name == ".." else current / name
        try:
            mode = step.lstat().st_mode
        except FileNotFoundError:
            step.mkdir(mode=0o700, exist_ok=True)  # another process may be creating it too
            mode = step.lstat().st_mode
        if stat.S_ISLNK(mode):
            links += 1
            if links > MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
            _require_trusted(step, folder)
            target = current / step.readlink()
            current, ahead = Path(target.anchor), [*ahead, *reversed(target.parts[1:])]
        elif stat.S_ISDIR(mode):
            current = step
        else:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(step))
    if reason := untrusted_reason(current):
        raise PermissionError(reason)
    return current


def _require_trusted(step: Path, folder: Path) -> None:
    if reason := untrusted_reason(step, is_parent=True):
        raise PermissionError(f"{reason}, on the path to {folder}")


def untrusted_reason(path: Path, *, is_parent: bool = False) -> str | None:
    """How a user other than the current one and root can change the file or folder at `path`; None if nobody can.

    For a parent it is enough that others can neither replace nor rename the entries of the current user and of root.
    """
    if not hasattr(os, "geteuid"):  # Windows: no owners and modes of this kind
        return None
    info = path.lstat()
    owners = {0, os.geteuid()}
    if is_parent:
        # Root where user 0 does not exist: in a container with a user namespace, system folders belong to "nobody".
        owners.add(os.stat("/").st_uid)
    if info.st_uid not in owners:
        return f"{path} belongs to another user (user ID {info.st_uid})"
    mode = stat.S_IMODE(info.st_mode)
    if stat.S_ISLNK(info.st_mode) or (is_parent and mode & stat.S_ISVTX):
        return None
    if mode & stat.S_IWOTH or (mode & stat.S_IWGRP and not _is_own_group(path, info.st_gid)):
        return f"other users can write to {path} (mode {mode:04o})"
    return None


def _is_own_group(path: Path, group_id: int) -> bool:
    """Whether the group of a file has the current user as its only member.

    Many systems give each user such a group and set the umask to 002, so that all folders can be written by the group.
    """
    import grp
    import pwd

    if group_id == 0:  # in some containers all users are in group 0
        return False
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(group_id)
        attributes = os.listxattr(path) if hasattr(os, "listxattr") else []
    except (KeyError, OSError):
        return False
    if "system.posix_acl_access" in attributes:  # the bits of the group then stand for further users and groups as well
        return False
    return user.pw_gid == group_id and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
