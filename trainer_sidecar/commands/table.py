"""Tables for people and JSON for programs, from the same rows."""

import json
from collections.abc import Mapping, Sequence
from typing import Any


def print_rows(rows: Sequence[Mapping[str, Any]], *, output: str) -> None:
    """Rows as a table (columns in the first row's order, aligned) or as one JSON array."""
    if output == "json":
        print(json.dumps(list(rows), indent=2))
        return
    if not rows:
        print("nothing to show")
        return
    columns = list(rows[0])
    cells = [[c.upper() for c in columns], *([text_of(row.get(c)) for c in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


def text_of(value: Any) -> str:
    """A value as a cell: lists with commas, "-" for nothing, control characters as escapes (a terminal obeys them)."""
    if value is None or value == "":
        return "-"
    text = ",".join(map(str, value)) or "-" if isinstance(value, list) else str(value)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
