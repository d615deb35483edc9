"""Store tables in mapped files. One process changes them while others read an older version.

A record is the key | version * 2, plus 1 if the row was removed | slot + 1 of the record that it replaces, or
0 | values, in words of 8 bytes. An entry of the index is 16 bits of the hash of the key | slot + 1 in 48
bits. An entry is 0 if it is empty, and _BURIED if its row was removed. Probing is linear.

A change first writes a record that readers cannot reach. Then one store writes the entry that leads to the
record. A reader of version v follows the chain of replaced records to the first record that is not newer than
v. The caller reuses a record only when no reader needs it. An entry therefore never leads to a record that is
free for reuse.
"""

from __future__ import annotations

import numpy as np

from trainers.kernels.compiled import Keys, Scalar, Words, compiled
from trainers.ps.kernels.index import keyed_hash
from trainers.ps.kernels.memory import fence, prefetch

HEAD = 3
"""The number of words in a record before its values."""

_SLOT = np.uint64((1 << 48) - 1)
_TAG = np.uint64(48)
_BURIED = _SLOT
_NONE = np.uint64(0)
_ONE = np.uint64(1)
_BLOCK = 32


@compiled
def seek(index: Words, records: Keys, stride: Scalar, key: Scalar, mixed: Scalar) -> tuple[Scalar, Scalar]:
    """Return the place of the key's entry and the slot. For a missing key, return the empty place where the
    key belongs, and -1.

    Each entry is read once, because it may change meanwhile.
    """
    mask = np.uint64(len(index) - 1)
    place = mixed & mask
    tag = mixed >> _TAG
    while True:
        entry = index[place]
        if entry == _NONE:
            return np.int64(place), -1
        if entry >> _TAG == tag and (entry & _SLOT) != _BURIED:
            slot = np.int64((entry & _SLOT) - _ONE)
            if records[slot * stride] == key:
                return np.int64(place), slot
        place = (place + _ONE) & mask


@compiled
def find_shared(
    index: Words, records: Keys, secret: Words, stride: Scalar, version: Scalar, keys: Keys, out: Keys,
    missing: Keys,
) -> int:  # fmt: skip
    """Write the values of key n to out[n * words : (n + 1) * words]. Write the positions of keys without a
    row to `missing`, and return their number.
    """
    words, found, count = stride - HEAD, 0, len(keys)
    mask = np.uint64(len(index) - 1)
    mixed = np.empty(_BLOCK, np.uint64)
    for start in range(0, count, _BLOCK):
        stop = min(start + _BLOCK, count)
        for position in range(start, stop):
            word = keyed_hash(keys[position], secret[0], secret[1])
            mixed[position - start] = word
            prefetch(index, np.int64(word & mask))
        for position in range(start, stop):
            entry = index[mixed[position - start] & mask]
            if entry != _NONE and (entry & _SLOT) != _BURIED:
                base = np.int64((entry & _SLOT) - _ONE) * stride
                for word_number in range(0, stride, 8):
                    prefetch(records, base + word_number)
                prefetch(records, base + stride - 1)
        for position in range(start, stop):
            _, slot = seek(index, records, stride, keys[position], mixed[position - start])
            while slot >= 0 and records[slot * stride + 1] >> 1 > version:
                slot = records[slot * stride + 2] - 1
            if slot < 0 or records[slot * stride + 1] & 1:
                missing[found] = position
                found += 1
                continue
            base = slot * stride + HEAD
            for word_number in range(words):
                out[position * words + word_number] = records[base + word_number]
    return found


@compiled
def put_shared(
    index: Words, records: Keys, secret: Words, stride: Scalar, version: Scalar, keys: Keys, values: Keys,
    slots: Keys, replaced: Keys,
) -> tuple[int, int, int]:  # fmt: skip
    """Set the rows of these keys to these values in this version.

    `slots` has one slot per key that readers cannot reach. Return the number of replaced rows, whose slots
    are in `replaced`, the number of new entries, and the number of keys that had no row.
    """
    words, before, new, added = stride - HEAD, 0, 0, 0
    for position in range(len(keys)):
        key = keys[position]
        mixed = keyed_hash(key, secret[0], secret[1])
        place, slot = seek(index, records, stride, key, mixed)
        base = slots[position] * stride
        records[base] = key
        records[base + 1] = version << 1
        records[base + 2] = slot + 1
        for word_number in range(words):
            records[base + HEAD + word_number] = values[position * words + word_number]
        fence()  # a reader that finds the record finds it complete
        index[place] = ((mixed >> _TAG) << _TAG) | np.uint64(slots[position] + 1)
        if slot < 0 or records[slot * stride + 1] & 1:
            added += 1
        if slot < 0:
            new += 1
        else:
            replaced[before] = slot
            before += 1
    return before, new, added


@compiled
def remove_shared(
    index: Words, records: Keys, secret: Words, stride: Scalar, version: Scalar, keys: Keys, slots: Keys,
    replaced: Keys,
) -> int:  # fmt: skip
    """Remove the rows of these keys in this version, and return the number of removed rows.

    Each removed row uses one of `slots`, from the first on. Its former slot goes into `replaced`.
    """
    count = 0
    for key in keys:
        mixed = keyed_hash(key, secret[0], secret[1])
        place, slot = seek(index, records, stride, key, mixed)
        if slot < 0 or records[slot * stride + 1] & 1:
            continue
        base = slots[count] * stride
        records[base] = key
        records[base + 1] = (version << 1) | 1
        records[base + 2] = slot + 1
        fence()
        index[place] = ((mixed >> _TAG) << _TAG) | np.uint64(slots[count] + 1)
        replaced[count] = slot
        count += 1
    return count


@compiled
def bury(
    index: Words, records: Keys, secret: Words, stride: Scalar, removed: Keys, freed: Keys
) -> int:  # fmt: skip
    """Mark entries as _BURIED if they still lead to these records of removed rows. Return their number.

    Their slots go into `freed`. The other keys have rows again, which will replace these records.
    """
    count = 0
    for slot in removed:
        key = records[slot * stride]
        mixed = keyed_hash(key, secret[0], secret[1])
        place, current = seek(index, records, stride, key, mixed)
        if current == slot:
            index[place] = ((mixed >> _TAG) << _TAG) | _BURIED
            freed[count] = slot
            count += 1
    return count


@compiled
def index_again(index: Words, records: Keys, secret: Words, stride: Scalar, fresh: Words) -> int:
    """Write all entries except _BURIED entries to another index of zeros. Return their number."""
    mask = np.uint64(len(fresh) - 1)
    count = 0
    for entry in index:
        if entry == _NONE or (entry & _SLOT) == _BURIED:
            continue
        key = records[np.int64((entry & _SLOT) - _ONE) * stride]
        place = keyed_hash(key, secret[0], secret[1]) & mask
        while fresh[place] != _NONE:
            place = (place + _ONE) & mask
        fresh[place] = entry
        count += 1
    return count
