"""The working tree on a node of the job. It receives the archive, keeps it in a directory named by its
content, and runs a command there.

    python -m fleetrun.schedulers.tree_remote has DIGEST               exits with 3 if the tree is missing
    ... | python -m fleetrun.schedulers.tree_remote unpack DIGEST      an archive on stdin
    ... | python -m fleetrun.schedulers.tree_remote unpack64 DIGEST    the same in base64
    python -m fleetrun.schedulers.tree_remote enter DIGEST INSIDE LOGS COMMAND ...
    python -m fleetrun.schedulers.tree_remote start PARTS DIGEST INSIDE LOGS COMMAND ...

A tree has these entries in ~/.cache/fleetrun/code/:

    DIGEST          the directory, renamed from DIGEST.*.new when it is complete
    DIGEST.json     size and time of each of its files; locked (shared) by each job that runs in it
    DIGEST.lock     locked by the process that unpacks
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import IO, Any, NoReturn

from fleetrun.envs.channels import TREE_VARIABLE
from fleetrun.errors import LaunchError
from fleetrun.files import only_ours

NOT_HERE = 3
_KEPT = 8  # trees; older trees are removed if nothing was added to them and no job runs there
_RECENT = 3600.0  # seconds after its last use during which a tree is kept
_ABANDONED = 86_400.0  # seconds after which the unfinished trees of other nodes are removed
_PIECE = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # some network file systems


class TreeError(LaunchError):
    """A tree is missing, or an archive is damaged."""


# ---- Directories


def folder_of_trees() -> Path:
    """Return the directory of trees in the user's cache.

    If the cache is missing or others could change it, return a directory for temporary files.
    """
    try:
        if (cache := _cache()) is not None:
            found = cache / "fleetrun" / "code"
            found.mkdir(mode=0o700, parents=True, exist_ok=True)
            if os.access(found, os.W_OK) and only_ours(found.stat()):
                return found
    except OSError as error:
        if error.errno in _FULL:
            raise
    found = Path(tempfile.gettempdir()) / f"fleetrun-code-{os.getuid()}"
    found.mkdir(mode=0o700, exist_ok=True)
    if not only_ours(found.lstat()):
        raise TreeError(f"{found} belongs to another user, or others can write into it")
    return found


def _cache() -> Path | None:
    """Return the user's cache. None for a user without a home, as in some containers."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    with suppress(RuntimeError):
        cache = cache.expanduser()
    return cache if cache.is_absolute() else None


def is_there(trees: Path, digest: str) -> bool:
    """Return True if the tree exists, and each of its files is as it was sent."""
    try:
        facts = json.loads((trees / f"{digest}.json").read_bytes())
    except (OSError, ValueError):
        return False
    return all(_facts(trees / digest / name) == found for name, found in facts.items())


def _facts(path: Path) -> list[object] | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    if stat.S_ISDIR(found.st_mode):
        return [found.st_mode]
    return [found.st_mode, found.st_size, found.st_mtime_ns]


# ---- Unpacking


def unpack(trees: Path, digest: str, archive: IO[bytes]) -> None:
    """Unpack the archive as the tree of this digest, unless the tree exists. Files that a job has changed are
    replaced, and files that it has added stay.

    Raises TreeError, and OSError if a disk is full.
    """
    with (trees / f"{digest}.lock").open("w") as lock:
        if _locked(lock, fcntl.LOCK_EX):  # another launch may be sending the same tree
            for left in _left_over(trees, digest):
                shutil.rmtree(left, ignore_errors=True)
        if is_there(trees, digest):
            while archive.read(_PIECE):  # the sender waits until its data is read
                pass
        else:
            _unpack(trees, digest, archive)
        os.utime(trees / f"{digest}.json")
    _prune(trees, but=digest)


def _host() -> str:
    return os.uname().nodename


def _left_over(trees: Path, digest: str) -> Iterator[Path]:
    """Yield the directories of killed processes. Directories of other nodes count only if they are old.

    Another node may be unpacking now. On some network file systems (Lustre with localflock), a lock is only
    visible on its own node.
    """
    for path in trees.glob(f"{digest}.*.new"):
        own = path.name.startswith(f"{path.name.partition('.')[0]}.{_host()}-")
        with suppress(OSError):
            if own or time.time() - path.stat().st_mtime > _ABANDONED:
                yield path


def _locked(file: IO[Any] | int, how: int) -> bool:
    """Lock a file.

    Return False if it cannot be locked. Raises BlockingIOError if another process holds the lock.
    """
    try:
        fcntl.flock(file, how)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def _unpack(trees: Path, digest: str, archive: IO[bytes]) -> None:
    there = trees / digest
    new = trees.resolve() / f"{digest}.{_host()}-{os.getpid()}.new"
    text = trees / f"{new.name.removesuffix('.new')}.facts"
    try:
        new.mkdir()
        names = _extract(archive, new, digest)
        text.write_text(json.dumps({name: _facts(new / name) for name in names}))
        try:
            new.rename(there)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            _replace_changed(new, there, names)
        text.rename(trees / f"{digest}.json")  # last, because the tree counts as complete from here on
    finally:
        shutil.rmtree(new, ignore_errors=True)
        text.unlink(missing_ok=True)


def _extract(archive: IO[bytes], folder: Path, digest: str) -> list[str]:
    import gzip  # imported late, because a launch inside a scheduler's job loads this module
    import tarfile
    import zlib

    names = []
    try:
        with gzip.GzipFile(fileobj=archive) as unzipped:
            source: Any = _Hashed(unzipped)
            with tarfile.open(fileobj=source, mode="r|") as tar:
                tar.extraction_filter = lambda member, path: member  # Python 3.11.3 has no own filters
                for member in tar:
                    if not (member.isreg() or member.isdir() or member.issym()):
                        raise TreeError(
                            f"the archive has {member.name!r}, which is no file, directory or link"
                        )
                    names.append(_name_of(member.name))
                    if not (folder / member.name).resolve().is_relative_to(folder.resolve()):
                        raise TreeError(f"the archive has {member.name!r} outside the directory")
                    tar.extract(member, folder)
            while source.read(_PIECE):  # the padding
                pass
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TreeError(f"the archive cannot be unpacked: {error}") from None
    if source.hash.hexdigest() != digest:
        raise TreeError("the content of the archive does not match its digest")
    return names


class _Hashed:
    """An archive whose content goes through the digest as it is read."""

    def __init__(self, file: Any) -> None:
        from hashlib import blake2b

        self._file = file
        self.hash = blake2b(digest_size=16)

    def read(self, size: int) -> bytes:
        piece: bytes = self._file.read(size)
        self.hash.update(piece)
        return piece


def _name_of(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise TreeError(f"the archive has the name {name!r}")
    return name


def _replace_changed(new: Path, there: Path, names: Sequence[str]) -> None:
    """Replace file by file, because a job may run there."""
    for name in names:
        for parent in reversed(PurePosixPath(name).parents[:-1]):  # the job may have put another entry there
            found = there / parent
            if found.is_symlink() or found.is_file():
                found.unlink()
        source, path = new / name, there / name
        if stat.S_ISDIR(source.lstat().st_mode):
            if path.is_symlink() or path.is_file():
                path.unlink()
            path.mkdir(parents=True, exist_ok=True)
        elif _facts(path) != _facts(source):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            source.rename(path)


# ---- Old trees


def _prune(trees: Path, but: str) -> None:
    facts = {}
    for path in trees.glob("*.json"):
        with suppress(OSError):
            facts[path.stem] = path.stat().st_mtime
    last = sorted(facts, key=facts.__getitem__, reverse=True)
    for digest in last[_KEPT:]:
        if digest != but and time.time() - facts[digest] > _RECENT:
            with suppress(OSError, ValueError):
                _remove(trees, digest)
    for path in _left_over(trees, "*"):
        with suppress(OSError), (trees / f"{path.name.partition('.')[0]}.lock").open("w") as lock:
            if _locked(lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
                shutil.rmtree(path)


def _remove(trees: Path, digest: str) -> None:
    """Remove a tree, unless a job runs there or has left files. Raises OSError."""
    with (trees / f"{digest}.json").open("r+b") as used, (trees / f"{digest}.lock").open("w") as lock:
        if not all(_locked(each, fcntl.LOCK_EX | fcntl.LOCK_NB) for each in (used, lock)):
            return
        known = json.load(used)
        if not is_there(trees, digest) or any(name not in known for name in _files(trees / digest)):
            return
        (trees / f"{digest}.json").unlink()
        shutil.rmtree(trees / digest)
        (trees / f"{digest}.lock").unlink(missing_ok=True)


def _files(folder: Path) -> Iterator[str]:
    """Yield all files, except for files that Python compiles."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        links = [name for name in folders if (Path(parent) / name).is_symlink()]
        for name in (*names, *links):
            yield str((Path(parent) / name).relative_to(folder))


# ---- Running in a tree


def use(trees: Path, digest: str, inside: str) -> IO[bytes]:
    """Go to the directory `inside` of a tree. The tree is kept until the returned file is closed.

    Raises TreeError.
    """
    try:
        used = (trees / f"{digest}.json").open("rb")
        _locked(used, fcntl.LOCK_SH)
        os.utime(used.fileno())
        os.chdir(trees / digest / inside)
    except OSError as error:
        raise TreeError(f"the working tree {trees / digest}: {error.strerror}") from None
    os.environ[TREE_VARIABLE] = digest
    return used


def enter(trees: Path, digest: str, inside: str, logs: str, argv: Sequence[str]) -> NoReturn:
    """Become the command, in the directory `inside` of the tree. `logs` is relative to the current directory.

    The tree is kept while the command, or a process that it has started, runs. Raises TreeError, and OSError
    if the command cannot be run.
    """
    logs = str(Path.cwd() / logs)
    used = use(trees, digest, inside)
    os.set_inheritable(used.fileno(), True)
    os.environ["PADDLE_LOG_DIR"] = logs
    os.environ["PWD"] = str(trees / digest / inside)
    if "--watch" in argv:  # the directory will change
        del os.environ["PWD"]
    os.execvp(argv[0], list(argv))


def _joined(parts: Path) -> IO[bytes]:
    """Return the archive, whose parts are the files of a directory. It is small enough for ConfigMaps."""
    files = sorted(path for path in parts.iterdir() if not path.name.startswith("."))
    return io.BytesIO(b"".join(path.read_bytes() for path in files))


def main(argv: Sequence[str]) -> int:
    verb, *words = argv
    trees = folder_of_trees()
    if verb == "has":
        if not is_there(trees, words[0]):
            return NOT_HERE
        os.utime(trees / f"{words[0]}.json")  # it stays until the job starts
        return 0
    if verb == "start":
        parts = Path(words.pop(0))
        unpack(trees, words[0], _joined(parts))
    if verb in ("enter", "start"):
        digest, inside, logs, *command = words
        enter(trees, digest, inside, logs, command)
    archive: IO[bytes] = sys.stdin.buffer
    if verb == "unpack64":
        import base64

        archive = io.BytesIO(base64.b64decode(archive.read()))
    unpack(trees, words[0], archive)
    return 0


def _guarded(argv: Sequence[str]) -> int:
    try:
        return main(argv)
    except TreeError as error:
        text = str(error)
    except OSError as error:
        text = f"{error.strerror}{f' ({error.filename})' if error.filename else ''}"
    sys.stderr.write(f"fleetrun: error: {text}\n")
    return 1


if __name__ == "__main__":
    sys.exit(_guarded(sys.argv[1:]))
