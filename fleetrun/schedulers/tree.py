"""The working tree that --sync copies to the nodes of a job: its files as git lists them, their digest, and
the archive. `tree_remote.py` runs on those nodes.
"""

from __future__ import annotations

import os
import stat
import subprocess
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from fleetrun import values
from fleetrun.aliases import Callback, Document, Fields, Strings
from fleetrun.envs.settings.options import OPTIONS
from fleetrun.envs.settings.parsing import byte_size, plural, some
from fleetrun.errors import UsageError
from fleetrun.frozen import frozen, frozen_by_name
from fleetrun.schedulers.base import Submission

CODE = (".py", ".so")
"""Ends of the names of modules."""

LARGEST = 512 << 20
"""Bytes of all files together."""

_NEVER = frozenset({".git", "__pycache__"})
_OF_ANOTHER = frozenset({"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"})  # set inside a git hook
_SAMPLE = 64 << 10
_MODIFIED = 946_684_800
"""The time of all files of a copy, because a time is not content. A zip archive needs a time after 1980."""

_IGNORE = "Add large files to .gitignore: fleetrun does not copy files that it names."


Heed = Callback
"""Called for each piece that is read. It raises KeyboardInterrupt for a signal to end."""


def _nothing() -> None:
    """The default for a tree that is read without a job."""


@frozen
class Entry:
    """One entry of a tree."""

    name: str
    kind: str
    """f (file), x (executable), l (link) or d (empty directory)."""
    size: int = 0
    target: str = ""
    """Target of a link."""


@frozen_by_name
class Tree:
    """A working tree."""

    root: Path
    inside: str
    """The directory of the tree in which the job runs."""
    entries: tuple[Entry, ...]
    digest: str
    outside: Strings = ()
    """Links that lead out of the tree."""
    in_logs: Strings = ()
    """Code that is excluded, because it is in the log directory."""
    heed: Heed = _nothing

    @property
    def text(self) -> str:
        """Its size, such as `214 files, 1.2 MB`."""
        files = sum(each.kind != "d" for each in self.entries)
        return f"{plural(files, 'file')}, {byte_size(sum(each.size for each in self.entries))}"

    @property
    def paths(self) -> set[str]:
        """The paths of its entries and of all directories above them, and of directories without files."""
        names = [Path(each.name) for each in self.entries]
        found = {str(self.root / each) for name in names for each in (name, *name.parents)}
        folders = [each for each in found if Path(each).is_dir()]
        for folder in folders:  # the list grows
            with suppress(OSError), os.scandir(folder) as scanned:
                for each in scanned:
                    if each.path not in found and each.name not in _NEVER and _has_no_files(each):
                        found.add(each.path)
                        folders.append(each.path)
        return found

    def renamed(self, script: str) -> str:
        """Turn an absolute path into this tree into a path relative to the directory of the job."""
        path = Path(script).parent.resolve() / Path(script).name
        if not Path(script).is_absolute() or not path.is_relative_to(self.root):
            return script
        return os.path.relpath(path, self.root / self.inside)

    def command(self, python: str, logs: str, argv: Sequence[str], *first: str) -> Strings:
        """Return the words that run `argv` in the tree on a node that has the tree.

        `first` replaces the verb `enter`.
        """
        return (*self.receiver(python, *(first or ("enter",))), self.inside, logs, *argv)

    def receiver(self, python: str, *verb: str) -> Strings:
        """Return the words that run a verb of `tree_remote` for this tree on a node."""
        return (python, "-m", "fleetrun.schedulers.tree_remote", *verb, self.digest)

    def _level(self) -> int:
        """Return the compression level. It is 0 if the starts of the largest files do not shrink."""
        import zlib

        largest = sorted((each for each in self.entries if each.kind in "fx"), key=lambda each: -each.size)
        samples = []
        for each in largest[:16]:
            with _open(self.root / each.name) as file:
                samples.append(file.read(_SAMPLE))
        whole = sum(map(len, samples))
        return int(whole < _SAMPLE or sum(len(zlib.compress(each, 1)) for each in samples) < 0.9 * whole)

    def archive(self) -> IO[bytes]:
        """Write the tree into a temporary file. Raises UsageError if files have changed since."""
        import gzip  # imported late, as tarfile, because a launch inside a scheduler's job loads this module

        with ExitStack() as on_error:
            file = on_error.enter_context(tempfile.TemporaryFile())
            with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=self._level(), mtime=0) as packed:
                digest = _pack(self.root, self.entries, self.heed, packed)
            if digest != self.digest:
                raise _changed(self.root, "files")
            file.seek(0)
            on_error.pop_all()  # the caller closes it
        return file


def _pack(root: Path, entries: Iterable[Entry], heed: Heed, to: Any = None) -> str:
    """Write a tar archive of the tree, if `to` is given. Return its digest. Raises UsageError."""
    import tarfile
    from hashlib import blake2b

    output: Any = _Hashed(blake2b(digest_size=16), heed, to)
    with tarfile.open(fileobj=output, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for entry in entries:
            member = tarfile.TarInfo(entry.name)
            member.mode, member.mtime = 0o755 if entry.kind in "xd" else 0o644, _MODIFIED
            if entry.kind in "ld":
                member.type = tarfile.SYMTYPE if entry.kind == "l" else tarfile.DIRTYPE
                member.linkname = entry.target
                tar.addfile(member)
                continue
            with _open(root / entry.name) as file:
                # A file that grows, such as a log, is sent as it was when its size was read.
                grows = not entry.name.endswith(CODE)
                member.size = entry.size if grows else os.fstat(file.fileno()).st_size
                try:
                    tar.addfile(member, file)
                except OSError:  # the file was cut short
                    raise _changed(root, entry.name) from None
    return str(output.hash.hexdigest())


@frozen
class _Hashed:
    """An output that goes through the digest."""

    hash: Any
    heed: Heed
    to: Any

    def write(self, piece: bytes) -> int:
        self.heed()
        self.hash.update(piece)
        return len(piece) if self.to is None else int(self.to.write(piece))


def _changed(root: Path, what: str) -> UsageError:
    return UsageError(f"--sync {root}: {what} changed during the read", hint="Run the command again.")


def _has_no_files(entry: os.DirEntry[str]) -> bool:
    with suppress(OSError):
        if entry.is_dir(follow_symlinks=False):
            with os.scandir(entry.path) as scanned:
                return all(each.is_dir(follow_symlinks=False) for each in scanned)
    return False


# ---- The tree of a job


def tree_of_job(job: Submission) -> tuple[Submission, Tree | None]:
    """Return the job as it runs in the tree, and the tree. The tree is None without --sync.

    Paths of scripts in the tree become relative to the directory of the job. Raises UsageError.
    """
    settings = job.settings
    if settings.sync is None:
        return job, None
    tree = read_tree(settings.sync, Path(settings.log_dir).absolute(), heed=job.heed)
    names = {each.name for each in tree.entries}
    script = tree.renamed(settings.script)
    within = os.path.normpath(Path(tree.inside) / script)
    is_file = not settings.module and Path(settings.script).is_file() and not within.startswith(("/", "../"))
    if is_file and within not in names:
        raise UsageError(f"--sync {settings.sync} does not have {settings.script}", hint=_IGNORE)
    if tree.outside:
        job.console.info(f"Links that point out of {settings.sync} stay links: {_few(tree.outside)}")
    if tree.in_logs:
        remark = (
            f"Not sent, because it is in the log directory: {_few(tree.in_logs)}; --log_dir names another"
        )
        job.console.info(remark)
    words = {name: word for name, word in job.words.items() if name != "log_dir"}
    job_file = _renamed_in(job.job_file, tree)
    return replace(
        job, settings=values.replace(settings, script=script), words=words, job_file=job_file
    ), tree


def _few(names: Sequence[str]) -> str:
    return some([name if name.isprintable() else ascii(name) for name in names], 5)


def _renamed_in(job_file: Fields, tree: Tree) -> Document:
    """Return the tables of a job file with renamed scripts. `${here}` has already been filled in."""
    found = dict(job_file)
    if "script" in found:
        found["script"] = tree.renamed(found["script"])
    if "roles" in found:
        found["roles"] = {name: _renamed_in(role, tree) for name, role in found["roles"].items()}
    return found


# ---- Reading a tree


def times_of(paths: Iterable[str]) -> dict[str, int]:
    """Return when these files and directories last changed. A new file changes its directory."""
    found = {}
    for path in paths:
        with suppress(OSError):
            found[path] = os.lstat(path).st_ctime_ns
    return found


def read_tree(folder: str, logs: Path, *, heed: Heed = _nothing) -> Tree:
    """Read the tree of `folder`, without the directory of the logs. The job runs in this process's directory,
    which must be in the tree.

    Raises UsageError.
    """
    root, here = Path(folder).absolute(), Path.cwd()
    if not root.is_dir():
        raise UsageError(
            f"--sync {folder}: this directory does not exist",
            hint="`--sync .` is the current directory.",
        )
    root, here = root.resolve(), here.resolve()
    if not here.is_relative_to(root):
        raise UsageError(f"--sync {folder}: the job starts in {here}, which is not in this directory")
    names = list(_names(root, ""))
    in_logs = _below(root, [logs.resolve(), *_older_logs(here)], names)
    entries = _entries(root, names, in_logs)
    _check_size(folder, entries)
    inside = str(here.relative_to(root))
    if inside != "." and not any(each.name.startswith(f"{inside}/") for each in entries):
        raise UsageError(f"--sync {folder} has no file of {here}", hint=_IGNORE)
    outside = tuple(each.name for each in entries if each.kind == "l" and _leads_out(each))
    return Tree(
        root=root,
        inside=inside,
        entries=entries,
        digest=_pack(root, entries, heed),
        outside=outside,
        in_logs=tuple(sorted(name for name in in_logs if name.endswith(".py"))),
        heed=heed,
    )


def _older_logs(here: Path) -> list[Path]:
    """Return the default log directory, if it contains logs."""
    default = here / str(OPTIONS["log_dir"].default)
    return [default] if any(default.glob("*.events.jsonl")) else []


def _below(root: Path, logs: Sequence[Path], names: Iterable[str]) -> Collection[str]:
    """Return the names that are inside the directories of logs."""
    inner = [each for each in logs if each.is_relative_to(root) and each != root]
    heads = tuple(f"{each.relative_to(root)}/" for each in inner)
    return {name for name in names if f"{name}/".startswith(heads)}


def _entries(root: Path, names: Iterable[str], but: Collection[str]) -> tuple[Entry, ...]:
    found: dict[str, Entry] = {}
    written = set(_outputs())
    for name in names:
        if name in but or _NEVER.intersection(name.split("/")):
            continue
        entry = _entry(root, name, written)
        if entry is not None:
            found[name] = entry
    return tuple(found[name] for name in sorted(found, key=os.fsencode))


def _outputs() -> Iterator[tuple[int, int]]:
    """Yield device and inode of this process's outputs. A file such as `> out.log` changes meanwhile."""
    for fd in (1, 2):
        with suppress(OSError):
            facts = os.fstat(fd)
            yield facts.st_dev, facts.st_ino


def _entry(root: Path, name: str, written: Collection[tuple[int, int]] = ()) -> Entry | None:
    """Return the entry of a path.

    Return None if it has vanished, is not a file, link or directory, or is in `written`.
    """
    path = root / name
    try:
        facts = path.lstat()
        if stat.S_ISLNK(facts.st_mode):
            target = str(path.readlink())
            return Entry(name, "l", len(os.fsencode(target)), target)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unreadable(path, error) from None
    if stat.S_ISDIR(facts.st_mode):
        return Entry(name, "d")
    if stat.S_ISREG(facts.st_mode) and (facts.st_dev, facts.st_ino) not in written:
        return Entry(name, "x" if facts.st_mode & 0o100 else "f", facts.st_size)
    return None


def _names(root: Path, prefix: str) -> Iterator[str]:
    """Yield files, links and empty directories, relative to the root.

    A repository inside another follows its own rules.
    """
    folder = root / prefix
    listed = _listed_by_git(folder)
    for name in _listed_by_rules(folder, []) if listed is None else listed:
        path = f"{prefix}{name.rstrip('/')}"
        if _is_repository(root / path):
            yield from _names(root, f"{path}/")
        else:
            yield path


def _is_repository(folder: Path) -> bool:
    """Return True for a git repository. Return False if this cannot be determined."""
    return os.access(folder / ".git", os.F_OK) and not folder.is_symlink()


def _listed_by_git(folder: Path) -> list[str] | None:
    """List the files that git tracks, or would add.

    None outside a repository, and without git. Raises UsageError.
    """
    environ = {name: value for name, value in os.environ.items() if name not in _OF_ANOTHER}
    argv = ("git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    try:
        done = subprocess.run(
            argv,
            env=environ | {"LC_ALL": "C"},
            capture_output=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except OSError:
        return None
    errors = done.stderr.decode(errors="replace").strip()
    unread = next((line for line in errors.splitlines() if "could not open directory" in line), "")
    if done.returncode == 0 and unread:  # git continues without the directory
        raise UsageError(f"--sync {folder}: {unread.removeprefix('warning: ')}", hint=_IGNORE)
    if done.returncode == 0:
        return [os.fsdecode(name) for name in dict.fromkeys(done.stdout.split(b"\0")) if name]
    if "not a git repository" in errors:
        return None
    raise UsageError(f"--sync {folder}: git cannot list its files: {errors.partition(chr(10))[0]}")


def _listed_by_rules(folder: Path, outer: list[tuple[int, object]], prefix: str = "") -> Iterator[str]:
    """Yield the files below a directory, except for ignored files.

    Rules of inner .gitignore files take precedence.
    """
    from pathspec import GitIgnoreSpec  # imported late, because git does this work where it is available

    rules = outer
    try:
        lines = (folder / ".gitignore").read_text(errors="surrogateescape").splitlines()
        rules = [*outer, (len(prefix), GitIgnoreSpec.from_lines(lines))]
    except OSError:
        pass
    except ValueError as error:
        raise UsageError(f"--sync: {folder / '.gitignore'} cannot be read: {error}") from None
    try:
        with os.scandir(folder) as scanned:
            there = sorted(scanned, key=lambda each: each.name)
    except OSError as error:
        raise _unreadable(folder, error) from None
    for each in there:
        name = f"{prefix}{each.name}"
        is_folder = each.is_dir(follow_symlinks=False)
        if each.name in _NEVER or _ignored(f"{name}/" if is_folder else name, rules):
            continue
        if is_folder and not _is_repository(Path(each.path)):
            inner = _listed_by_rules(Path(each.path), rules, f"{name}/")
            first = next(inner, None)
            yield name if first is None else first
            yield from inner
        else:
            yield name


def _ignored(name: str, rules: Iterable[tuple[int, Any]]) -> bool:
    decided = False
    for length, spec in rules:
        found = spec.check_file(name[length:]).include
        decided = decided if found is None else found
    return decided


def _leads_out(entry: Entry) -> bool:
    target = os.path.normpath(os.path.join(os.path.dirname(entry.name), entry.target))  # noqa: PTH118, PTH120
    return target.startswith(("/", "../")) or target == ".."


def _check_size(folder: str, entries: Sequence[Entry]) -> None:
    if sum(each.size for each in entries) <= LARGEST:
        return
    parts: dict[str, int] = {}
    for each in entries:
        head = each.name.partition("/")[0]
        parts[head] = parts.get(head, 0) + each.size
    largest = sorted(parts, key=parts.__getitem__, reverse=True)[:3]
    rows = ", ".join(f"{name} {byte_size(parts[name])}" for name in largest)
    raise UsageError(
        f"--sync {folder} is {byte_size(sum(parts.values()))}, and the limit is {byte_size(LARGEST)}: {rows}",
        hint=f"{_IGNORE} Put data where each node can read them.",
    )


def _open(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> UsageError:
    return UsageError(f"--sync: {path} cannot be read: {error.strerror}", hint=_IGNORE)
