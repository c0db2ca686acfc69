"""Keeping a placement's pods off nodes that were lost: such a node may still look ready for some seconds (O11)."""

import copy
from collections.abc import Sequence
from typing import Any

from rtj_operator.api.base import JsonObject, dig

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def away_from(nodes: Sequence[str], affinity: Any) -> JsonObject:
    """The template's affinity, with none of `nodes` allowed. Its terms are alternatives, so each of them gets the
    rule."""
    result: JsonObject = copy.deepcopy(affinity) if isinstance(affinity, dict) else {}
    terms = dig(result, "nodeAffinity", _REQUIRED, "nodeSelectorTerms") or [{}]
    kept_away = [
        {**term, "matchFields": [*(term.get("matchFields") or []), *map(_not_on, nodes)]} for term in terms
    ]
    node_affinity = {**(result.get("nodeAffinity") or {}), _REQUIRED: {"nodeSelectorTerms": kept_away}}
    return {**result, "nodeAffinity": node_affinity}


def _not_on(node: str) -> JsonObject:
    return {"key": "metadata.name", "operator": "NotIn", "values": [node]}
