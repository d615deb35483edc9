"""The line of every key, in documents with all of TOML's ways to hide one."""

import tomllib

import pytest

from fleetrun.envs.settings.toml import key_lines, nearest_line

TRICKY = '''\
# a comment with = and [
a = 1
b."x.y" = """
[no]
c = 2
"""
[roles.server]   # hi ]
args = [
 "]", # [
 1,
]
d = {x = 1, y = "}"}
"q = z" = 'a"\\'
[[t]]
k = """"quoted""""
[ last . one ]
z=1'''


def test_keys_are_found_whatever_stands_around_them():
    tomllib.loads(TRICKY)
    assert key_lines(TRICKY) == {
        ("a",): 2,
        ("b",): 3,
        ("b", "x.y"): 3,
        ("roles",): 7,
        ("roles", "server"): 7,
        ("roles", "server", "args"): 8,
        ("roles", "server", "d"): 12,
        ("roles", "server", "q = z"): 13,
        ("t",): 14,
        ("t", "k"): 15,
        ("last",): 16,
        ("last", "one"): 16,
        ("last", "one", "z"): 17,
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("# only a comment", {}),
        ("\n\n  a = 1", {("a",): 3}),
        ("a = 1\r\nb = 2\r\n", {("a",): 1, ("b",): 2}),
        ('a = "\\\\"\nb = 1', {("a",): 1, ("b",): 2}),
        ("a = '''\n'\n''''\nb = 1", {("a",): 1, ("b",): 4}),
        ("a = [\n [1],\n # ]\n]\nb = 1", {("a",): 1, ("b",): 5}),
        ("'k # y' = 1", {("k # y",): 1}),
        ("a.b.c = 1", {("a",): 1, ("a", "b"): 1, ("a", "b", "c"): 1}),
    ],
)
def test_positions(text, expected):
    tomllib.loads(text)
    assert key_lines(text) == expected


def test_what_stands_inside_is_near_to_the_key_before_it():
    found = key_lines("a = 1\n[t]\nb = {c = 1}")
    assert nearest_line(found, ("t", "b", "c")) == 3
    assert nearest_line(found, ("t", "nothing")) == 2
    assert nearest_line(found, ("nothing",)) == 1


@pytest.mark.slow
def test_a_key_of_thousands_of_parts_takes_no_time():
    assert len(key_lines(".".join(["a"] * 5000) + " = 1")) == 8
