"""Slurm's host lists."""

import itertools

import pytest

from fleetrun.schedulers.slurm import HostlistError, hosts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("n1", ["n1"]),
        ("n1,m2", ["n1", "m2"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[1-2,07],m3", ["n1", "n2", "n07", "m3"]),
        ("n[008-011]", ["n008", "n009", "n010", "n011"]),
        ("rack[0-1]n[1,3]", ["rack0n1", "rack0n3", "rack1n1", "rack1n3"]),
        ("a[1-2]-ib,b", ["a1-ib", "a2-ib", "b"]),
        ("2001-db8-[1-2]", ["2001-db8-1", "2001-db8-2"]),
    ],
)
def test_is_expanded_in_order(text: str, expected: list[str]):
    assert list(hosts(text)) == expected


@pytest.mark.parametrize("text", ["n[1-", "n1]", "n[a-b]", "n[2-1]", "n[[1]]", "n[]", "n[0-99999999]"])
def test_what_is_no_list_is_an_error(text: str):
    with pytest.raises(HostlistError, match="list of hosts"):
        list(hosts(text))


def test_the_first_of_many_costs_no_expansion_of_all():
    assert list(itertools.islice(hosts("n[0-999999],m"), 2)) == ["n0", "n1"]
