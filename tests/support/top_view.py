"""`fleetrun top` at a terminal, and what its screen shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tests.support.command import Fleetrun
from tests.support.screen import Terminal

XTERM = {"TERM": "xterm-256color"}
ESCAPE = b"\x1b"


class View:
    """`fleetrun top` and what its screen shows."""

    def __init__(
        self,
        fleetrun: Fleetrun,
        *words: str,
        columns: int = 80,
        rows: int = 24,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.launch, self.master = fleetrun.at_terminal(
            "top", "--interval", "0.2", *words, env={**XTERM, **(env or {})}, columns=columns, rows=rows
        )
        self._terminal = Terminal(columns, rows, raw=True)
        self._seen = 0

    @property
    def rows(self) -> list[str]:
        news = self.launch.raw[self._seen :]
        self._seen += len(news)
        return self._terminal.feed(news).rows

    def until(self, shown: Callable[[list[str]], object], what: str) -> list[str]:
        self.launch.until(lambda: shown(self.rows), what)
        return self.rows

    def until_text(self, *texts: str) -> list[str]:
        """All of these, of whatever lines; a border of a dialogue between two lines is passed over."""

        def shown(rows: list[str]) -> bool:
            text = " ".join(" ".join(row.strip(" │") for row in rows).split())
            return all(each in text for each in texts)

        return self.until(shown, str(texts))

    def ranks(self) -> list[str]:
        return [row.split()[1] for row in self.rows if row.startswith("trainer ")]

    def until_ranks(self, *ranks: str) -> None:
        self.until(lambda _: self.ranks() == list(ranks), f"the trainers {ranks}")

    def type_in(self, text: bytes | str) -> None:
        self.launch.type_in(text.encode() if isinstance(text, str) else text)

    def quit(self) -> None:
        self.type_in("q")
        assert self.launch.wait() == 0, self.launch
