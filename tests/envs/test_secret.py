"""The job's secret, and what comes of it."""

from __future__ import annotations

import pytest

from fleetrun.elastic.embedded.sockets import store_keys
from fleetrun.envs import contract
from fleetrun.envs.contract import INHERITED, TOKEN, derive_key, token_flaw
from fleetrun.errors import UsageError
from trainers.ps.transport import keys_of

SECRET = "correct horse battery"


def test_a_short_secret_is_none() -> None:
    assert token_flaw("x" * 16) is None
    flaw = token_flaw("hunter2")
    assert flaw is not None
    assert flaw.startswith("FLEETRUN_TOKEN has 7 characters")
    assert str(token_flaw("hunter2", "--token_file t")).startswith("--token_file t has 7 characters")
    assert "at least 16" in flaw
    assert "hunter2" not in flaw


def test_everybody_has_another_key() -> None:
    keys = {derive_key(token, person) for token in (SECRET, SECRET + ".") for person in (b"server", b"node")}
    assert len(keys) == 4
    assert {len(key) for key in keys} == {32}


def test_keys_stay_what_they_were() -> None:
    """A server that was started by an older launcher has them already."""
    assert derive_key(SECRET, b"server").hex() == (
        "3f692d7711d02ea2d57dffb739bc5e8219d310912cedca141cf8b7907b61ee2c"
    )
    keys = keys_of({TOKEN: SECRET})
    assert keys is not None
    assert keys.server.public == b"}mz)OYl7NekQ&O}9dD6tNnsc.g{R=z6o{m=y5#K="
    assert keys.client.secret == b"7hm.sG6%r[g^K$Ik8jy.(j.:^)F8^JsayVs.VGB("


def test_the_store_has_keys_of_its_own() -> None:
    store, servers = store_keys(SECRET), keys_of({TOKEN: SECRET})
    assert store is not None
    assert servers is not None
    pairs = [store.server, store.client, servers.server, servers.client]
    assert len({pair.public for pair in pairs} | {pair.secret for pair in pairs}) == 8
    assert store_keys(SECRET) == store


def test_no_secret_no_keys() -> None:
    assert store_keys("") is None
    with pytest.raises(UsageError, match="FLEETRUN_TOKEN has 3 characters"):
        store_keys("abc")


def test_the_contract_hands_it_on() -> None:
    assert (contract.TOKEN, contract.derive_key, contract.token_flaw) == (TOKEN, derive_key, token_flaw)
    assert TOKEN in INHERITED, "a nested launch has the same"
