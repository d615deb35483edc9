"""`fleetrun tables` as it is typed: what is printed, and exit codes. What is found belongs to the tests of
`trainers.ps.saves.inspection`.
"""

import json
from pathlib import Path

import pytest

from fleetrun.commands.find import NoJobError
from fleetrun.commands.tables import UnreadableSaveError
from fleetrun.errors import UsageError
from fleetrun.verbs import answer
from tests.trainers.ps.saved.tables import USERS, WORDS, MemoryTable, dense_spec, save

pytestmark = pytest.mark.slow  # each starts a process that imports torch


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`saved`: three tables of one server."""
    monkeypatch.chdir(tmp_path)
    tables = [
        MemoryTable(WORDS).put(range(-2, 1500), 1),
        MemoryTable(USERS).put([7], 2),
        MemoryTable(dense_spec(0, 60)).put([None], 3),
    ]
    save("saved", [tables])


@pytest.mark.usefixtures("saved")
def test_the_tables_of_a_save(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer("tables", ["saved"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("saved: step 17, 1 server, mode all, ")
    assert [line.split() for line in lines] == [
        ["TABLE", "ROWS", "VALUES", "TYPE", "RULE", "UPDATES", "SERVERS"],
        ["users", "1", "3", "float32", "Adagrad", "1", "1"],
        ["words", "1,502", "4", "float32", "Adam", "1", "1"],
        ["fc.weight[0:60]", "60", "float32", "Adam", "1", "1"],
    ]


@pytest.mark.usefixtures("saved")
def test_the_tables_of_a_save_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer("tables", ["list", "saved", "--json"]) == 0
    assert [each["table"] for each in json.loads(capsys.readouterr().out)["tables"]] == [
        "users", "words", "fc.weight[0:60]",
    ]  # fmt: skip


@pytest.mark.usefixtures("saved")
def test_rows_and_an_export(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert answer("tables", ["show", "saved", "words", "--", "-2", "9999"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0].strip() for line in lines] == [
        "-2", "values", "optimizer", "optimizer", "shows", "clicks", "unseen days", "9999",
    ]  # fmt: skip
    assert len(lines[1].split()) == 5
    assert lines[-1] == "9999: no row"
    assert answer("tables", ["export", "saved", "users", "-o", "users.csv"]) == 0
    assert capsys.readouterr().out.startswith("1 rows, ")
    assert (tmp_path / "users.csv").read_text().startswith("key,v0,v1,v2\n7,")


@pytest.mark.usefixtures("saved")
def test_a_comparison_and_a_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer("tables", ["diff", "saved", "saved"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows == [["users", "0", "0", "0", "1", "0", "0"], ["words", "0", "0", "0", "1,502", "0", "0"]]
    assert answer("tables", ["check", "saved"]) == 0
    assert capsys.readouterr().out.endswith("1,503 rows: no problems\n")


@pytest.mark.usefixtures("saved")
def test_what_is_wrong_with_the_words_or_the_save(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Table 'word' does not exist in saved; did you mean 'words'"):
        answer("tables", ["show", "saved", "word", "1"])
    with pytest.raises(UsageError, match="No such command 'chek'"):
        answer("tables", ["chek", "saved"])
    with pytest.raises(UsageError, match="Missing argument 'KEY"):
        answer("tables", ["show", "saved", "words"])
    with pytest.raises(
        NoJobError, match="nothing is neither a directory or URL with saved tables, nor a job"
    ):
        answer("tables", ["nothing"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnreadableSaveError, match="empty") as missing:
        answer("tables", ["empty"])
    assert missing.value.exit_code == 1
    shard = next((tmp_path / "saved").rglob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(UnreadableSaveError, match="was cut short"):
        answer("tables", ["check", "saved"])
