"""What a table refuses. Ground of the tables: imports nothing."""


class TableError(ValueError):
    """A request that does not fit the table."""


class ShapeError(TableError):
    """Values of another shape than the table's."""


class KeysError(TableError):
    """Keys where there are none, none where they are needed, or not (n,) int64."""


class NotFiniteError(TableError):
    """NaN or infinity among the gradients."""


class FullError(TableError):
    """No room for more rows."""
