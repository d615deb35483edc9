"""Some rows of the parameter servers' tables, measured again, into the tables of an earlier run. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def merged(old: str, new: str, order: Sequence[str]) -> str:
    """`old` with the rows of `new` in place of its own, or beside them, by their first cells, which stand in
    this order. Below what `old` begins with stands what `new` does, and which rows that is about. Raises
    ValueError where a table of `new` has other columns than those of `old`.
    """
    blocks, fresh = _blocks(old), _blocks(new)
    places = {_header(block): place for place, block in enumerate(blocks) if _is_table(block)}
    titles: list[str] = []
    for block in fresh[1:]:
        if not _is_table(block):
            if block not in blocks:
                blocks.append(block)
            continue
        if _header(block) not in places:
            raise ValueError("the existing table has other columns; measure all rows again")
        place = places[_header(block)]
        blocks[place] = _with_rows(blocks[place], block, order)
        titles = titles or list(_rows(block))
    blocks.insert(1, f"Later, {'; '.join(titles)}: {fresh[0]}")
    return "\n\n".join(blocks)


def _with_rows(old: str, new: str, order: Sequence[str]) -> str:
    rows = _rows(old) | _rows(new)
    places = {title: place for place, title in enumerate(order)}
    ordered = sorted(rows, key=lambda title: places.get(title, len(places)))
    return "\n".join([*old.splitlines()[:2], *(rows[title] for title in ordered)])


def _rows(table: str) -> dict[str, str]:
    return {line.split("|")[1].strip(): line for line in table.splitlines()[2:]}


def _blocks(text: str) -> list[str]:
    return text.strip().split("\n\n")


def _is_table(block: str) -> bool:
    return block.startswith("|")


def _header(table: str) -> str:
    return table.partition("\n")[0]
