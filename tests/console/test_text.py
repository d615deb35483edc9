"""Text for people: numbers, control characters, secrets, the tail of a log, wrapped lines."""

import json
import math
import os
import re
import subprocess
import sys

import pytest

from fleetrun.console.text import (
    MASK,
    Tail,
    columns,
    describe_duration,
    format_clock,
    format_count,
    format_duration,
    format_loss,
    format_short,
    masked,
    parse_tail,
    printable,
    printable_json,
    read_tail,
    sanitize,
    visible_row,
    without_secrets,
    wrapped,
)

# ---- Numbers as the status line and the tables write them.


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (0.25, "0.25"),
        (512, "512"),
        (999.4, "999"),
        (999.6, "1k"),
        (999_700, "1M"),
        (9.996e14, "1e+15"),
        (12_345, "12.3k"),
        (-12_345, "-12.3k"),
        (2.5e6, "2.5M"),
        (3e9, "3G"),
        (1e30, "1e+30"),
        (math.nan, "nan"),
        (math.inf, "inf"),
    ],
)
def test_paces_in_three_digits(number, text):
    assert format_short(number) == text


@pytest.mark.parametrize(("number", "text"), [(0, "0"), (999, "999"), (1234567, "1,234,567")])
def test_steps_to_the_last_one(number, text):
    assert format_count(number) == text


@pytest.mark.parametrize(("number", "text"), [(0.123456, "0.1235"), (1e-9, "1e-09"), (math.nan, "nan")])
def test_losses_in_four_digits(number, text):
    assert format_loss(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, ""),
        (math.nan, ""),
        (math.inf, ""),
        (-5, "0s"),
        (0.9, "0s"),
        (59, "59s"),
        (60, "1m00s"),
        (3599, "59m59s"),
        (3600, "1h00m"),
        (86_399, "23h59m"),
        (86_400 * 12 + 7200, "12d02h"),
    ],
)
def test_how_long_in_a_column(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0.0 s"),
        (0.04, "0.0 s"),
        (2.5, "2.5 s"),
        (59.9, "59.9 s"),
        (60, "1m00s"),
        (751, "12m31s"),
        (7200, "2h00m"),
        (math.nan, "?"),
        (math.inf, "?"),
    ],
)
def test_how_long_in_a_sentence(seconds, text):
    assert describe_duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00:00"),
        (59.99, "0:00:59"),
        (3600, "1:00:00"),
        (86_399, "23:59:59"),
        (86_400, "1d 0:00:00"),
        (200 * 86_400 + 61, "200d 0:01:01"),
        (-3, "0:00:00"),
    ],
)
def test_how_long_where_it_ticks(seconds, text):
    assert format_clock(seconds) == text


# ---- Sanitized output keeps its colours and moves nothing on the screen.


@pytest.mark.parametrize(
    ("printed", "left"),
    [
        (b"plain\tline\n", b"plain\tline\n"),
        ("一 ü\n".encode(), "一 ü\n".encode()),
        (b"\xff\xfe no text\n", b"\xff\xfe no text\n"),
        (b"\x1b[31;1mred\x1b[0m\n", b"\x1b[31;1mred\x1b[0m\n"),
        (b"\x1b[38:2:1:2:3mx\x1b[m\n", b"\x1b[38:2:1:2:3mx\x1b[m\n"),
        (b"50%\r\x1b[K60%\r\x1b[2K\n", b"50%\r\x1b[K60%\r\x1b[2K\n"),
        (b"\x1b[2Jcleared\x1b[H\n", b"cleared\n"),
        (b"\x1b[?1049h\x1b[?25lx\n", b"x\n"),
        (b"\x1b[5;10Hthere\x1b[1;3r\n", b"there\n"),
        (b"\x1b[>4;1mx\n", b"x\n"),
        (b"\x1b[3Kx\x1b[6n\x1b[c\n", b"x\n"),
        (b"\x1b]0;a title\x07x\n", b"x\n"),
        (b"\x1b]8;;http://a\x1b\\link\x1b]8;;\x1b\\\n", b"link\n"),
        (b"\x1b]0;no end\nnext\n", b"\nnext\n"),
        (b"\x1bP1$r\x1b\\x\n", b"x\n"),
        (b"\x1b[31\nnext\n", b"\nnext\n"),
        (b"\x1b\nnext\n", b"\nnext\n"),
        (b"\x1bc\x1b(0\x1b7x\x1b8\x1bM\n", b"x\n"),
        (b"a\x0eb\x0fc\x0bd\x0ce\x07f\x00g\x7f\n", b"abcdefg\n"),
        ("a\u009b2Jb\n".encode(), b"a2Jb\n"),
        (b"\x1b\x1b[31mx\n", b"\x1b[31mx\n"),
        (b"up\x1b[A\x1b[2A\n", b"up\n"),
    ],
)
def test_what_is_left(printed, left):
    assert sanitize(printed) == left


@pytest.mark.parametrize(
    ("printed", "left"),
    [
        (b"\x1b[A", b"\x1b[A"),
        (b"\x1b[7A", b"\x1b[7A"),
        (b"\x1b[8A", b""),
        (b"\x1b[99A", b""),
        (b"\x1b[B", b""),
    ],
)
def test_a_few_rows_up_for_who_draws_them(printed, left):
    assert sanitize(printed, cursor_up=True) == left


@pytest.mark.parametrize(
    ("line", "width", "shown"),
    [
        (b"50%|#####     |", 80, b"50%|#####     |"),
        (b"50%|#####     |", 5, b"50%|#"),
        (b"10%\r20%", 80, b"20%"),
        (b"10%\r", 80, b"10%"),
        (b"\x1b[31mabc\x1b[0mdef", 4, b"\x1b[31mabc\x1b[0md\x1b[0m"),
        ("一二三".encode(), 5, "一二".encode()),
        (b"a\tb\x08c", 80, b"a    bc"),
        (b"\x1b[Kx", 80, b"x"),
        (b"\xffx", 80, "\ufffdx".encode()),
        (b"", 80, b""),
    ],
)
def test_a_row_of_an_unfinished_line(line, width, shown):
    assert visible_row(line, width) == shown


# ---- Which values are never shown.


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN", "WANDB_API_KEY", "OPENAI_APIKEY", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID",
        "MYSQL_PASSWORD", "MYSQL_PWD", "DB_PASS", "db_passwd", "GOOGLE_APPLICATION_CREDENTIALS",
        "PRIVATE_KEY", "SSH_KEY", "KEY", "KEY_2", "TOKEN2", "GITHUB_TOKEN", "SECRET", "CLIENT_SECRET",
        "SENTRY_DSN", "SESSION_COOKIE", "BASIC_AUTH", "TokenForX",
    ],
)  # fmt: skip
def test_secrets(name):
    assert masked({name: "s3cr3t"}) == {name: MASK}


@pytest.mark.parametrize(
    "name",
    [
        "PATH", "PWD", "OLDPWD", "SSH_AUTH_SOCK", "PADDLE_TRAINER_ID", "KEYBOARD", "MONKEY", "KEYMAP_FILE",
        "GIT_AUTHOR_NAME", "TOKENIZERS_PARALLELISM", "COMPASS", "PASSAGE", "MASTER_ADDR", "BYPASS_CACHE",
    ],
)  # fmt: skip
def test_no_secrets(name):
    assert masked({name: "plain"}) == {name: "plain"}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("redis://user:s3cr3t@host:1/0", f"redis://user:{MASK}@host:1/0"),
        ("http://:s3cr3t@proxy:3128", f"http://:{MASK}@proxy:3128"),
        ("http://proxy:3128", "http://proxy:3128"),
        ("http://user@host/a:b@c", "http://user@host/a:b@c"),
        ("a,http://u:p@h,http://v:q@i", f"a,http://u:{MASK}@h,http://v:{MASK}@i"),
    ],
)
def test_passwords_inside_addresses(value, shown):
    assert masked({"SOMETHING": value}) == {"SOMETHING": shown}


def test_that_a_secret_is_empty_is_no_secret():
    assert masked({"HF_TOKEN": ""}) == {"HF_TOKEN": ""}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("export HF_TOKEN=s3cr3t", f"export HF_TOKEN={MASK}"),
        ('{"WANDB_API_KEY": "s3cr3t", "lr": 1}', f'{{"WANDB_API_KEY": "{MASK}", "lr": 1}}'),
        ("--env DB_PASSWORD=s3cr3t train.py", f"--env DB_PASSWORD={MASK} train.py"),
        ("password: s3cr3t", f"password: {MASK}"),
        ("Protocol=https;AccountKey=s3cr3t==;x=y", f"Protocol=https;AccountKey={MASK};x=y"),
        ("api-key=s3cr3t&x=1", f"api-key={MASK}&x=1"),
        ("from redis://u:s3cr3t@h/0 on", f"from redis://u:{MASK}@h/0 on"),
        ("tokens: 1024, token_rate=1.5e3", "tokens: 1024, token_rate=1.5e3"),
        ("KeyError: 'weights'", "KeyError: 'weights'"),
        ("Authorization: Bearer eyJhbGci.eyJzdWIi.x-y", f"Authorization: {MASK}"),
        ("train.py --password s3cr3t --lr 0.1", f"train.py --password {MASK} --lr 0.1"),
        ("train.py --max-tokens 512 --token --lr 1", "train.py --max-tokens 512 --token --lr 1"),
        ("t.py --api_key=s3cr3t --password=s3cr3t", f"t.py --api_key={MASK} --password={MASK}"),
        ('["--password", "s3cr3t", "--lr", "1"]', f'["--password", "{MASK}", "--lr", "1"]'),
        (
            '[\n  "--api-key",\n  "s3cr3t",\n  "--key",\n  "--lr"\n]',
            f'[\n  "--api-key",\n  "{MASK}",\n  "--key",\n  "--lr"\n]',
        ),
        ("INFO: PASSWORD=s3cr3t", f"INFO: PASSWORD={MASK}"),
        ("args: Namespace(password='s3 cr3t', lr=1)", f"args: Namespace(password='{MASK}', lr=1)"),
        ("ValueError: token: s3cr3t", f"ValueError: token: {MASK}"),
        ("{env:{password:s3cr3t}}", f"{{env:{{password:{MASK}}}}}"),
        (r'{"error": "API_KEY=\"s3cr3t\" is bad"}', rf'{{"error": "API_KEY=\"{MASK}\" is bad"}}'),
        ("password:    s3cr3t", f"password:    {MASK}"),
        ('{"max_tokens": null, "token": [1, 2], "auth": {}}',) * 2,
        ("the token of the model is lost",) * 2,
        ("id AKIAIOSFODNN7EXAMPLE there", f"id {MASK} there"),
        ("login with hf_abcdefghijklmnopqrst!", f"login with {MASK}!"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\nx\n-----END RSA PRIVATE KEY-----\nstep", f"{MASK}\nstep"),
        ("the value of this shell is in-my-shell", f"the value of this shell is {MASK}"),
        ("step 12: loss=0.5 PATH=/bin", "step 12: loss=0.5 PATH=/bin"),
    ],
)
def test_a_text_to_give_away(text, shown):
    assert without_secrets(text, {"GIT_TOKEN": "in-my-shell", "SOME_PASS": "on"}) == shown


@pytest.mark.parametrize(
    "piece",
    ["a", "a-", "token", "token=", "://", "://:", "--a ", "--key ", "key:'", "-----BEGIN PRIVATE KEY-----"],
)
def test_a_long_line_takes_no_time_beyond_its_length(piece):
    """A megabyte; a pattern that looks twice at each byte of it would never end."""
    without_secrets((1 << 20) // len(piece) * piece, {})


# ---- The end of a log, whatever is in it.

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
    text = "错误" * 12 * LOOK_BACK + "x" * offset + "\n" + "最后一行\n"
    first, last = tail_of(text).before
    assert first.endswith("错误" + "x" * offset)
    assert last == "最后一行"


LONG_LINES = {
    "a message": ("import sys\nraise KeyError('x' * 3_000_000)", "KeyError: 'xxx"),
    "a message and its last words": ("raise KeyError('x' * 100_000 + '\\n')", "KeyError: 'xxx"),
    "a progress bar": (
        "import sys\nfor step in range(70_000):\n    sys.stderr.write(f'\\rstep {step} |' + '#' * 57)\n"
        "raise KeyError('x')",
        "KeyError: 'x'",
    ),
}


@pytest.mark.parametrize("way", LONG_LINES)
def test_one_long_line_hides_no_exception(tmp_path, tail_of, way):
    code, cause = LONG_LINES[way]
    tail = tail_of("epoch 1\n" + python(code, tmp_path))
    assert tail.traceback[0].endswith(TRACEBACK)
    assert tail.traceback[-1].startswith(cause)
    assert sum(map(len, tail.traceback)) < LOOK_BACK


def test_a_long_last_line_without_an_exception_is_shown_by_its_ends(tail_of):
    (line,) = tail_of("no data in " + "x" * 200_000 + ".bin\n").before
    assert line.startswith("no data in xxx")
    assert line.endswith("xxx.bin")


def test_one_line_longer_than_the_piece(tail_of):
    (line,) = tail_of("错" * LOOK_BACK + "end").before
    assert line.endswith("错end")


@pytest.mark.slow
def test_only_the_end_is_read(tail_of):
    lines = tail_of("".join(f"{number:07}\n" for number in range(100_000))).before
    assert lines[-1] == "0099999"
    assert lines[0] == f"{100_000 - len(lines):07}", "the first line is whole"
    assert len(lines) == LOOK_BACK // 8


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


# ---- Rows of a terminal: between words, by columns rather than characters.


@pytest.mark.parametrize(
    ("text", "expected"),
    [("abc", 3), ("中文", 4), ("caf\u0065\u0301", 4), ("カナ", 4), ("ﾊﾝ", 2), ("", 0), ("a中b", 4)],
)
def test_columns(text, expected):
    assert columns(text) == expected


@pytest.mark.parametrize(
    ("text", "width", "rows"),
    [
        ("fits as it is", 20, ["fits as it is"]),
        ("one two three", 8, ["one two", "    three"]),
        ("第三批 坏的 输入", 12, ["第三批 坏的", "    输入"]),
        ("a-very-long-word-that-is-a/path and", 10, ["a-very-long-word-that-is-a/path", "    and"]),
        ("    indented code = 1 + 2", 16, ["    indented", "    code = 1 + 2"]),
        ("two  spaces  fit", 20, ["two  spaces  fit"]),
        ("two  spaces  stay", 12, ["two  spaces", "    stay"]),
    ],
)
def test_rows(text, width, rows):
    assert wrapped(text, width) == rows


@pytest.mark.parametrize("width", range(5, 60, 7))
def test_no_word_is_broken_and_none_is_lost(width):
    text = "LAUNCH ERROR 第三批 failed: bad 数据 in /a/path/that/is/long, restart 1 of 3 now"
    rows = wrapped(text, width)
    assert " ".join(" ".join(rows).split()) == text
    assert all(columns(row) <= width or len(row.split()) == 1 for row in rows)
