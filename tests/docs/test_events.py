"""docs/reference/events.md against the code: every event that is written, and every field of it, is there."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "reference" / "events.md").read_text()
ROWS = {
    event: {
        name
        for row in re.findall(r"^\| (`[^|]*)\|", section, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }
    for event, section in re.findall(r"^### `(\w+)`\n(.*?)(?=^#|\Z)", TEXT, re.MULTILINE | re.DOTALL)
}
"""The fields of each event: the first cells of the table below its heading."""


def written() -> dict[str, set[str]]:
    """`journal.write("started", container=...)`, by whatever name the journal goes there."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "fleetrun").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "self._note":  # of `launcher.nodes`
                found.setdefault("node", set()).update(each.arg for each in node.keywords if each.arg)
            if isinstance(node, ast.Call) and re.search(
                r"(journal|_)\.write$|_write$", ast.unparse(node.func)
            ):
                first = node.args[0] if node.args else None
                if isinstance(first, ast.Constant) and isinstance(first.value, str) and node.keywords:
                    fields = found.setdefault(first.value, set())
                    fields |= {keyword.arg for keyword in node.keywords if keyword.arg}
    return found


def of_pods() -> dict[str, set[str]]:
    """`yield "exited", fields` in `record_lines` and in what it yields from, with what the functions return
    that make the fields.
    """
    tree = ast.parse((ROOT / "fleetrun/pod/events.py").read_text())
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}

    def keys_of(node: ast.AST | None) -> set[str]:
        if isinstance(node, ast.Call):
            made = functions[ast.unparse(node.func)]
            return set().union(
                *(keys_of(each.value) for each in ast.walk(made) if isinstance(each, ast.Return))
            )
        assert isinstance(node, ast.Dict)
        pairs = zip(node.keys, node.values, strict=True)
        return set().union(
            *({key.value} if isinstance(key, ast.Constant) else keys_of(value) for key, value in pairs)
        )

    lines = functions["record_lines"]
    more = [
        functions[ast.unparse(each.value.func)]
        for each in ast.walk(lines)
        if isinstance(each, ast.YieldFrom) and isinstance(each.value, ast.Call)
    ]
    return {
        each.value.elts[0].value: keys_of(each.value.elts[1])
        for function in (lines, *more)
        for each in ast.walk(function)
        if isinstance(each, ast.Yield) and isinstance(each.value, ast.Tuple)
    }


def test_every_event_has_a_section_with_its_fields():
    found = {**written(), **of_pods()}
    assert {"started", "exited", "over", "failed"} <= found.keys()
    missing = {event: fields - ROWS.get(event, set()) for event, fields in found.items()}
    assert {event: fields for event, fields in missing.items() if fields or event not in ROWS} == {}


def test_the_fields_of_a_launch_are_told():
    (function,) = (
        node
        for path in (ROOT / "fleetrun").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "launch_fields"
    )
    (returned,) = (node.value for node in ast.walk(function) if isinstance(node, ast.Return))
    assert isinstance(returned, ast.Dict)
    keys = {ast.literal_eval(key) for key in returned.keys if key is not None}
    assert "argv" in keys
    assert keys == ROWS["launch"]
