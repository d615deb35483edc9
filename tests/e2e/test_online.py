"""The example of online learning, as the README starts it, but shorter."""

import json
from pathlib import Path

import pytest

from tests.support.command import Fleetrun

_FILE = Path(__file__).resolve().parents[2] / "examples" / "online.toml"


@pytest.mark.slow
def test_what_is_published_follows_the_drift_and_what_was_saved_once_does_not(fleetrun: Fleetrun):
    short = {"SECONDS": "30", "PERIOD": "40", "INTERVAL": "0.5"}
    done = fleetrun.run("up", str(_FILE), "--job_id=short", env=short)
    assert done.code == 0, done
    assert "AUC/saved once" in done.out, "evaluator 0 is followed"
    (record,) = (fleetrun.folder / "log").glob("short.*.events.jsonl")
    events = [json.loads(line) for line in record.read_text().splitlines()]
    values = [each["values"] for each in events if each["event"] == "progress" and each.get("values")]
    both = [each for each in values if "AUC/published" in each and "AUC/saved once" in each]
    assert max(each["AUC/published"] - each["AUC/saved once"] for each in both) > 0.1
    assert max(each["AUC/published"] for each in both) > 0.65
    assert not [each for each in events if each["event"] == "failed"]
    tables = [each["tables"] for each in events if each["event"] == "progress" and "tables" in each]
    assert {name for each in tables for name in each} == {"user.weight", "item.weight"}

    drawn = fleetrun.run("plot", "short", "-o", "short.svg")
    assert drawn.code == 0, drawn
    picture = (fleetrun.folder / "short.svg").read_text()
    assert all(f">{text}<" in picture for text in ("AUC", "saved once", "version age, s", "item.weight"))
