"""How many pods of a template each node could hold: the arithmetic behind shrinking at once and growing back. Pure.

A guess, as good as resources, readiness, cordons, taints, node selector and node affinity allow; the scheduler has the
last word, and a wrong guess ends as a pod that cannot be scheduled.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

from rtj_operator.api.quantity import parse_quantity
from rtj_operator.decide.observed import NodeRoom
from rtj_operator.podview import condition, unix

Object = dict[str, Any]
Amounts = dict[str, Decimal]
MOST = 4096


class Usage:
    """What pods hold on each node, in sum and for each owner apart."""

    def __init__(self) -> None:
        self._all: dict[str, Amounts] = {}
        self._own: dict[str, dict[str, Amounts]] = {}

    def add(self, pod: Object, owner: str = "") -> None:
        """Count a pod that has a node. `owner`: whose it is, for `without`."""
        node = pod.get("spec", {}).get("nodeName")
        if not node:
            return
        for name, amount in pod_requests(pod["spec"]).items():
            _add(self._all.setdefault(node, {}), name, amount)
            if owner:
                _add(self._own.setdefault(owner, {}).setdefault(node, {}), name, amount)

    def without(self, owner: str) -> Mapping[str, Amounts]:
        """By node, all but that owner's."""
        own = self._own.get(owner, {})
        less = {n: {k: v - own[n].get(k, Decimal(0)) for k, v in self._all[n].items()} for n in own}
        return {**self._all, **less}


def _add(amounts: Amounts, name: str, amount: Decimal) -> None:
    amounts[name] = amounts.get(name, Decimal(0)) + amount


def node_rooms(nodes: Iterable[Object], used: Mapping[str, Amounts], template: Object) -> list[NodeRoom]:
    """Room on every node, by name, for pods of `template` beside what is `used` on each."""
    spec = template.get("spec", {})
    wanted = pod_requests(spec)
    return [_room(n, used.get(n["metadata"]["name"], {}), wanted, spec) for n in _by_name(nodes)]


def pod_requests(spec: Mapping[str, Any]) -> Amounts:
    """What a pod holds on its node: containers and native sidecars together, plus one pod."""
    total: Amounts = defaultdict(Decimal)
    total["pods"] = Decimal(1)
    native = [c for c in spec.get("initContainers") or [] if c.get("restartPolicy") == "Always"]
    for container in [*(spec.get("containers") or []), *native]:
        resources = container.get("resources") or {}
        for name, amount in {**(resources.get("limits") or {}), **(resources.get("requests") or {})}.items():
            total[name] += parse_quantity(amount)
    return dict(total)


def _room(node: Object, used: Amounts, wanted: Amounts, spec: Mapping[str, Any]) -> NodeRoom:
    ready = condition(node, "Ready")
    allocatable = node.get("status", {}).get("allocatable") or {}
    usable = _admits(node, spec)
    fits = min((_times(allocatable.get(n), used.get(n, Decimal(0)), a) for n, a in wanted.items()), default=0)
    return NodeRoom(
        name=node["metadata"]["name"],
        ready=ready.get("status") == "True",
        ready_since=unix(ready.get("lastTransitionTime")),
        fits=fits if usable else 0,
    )


def _times(total: Any, used: Decimal, amount: Decimal) -> int:
    """How often `amount` fits into what is left."""
    if amount <= 0:
        return MOST
    left = (parse_quantity(total) if total is not None else Decimal(0)) - used
    return max(0, min(MOST, int(left // amount)))


def _admits(node: Object, spec: Mapping[str, Any]) -> bool:
    """Not cordoned, node selector and required affinity match, every taint that keeps pods out is tolerated."""
    if node.get("spec", {}).get("unschedulable"):
        return False
    labels = node["metadata"].get("labels") or {}
    if any(labels.get(k) != v for k, v in (spec.get("nodeSelector") or {}).items()):
        return False
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    if required and not any(_matches(term, node) for term in required.get("nodeSelectorTerms") or []):
        return False
    taints = [
        t for t in node.get("spec", {}).get("taints") or [] if t.get("effect") in ("NoSchedule", "NoExecute")
    ]
    return all(any(_tolerates(o, t) for o in spec.get("tolerations") or []) for t in taints)


def _matches(term: Mapping[str, Any], node: Object) -> bool:
    """One term of a node affinity: all its expressions hold. One without any matches no node, as in Kubernetes."""
    labels = node["metadata"].get("labels") or {}
    fields = {"metadata.name": node["metadata"]["name"]}
    wanted = [(labels, e) for e in term.get("matchExpressions") or []]
    wanted += [(fields, e) for e in term.get("matchFields") or []]
    return bool(wanted) and all(_holds(of.get(e.get("key", "")), e) for of, e in wanted)


def _holds(found: str | None, expression: Mapping[str, Any]) -> bool:
    values = [str(v) for v in expression.get("values") or []]
    match expression.get("operator"):
        case "In":
            return found in values
        case "NotIn":
            return found not in values
        case "Exists":
            return found is not None
        case "DoesNotExist":
            return found is None
        case "Gt" | "Lt" as than if found is not None and values:
            try:
                return int(found) > int(values[0]) if than == "Gt" else int(found) < int(values[0])
            except ValueError:
                return False
    return False


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return toleration.get("key") in (None, "", taint.get("key"))
    return toleration.get("key") == taint.get("key") and toleration.get("value", "") == taint.get("value", "")


def _by_name(nodes: Iterable[Object]) -> list[Object]:
    return sorted(nodes, key=lambda n: str(n["metadata"]["name"]))
