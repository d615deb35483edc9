"""The job's secret, and what comes of it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from fleetrun.elastic.embedded.sockets import store_keys
from fleetrun.envs import contract
from fleetrun.envs.contract import INHERITED, TOKEN, derive_key, is_guessable, token_flaw
from fleetrun.errors import UsageError
from tests.support.command import Fleetrun
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


@pytest.mark.parametrize("token", ["passwordpassword", "correcthorsebattery", "1234512345123451234512345"])
def test_a_secret_that_a_program_guesses(token: str) -> None:
    assert is_guessable(token)


def test_a_guess_costs_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, int]] = []
    scrypt = hashlib.scrypt
    monkeypatch.setattr(hashlib, "scrypt", lambda *words, **how: asked.append(how) or scrypt(*words, **how))
    derive_key.cache_clear()
    assert derive_key(SECRET, b"server") == derive_key(SECRET, b"server") != derive_key(SECRET, b"trainer")
    (how,) = asked  # once for all keys of a process
    assert 128 * how["n"] * how["r"] == 16 << 20


def test_everybody_has_another_key() -> None:
    keys = {derive_key(token, person) for token in (SECRET, SECRET + ".") for person in (b"server", b"node")}
    assert len(keys) == 4
    assert {len(key) for key in keys} == {32}


def test_keys_stay_what_they_were() -> None:
    """All nodes of a job derive the same ones, whatever their Python and OpenSSL."""
    assert derive_key(SECRET, b"server").hex() == (
        "8686b84e8160db527a8cf183e9113aef373fba34d3cacb560848da47e10d7463"
    )
    keys = keys_of({TOKEN: SECRET})
    assert keys is not None
    assert keys.server.public == b"O=sKLq*%[odp(f.i[s.R4y8z78Rj}[ZK*VnHU[BC"
    assert keys.client.secret == b"K+BBcp1>l#/B5DNHD?xfjkp(K:bl=Lq:!ymZKI(W"


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


@pytest.mark.slow
def test_from_nothing_to_a_secret(tmp_path: Path) -> None:
    """Printed by one command, taken from a file by the other; one that a program guesses gets a warning."""
    with Fleetrun(tmp_path) as fleetrun:
        fleetrun.script('tell("has", len(os.environ["FLEETRUN_TOKEN"]))')
        made = fleetrun.run("token")
        (tmp_path / "token").write_text(made.out)
        (tmp_path / "token").chmod(0o600)
        good = fleetrun.run("--token_file", "token", "train.py")
        assert (good.code, good.told(" has ")) == (0, ["trainer.0 has 40"]), good
        assert "guess" not in good.err
        weak = fleetrun.run("train.py", env={"FLEETRUN_TOKEN": "passwordpassword"})
        assert weak.told(" has ") == ["trainer.0 has 16"], weak
        assert (
            "the token of FLEETRUN_TOKEN looks easy to guess; `fleetrun token` prints a random token"
            in weak.err
        )
        assert "passwordpassword" not in weak.said
