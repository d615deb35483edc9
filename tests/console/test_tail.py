"""The end of a log, whatever is in it."""

import json
import os
import re
import subprocess
import sys

import pytest

from fleetrun.console.text import Tail, parse_tail, printable, printable_json, read_tail

TRACEBACK = "Traceback (most recent call last):"
LOOK_BACK = 64 * 1024


@pytest.fixture
def tail_of(tmp_path):
    def write_and_read(data):
        path = tmp_path / "trainer.0.log"
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        return read_tail(path)

    return write_and_read


def python(code, tmp_path):
    """What a failing script prints."""
    script = tmp_path / "script.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    return done.stderr


# ---- the last lines


def test_lines(tail_of):
    assert tail_of("one\ntwo\n") == Tail(("one", "two"))


def test_no_newline_at_the_end(tail_of):
    assert tail_of("one\ntwo") == Tail(("one", "two"))


@pytest.mark.parametrize("data", ["", "\n", "\n\n  \n", "\0\0\0"])
def test_nothing(tail_of, data):
    assert tail_of(data) == Tail(())


def test_a_file_that_is_not_there(tmp_path):
    assert read_tail(tmp_path / "none.log") == Tail(())


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "log")
    assert read_tail(tmp_path / "log") == Tail(())


def test_chinese(tail_of):
    assert tail_of("训练失败:数据为空\n　缩进") == Tail(("训练失败:数据为空", "　缩进"))


def test_empty_lines_within_stay(tail_of):
    assert tail_of("one\n\ntwo\n\n") == Tail(("one", "", "two"))


@pytest.mark.parametrize("offset", range(6))
def test_a_cut_inside_a_character(tail_of, offset):
    """The piece that is read begins anywhere: in the middle of a line, and of a character."""
    text = "错误" * LOOK_BACK + "x" * offset + "\n" + "最后一行\n"
    assert tail_of(text) == Tail(("最后一行",))


def test_one_line_longer_than_the_piece(tail_of):
    (line,) = tail_of("错" * LOOK_BACK + "end").before
    assert line.endswith("错end")


@pytest.mark.slow
def test_only_the_end_is_read(tail_of):
    lines = tail_of("".join(f"{number:07}\n" for number in range(100_000))).before
    assert lines[-1] == "0099999"
    assert lines[0] == f"{100_000 - len(lines):07}", "the first line is whole"
    assert len(lines) == LOOK_BACK // 8 - 1


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b"\x1b[31mred\x1b[0m", "red"),
        (b"\x1b]0;a title\x07text", "text"),
        (b"cut off \x1b[31", r"cut off \x1b[31"),
        (b"bell\x07 and backspace\x08", r"bell\x07 and backspace\x08"),
        (b"\x9b1m", r"\x9b1m"),
        ("\u202eright to left".encode(), r"\u202eright to left"),
        ("\u2028".encode() + b"x", r"\u2028x"),
        (b"a\tb", "a    b"),
        (b"\xff\xfe bytes", r"\xff\xfe bytes"),
        ("半".encode()[:2], r"\xe5\x8d"),
        (b"\0\0\0after a hole", "after a hole"),
        (b"windows\r", "windows"),
        (b" 10%\r 20%\r 30%", " 30%"),
        (b" 10%\r 20%\r", " 20%"),
        ("emoji 🚀".encode(), "emoji 🚀"),
    ],
)
def test_no_byte_does_anything_to_the_terminal(tail_of, data, shown):
    assert tail_of(b"first\n" + data + b"\n") == Tail(("first", shown))


def test_what_cannot_be_encoded_is_escaped():
    assert printable("half of an emoji \ud83d") == r"half of an emoji \ud83d"


@pytest.mark.parametrize("text", ["plain \u3000 训练", "\x7f \x80 \x9b31m \x9f \xa0 \x1b", "c2 \\u0080"])
def test_json_says_the_same_and_does_nothing_to_the_terminal(text):
    line = printable_json(json.dumps([text], ensure_ascii=False).encode())
    assert json.loads(line) == [text]
    assert not re.search("[\x00-\x1f\x7f-\x9f]", line.decode())
    assert ("训练" in line.decode()) == ("训练" in text)


def test_only_the_last_attempt_counts(tail_of):
    text = (
        f"{TRACEBACK}\n  File\nValueError: of before\n"
        "--- fleetrun: restart 1 of trainer 0, 2022-05-18 11:27:17 ---\n"
        "now\n"
    )
    assert tail_of(text) == Tail(("now",))


def test_an_attempt_that_printed_nothing(tail_of):
    assert tail_of("before\n--- fleetrun: restart 1 of trainer 0, x ---\n") == Tail(())


# ---- tracebacks


def test_a_traceback(tmp_path, tail_of):
    text = python("print('x')\ndef f():\n    raise ValueError('bad input')\nf()", tmp_path)
    tail = tail_of("epoch 1\n" + text)
    assert tail.before == ("epoch 1",)
    assert tail.traceback[0] == TRACEBACK
    assert tail.traceback[-1] == "ValueError: bad input"
    assert tail.after == ()


def test_a_traceback_without_its_last_newline(tail_of):
    tail = tail_of(f'{TRACEBACK}\n  File "x", line 1\nValueError: 坏')
    assert tail.traceback[-1] == "ValueError: 坏"


def test_what_follows_a_traceback(tail_of):
    tail = tail_of(f'a\n{TRACEBACK}\n  File "x", line 1\nValueError: x\nclosing\nclosed\n')
    assert tail.after == ("closing", "closed")


def test_the_last_of_several_that_have_nothing_to_do_with_each_other(tail_of):
    one = f'{TRACEBACK}\n  File "x", line 1\nValueError: handled\n'
    tail = tail_of(f"{one}going on\n{one.replace('handled', 'fatal')}")
    assert tail.traceback[-1] == "ValueError: fatal"
    assert tail.traceback.count(TRACEBACK) == 1
    assert "ValueError: handled" in tail.before


@pytest.mark.parametrize(
    "code",
    [
        "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise KeyError('x') from error",
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise KeyError('x')",
        "try:\n    try:\n        1 / 0\n    except ZeroDivisionError:\n        raise TypeError('y')\n"
        "except TypeError:\n    raise KeyError('x')",
    ],
)
def test_a_chain_is_taken_whole(tmp_path, tail_of, code):
    tail = tail_of("before\n" + python(code, tmp_path))
    assert tail.before == ("before",)
    assert tail.traceback[0] == TRACEBACK
    assert "ZeroDivisionError: division by zero" in tail.traceback
    assert tail.traceback[-1] == "KeyError: 'x'"


def test_a_group_of_exceptions(tmp_path, tail_of):
    text = python("raise ExceptionGroup('several', [ValueError('one'), TypeError('two')])", tmp_path)
    tail = tail_of("before\n" + text)
    assert tail.before == ("before",)
    assert any("TypeError: two" in line for line in tail.traceback)


PREFIXED = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "/srv/train.py", line 7, in <module>
[rank0]:     main()
[rank0]: ZeroDivisionError: division by zero

[rank0]: During handling of the above exception, another exception occurred:

[rank0]: Traceback (most recent call last):
[rank0]:   File "/srv/train.py", line 9, in <module>
[rank0]:     main()
[rank0]: ValueError: bad input
[rank0]:[W1120 09:00:00.000000000 ProcessGroupGloo.cpp:1] Warning: destroy_process_group() was not called
"""


def test_torch_distributed_puts_a_rank_before_each_line(tail_of):
    tail = tail_of("before\n" + PREFIXED)
    assert tail.before == ("before",)
    assert tail.traceback[0] == TRACEBACK
    assert "ZeroDivisionError: division by zero" in tail.traceback
    assert tail.traceback[-1] == "ValueError: bad input"
    assert len(tail.after) == 1


def test_a_logger_puts_something_before_the_first_line_only():
    lines = [f"ERROR {TRACEBACK}", '  File "x", line 1', "ValueError: x", "more"]
    assert parse_tail(lines) == Tail((), tuple(lines[:3]), ("more",))


def test_a_traceback_that_breaks_off():
    lines = [TRACEBACK, '  File "x", line 1']
    assert parse_tail(lines) == Tail((), tuple(lines))
