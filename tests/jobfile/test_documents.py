"""Files from disk: what is no job file is told by its name, and holds nobody up."""

import os
from pathlib import Path

import pytest

from fleetrun.envs.settings.job_file import LARGEST, read_documents
from fleetrun.errors import UsageError


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def refusal(name: str = "job.toml") -> UsageError:
    with pytest.raises(UsageError) as caught:
        read_documents(name, "--config")
    return caught.value


def write(text: str | bytes, name: str = "job.toml") -> None:
    path = Path(name)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


BROKEN = [
    ("a = ", "job.toml:1: "),
    ("a = 1\nb = [1,\n", "job.toml:2: "),
    ("a = 1\nscript 'x'\n", "job.toml:2: "),
    ("a = 1\na = 2\n", "job.toml:2: "),
    ("\n[t]\n[t]\n", "job.toml:3: "),
    ('a = "\\q"', "job.toml:1: "),
    ("a = 08", "job.toml:1: "),
    (b"a = 1\nb = '\xff'\n", "UTF-8"),
    ("a = " + "[" * 20_000, "nested too deeply"),
    ("a = " + "9" * 5000, "job.toml cannot be read: "),
    ("#" * (LARGEST + 1), "too large for a job file: more than 256 KiB"),
]


@pytest.mark.parametrize(("text", "expected"), BROKEN, ids=[repr(text[:20]) for text, _ in BROKEN])
def test_what_is_no_toml_is_told_with_its_line(text, expected):
    write(text)
    assert expected.lower() in refusal().message.lower()


def test_what_is_no_file():
    assert refusal().message == "--config job.toml cannot be read: No such file or directory"
    assert "fleetrun init" in (refusal().hint or "")
    Path("job.toml").mkdir()
    assert refusal().message == "--config job.toml cannot be read: Is a directory"
    assert "Not a regular file" in refusal("/dev/null").message
    assert "file name" in refusal("a\0b").message


def test_a_fifo_that_nobody_writes_to_holds_nobody_up():
    os.mkfifo("job.toml")
    assert "Not a regular file" in refusal().message


def test_a_file_with_a_byte_order_mark_and_windows_lines():
    write(b"\xef\xbb\xbfscript = 'a.py'\r\njob_id = 'x'\r\n")
    (page,) = read_documents("job.toml", "--config")
    assert page.tree == {"script": "a.py", "job_id": "x"}
    assert page.where(("job_id",)) == "job.toml:2"


def test_included_files_come_before_what_includes_them_and_are_found_beside_it():
    write('include = ["../one.toml", "two.toml"]', "conf/job.toml")
    write("include = 'three.toml'", "one.toml")
    write("", "three.toml")
    write("", "conf/two.toml")
    names = [page.name for page in read_documents("conf/job.toml", "--config")]
    assert names == ["conf/../three.toml", "conf/../one.toml", "conf/two.toml", "conf/job.toml"]


def test_one_file_may_be_included_twice():
    write('include = ["a.toml", "b.toml"]')
    write('include = "common.toml"', "a.toml")
    write('include = "common.toml"', "b.toml")
    write("", "common.toml")
    assert len(read_documents("job.toml", "--config")) == 5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('include = "job.toml"', "job.toml:1: include: job.toml includes itself"),
        ('\ninclude = "none.toml"', "job.toml:2: include none.toml cannot be read: No such file"),
        ("include = 3", "job.toml:1: include must be a list of file names"),
        ("include = [1]", "job.toml:1: include must be a list of file names"),
        ("include = ['']", "job.toml:1: include must be a list of file names"),
        ("include = ['.']", "job.toml:1: include . cannot be read: Is a directory"),
    ],
)
def test_an_include_that_cannot_be(text, expected):
    write(text)
    assert expected in refusal().message


def test_a_circle_through_a_link():
    write('include = "other.toml"')
    Path("other.toml").symlink_to("job.toml")
    assert "other.toml includes itself" in refusal().message


def test_a_tree_of_includes_that_never_ends_is_cut():
    write(f"include = {['a.toml', 'a.toml']}")
    for number, name in enumerate("abcdefgh"):
        after = "abcdefghi"[number + 1]
        write(f"include = {[f'{after}.toml'] * 2}", f"{name}.toml")
    write("", "i.toml")
    assert "more than 32 job files" in refusal().message
