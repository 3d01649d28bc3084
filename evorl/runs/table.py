"""Tables of rows stored by column, and their conversion to arrays. Axes: N rows."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from evorl.runs.json_lines import Row
from evorl.types import UserError

ABSENT, FLOAT, INTEGER, POOLED, LIST, OBJECT = range(6)
"""Cell types."""
EXACT = 2**53
"""The largest magnitude up to which every integer is exact as a float."""
DEEP = 50
"""The nesting depth of lists and objects up to which values get columns; deeper ones are stored unchanged."""
SHORT = 8
"""The maximum length of lists of integers and strings, such as layer sizes, that equal rows share."""
MAX_COLUMNS = 10_000
"""The maximum number of columns of a table; a manipulated file could name almost one per byte."""


class Pool:
    """Interned non-numeric values, such as strings: equal ones are stored once."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._places: dict[tuple[type, Any], int] = {}

    def place(self, kind: type, key: Any, value: Any) -> int:
        """The index in `values` of a value, adding it if new; `kind` and `key` identify equal values."""
        found = self._places.setdefault((kind, key), len(self.values))
        if found == len(self.values):
            self.values.append(value)
        return found


class Column:
    """The values of one key in all rows: 9 bytes per cell, and none while all cells are equal.

    Each member of an object is a column of its own; the items of all lists form one column.
    """

    def __init__(self, pool: Pool, depth: int = 0) -> None:
        self.members: dict[str, Column] = {}
        self._pool = pool
        self._depth = depth
        self._count = 0
        self._first = (ABSENT, 0.0)
        self._kinds: bytearray | None = None  # None while all cells are the same.
        self._numbers = array("d")
        self._items: Column | None = None
        self._ends = array("q")

    def put(self, row: int, value: Any) -> None:
        """Set the cell of `row`, which must come after all rows set so far."""
        if row > self._count:
            self._add(ABSENT, 0.0, row - self._count)
        kind = type(value)
        if kind is float:
            self._add(FLOAT, value)
        elif kind is int and -EXACT <= value <= EXACT:
            self._add(INTEGER, float(value))
        elif kind is dict and self._depth < DEEP:
            self._add(OBJECT, 0.0)
            for name, member in value.items():
                column = self.members.get(name)
                if column is None:
                    column = self.members[name] = Column(self._pool, self._depth + 1)
                column.put(row, member)
        elif kind is not list and kind is not dict:
            self._add(POOLED, self._pool.place(kind, value, value))
        elif kind is list and len(value) <= SHORT and {type(item) for item in value} <= {int, str}:
            self._add(POOLED, self._pool.place(kind, repr(value), value))
        elif kind is list and self._depth < DEEP:
            self._add(LIST, float(len(self._ends)))
            if self._items is None:
                self._items = Column(self._pool, self._depth + 1)
            begin = self._ends[-1] if self._ends else 0
            for place, item in enumerate(value, start=begin):
                self._items.put(place, item)
            self._ends.append(begin + len(value))
        else:
            self._add(POOLED, self._pool.place(kind, id(value), value))

    def get(self, row: int) -> tuple[int, Any]:
        """The type and value of the cell of `row`."""
        if row >= self._count:
            return ABSENT, None
        kind, number = self._first if self._kinds is None else (self._kinds[row], self._numbers[row])
        if kind == FLOAT:
            return kind, number
        if kind == INTEGER:
            return kind, int(number)
        if kind == POOLED:
            value = self._pool.values[int(number)]
            return kind, list(value) if isinstance(value, list) else value
        if kind == OBJECT:
            cells = ((name, column.get(row)) for name, column in self.members.items())
            return kind, {name: value for name, (found, value) in cells if found != ABSENT}
        if kind == LIST and self._items is not None:
            place = int(number)
            begin = self._ends[place - 1] if place else 0
            return kind, [self._items.get(each)[1] for each in range(begin, self._ends[place])]
        return ABSENT, None

    def leaves(self, name: str) -> Iterator[tuple[str, Column]]:
        """Yield the columns with values other than objects, under dotted names such as `hyperparameters.gamma`."""
        kinds = {self._first[0]} if self._kinds is None else set(self._kinds)
        if kinds - {ABSENT, OBJECT}:
            yield name, self
        for member, column in self.members.items():
            yield from column.leaves(f"{name}.{member}")

    def array(self, rows: int) -> NDArray[Any]:
        """The cells [N] as float64 with NaN for missing ones, or as objects if some are not numbers."""
        numbers = self.numbers(rows)
        if numbers is None:
            values = np.empty(rows, dtype=object)
            values[:] = [None if kind == OBJECT else value for kind, value in map(self.get, range(rows))]
            return values
        return numbers

    def numbers(self, rows: int, strict: bool = True) -> NDArray[np.float64] | None:
        """The cells [N] as float64 with NaN for missing ones; None if `strict` and some are not numbers."""
        kinds, found = np.full(rows, ABSENT, dtype=np.uint8), np.full(rows, np.nan)
        if self._kinds is None:
            kinds[: self._count], found[: self._count] = self._first
        else:
            kinds[: self._count], found[: self._count] = self._kinds, self._numbers
        others = kinds == POOLED
        places, which = np.unique(found[others].astype(np.int64), return_inverse=True)
        values = [self._pool.values[place] for place in places]
        if strict and ((kinds == LIST).any() or not all(value is None or isinstance(value, int) for value in values)):
            return None
        found[(kinds != FLOAT) & (kinds != INTEGER)] = np.nan
        if values:
            found[others] = np.array([number(value) for value in values])[which]
        return found

    def _add(self, kind: int, number: float, count: int = 1) -> None:
        if self._kinds is None:
            if self._count == 0 or self._first == (kind, number):
                self._first = kind, number
                self._count += count
                return
            self._kinds = bytearray([self._first[0]]) * self._count
            self._numbers = array("d", [self._first[1]]) * self._count
        if count == 1:
            self._kinds.append(kind)
            self._numbers.append(number)
        else:
            self._kinds += bytearray([kind]) * count
            self._numbers.extend(array("d", [number]) * count)
        self._count += count


class Table(Sequence[Row]):
    """A sequence of dicts, stored by column."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self._root = Column(Pool())
        self._length = 0
        for row in rows:
            self._root.put(self._length, dict(row))
            self._length += 1

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(self._length))]
        row: Row = self._root.get(range(self._length)[index])[1]
        return row

    def __eq__(self, other: object) -> bool:
        """Compare row by row with any other sequence."""
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def columns(self) -> dict[str, Column]:
        """The columns that hold values, by their dotted names."""
        return dict(leaf for name, column in self._root.members.items() for leaf in column.leaves(name))

    def numbers(self, name: str) -> NDArray[np.float64]:
        """The values [N] of a key as float64; NaN for rows without a number."""
        column = self._root.members.get(name)
        found = None if column is None else column.numbers(len(self), strict=False)
        return np.full(len(self), np.nan) if found is None else found


def number(value: Any) -> float:
    """Convert a JSON value to float; NaN if it is not a number or overflows."""
    with contextlib.suppress(OverflowError):
        return float(value) if isinstance(value, int | float) else np.nan
    return np.nan


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, NDArray[Any]]:
    """Convert a table to columns [N] by name, with nested keys dotted as in `hyperparameters.gamma`.

    Numeric columns are float64, with NaN for missing values; all others have dtype object. Raises UserError if there
    are more than 10,000 columns, which no run writes.
    """
    table = as_table(rows)
    found = table.columns()
    if len(found) > MAX_COLUMNS:
        raise UserError(f"a table of {len(found):,} columns; a run writes less than {MAX_COLUMNS:,}")
    return {name: column.array(len(table)) for name, column in found.items()}


def as_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    return rows if isinstance(rows, Table) else Table(rows)
