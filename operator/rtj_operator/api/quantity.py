"""Kubernetes quantities as exact numbers, for the few sums that we make with them (memory of the shared volume)."""

import re
from decimal import Decimal

_QUANTITY = re.compile(
    r"^([+-]?[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:([eE][+-]?[0-9]{1,2})|(Ki|Mi|Gi|Ti|Pi|Ei|n|u|m|k|M|G|T|P|E))?$"
)
_SUFFIX = {
    **{name: Decimal(1024) ** (i + 1) for i, name in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"))},
    **{
        name: Decimal(1000) ** (i - 3)
        for i, name in enumerate(("n", "u", "m", "", "k", "M", "G", "T", "P", "E"))
    },
}


def parse_quantity(value: object) -> Decimal:
    """The number that a quantity stands for ("64Gi", "500m", 3). Raises ValueError naming the text."""
    text = str(value).strip()
    match = _QUANTITY.match(text)
    if not match:
        raise ValueError(f"{text!r} is not a Kubernetes quantity, as in 64Gi or 500m")
    number, exponent, suffix = match.groups()
    return Decimal(number + (exponent or "")) * _SUFFIX[suffix or ""]


def format_bytes(number: Decimal) -> str:
    """Whole bytes, rounded up, in the largest binary unit that is exact: 68719476736 is 64Gi."""
    whole = int(number.to_integral_value(rounding="ROUND_CEILING"))
    for unit in ("Ei", "Pi", "Ti", "Gi", "Mi", "Ki"):
        size = int(_SUFFIX[unit])
        if whole >= size and whole % size == 0:
            return f"{whole // size}{unit}"
    return str(whole)
