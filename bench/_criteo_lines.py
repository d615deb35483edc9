"""Convert Criteo's logs with a MultiSlotDataGenerator, one line at a time, as a pipe command."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from trainers.data.generator import MultiSlotDataGenerator, Sample
from trainers.examples.criteo_reader import CATEGORIES, DENSE, category_id, label_of, normal

NAMES = ("dense_input", *(f"C{number}" for number in range(1, CATEGORIES + 1)), "label")


class CriteoReader(MultiSlotDataGenerator):
    def generate_sample(self, line: str | None) -> Callable[[], Iterator[Sample]]:
        def samples() -> Iterator[Sample]:
            label, *fields = (line or "").rstrip("\r\n").split("\t")
            dense = [normal(column, fields[column]) for column in range(DENSE)]
            ids = [[category_id(slot, fields[DENSE + slot])] for slot in range(CATEGORIES)]
            yield list(zip(NAMES, [dense, *ids, [label_of(label)]], strict=True))

        return samples


if __name__ == "__main__":
    CriteoReader().run_from_stdin()
