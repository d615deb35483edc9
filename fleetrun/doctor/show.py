"""Findings as a table of text, and as JSON. Writes nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleetrun.console.text import columns, printable, wrapped
from fleetrun.doctor.finding import Finding, Verdict, exit_code, plural

_COLOURS = {Verdict.PASS: "\033[32m", Verdict.WARN: "\033[33m", Verdict.FAIL: "\033[1;31m"}
_RESET = "\033[0m"
_CHECK = 15
_MARGIN = 8 + _CHECK
"""Columns before what was found."""

_NARROW, _UNDER = 64, 6
"""On a terminal of fewer columns it stands below, so far from the left."""


@dataclass(frozen=True, slots=True)
class Section:
    """Findings that belong together, under their title."""

    title: str
    findings: tuple[Finding, ...]


def table(sections: Sequence[Section], width: int | None, *, colour: bool) -> list[str]:
    """Lines for a terminal of `width` columns; None: as long as they are."""
    lines: list[str] = []
    for section in sections:
        lines += ["", *_fitted(printable(section.title), 0, width)] if lines else [printable(section.title)]
        for finding in section.findings:
            lines += _rows(finding, width, colour=colour)
    return [*lines, "", *_fitted(_summary(sections), 0, width)]


def _rows(finding: Finding, width: int | None, *, colour: bool) -> Iterable[str]:
    check = printable(finding.check)
    head = f"  {_painted(finding.verdict, colour)}  {check}"
    narrow = width is not None and width < _NARROW
    margin = _UNDER if narrow else _MARGIN
    found = _fitted(printable(finding.found), margin, width)
    if narrow:
        yield head
    else:
        gap = max(1, _CHECK - columns(check))
        yield f"{head}{' ' * gap}{found.pop(0).lstrip()}"
    yield from found
    if finding.mend:
        yield from _fitted(f"-> {printable(finding.mend)}", margin, width)


def _painted(verdict: Verdict, colour: bool) -> str:
    word = verdict.upper() if verdict is Verdict.FAIL else str(verdict)
    return f"{_COLOURS[verdict]}{word}{_RESET}" if colour else word


def _fitted(text: str, margin: int, width: int | None) -> list[str]:
    """Rows of at most `width` columns that begin after `margin`."""
    rows = [text] if width is None else wrapped(text, max(20, width - 1 - margin))
    return [" " * margin + row.strip() for row in rows] or [""]


def _summary(sections: Sequence[Section]) -> str:
    findings = [each for section in sections for each in section.findings]
    number = {verdict: sum(each.verdict is verdict for each in findings) for verdict in Verdict}
    counted = f"{number[Verdict.PASS]} passed, {plural(number[Verdict.WARN], 'warning')}, "
    counted += f"{number[Verdict.FAIL]} failed"
    if exit_code(findings):
        return f"{counted}: a job with these options would not run"
    return f"{counted}: nothing stands in the way of such a job"


def document(sections: Sequence[Section], extra: Mapping[str, Any]) -> str:
    """One JSON object: `ok`, `sections` with their findings, and what else is known."""
    findings = [each for section in sections for each in section.findings]
    rows = [
        {
            "title": section.title,
            "checks": [
                {"check": each.check, "verdict": str(each.verdict), "found": each.found, "mend": each.mend}
                for each in section.findings
            ],
        }
        for section in sections
    ]
    return json.dumps({"version": 1, "ok": not exit_code(findings), "sections": rows, **extra}, indent=2)
