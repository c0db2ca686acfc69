"""Which right of the operator is missing, from the API server's answer: said where users look, with what to grant.

403 is also what admission answers (quota, pod security, a webhook): that is about the object and not about a right.
"""

import re

from rtj_operator.kube import KubeError

_RBAC = re.compile(
    r'cannot (?P<verb>[\w*]+) resource "(?P<resource>[^"]+)"(?: in API group "(?P<group>[^"]*)")?'
    r'(?: in the namespace "(?P<namespace>[^"]*)"| (?P<cluster>at the cluster scope))?'
)


def missing_right(exc: KubeError) -> str:
    """The right to grant, in a sentence with the server's own; empty when `exc` is about something else."""
    if exc.status == 401:
        return f"the API server does not accept the operator's token or certificate: renew it: {exc.sentence}"
    found = _RBAC.search(exc.sentence)
    if found is None:
        return ""
    kind = ".".join(filter(None, (found["resource"], found["group"])))
    where = f" in namespace {found['namespace']}" if found["namespace"] else ""
    where = " for the whole cluster" if found["cluster"] else where
    grant = f"grant {found['verb']} on {kind}{where}"
    return f"the operator lacks a right: {grant} (the chart's roles have it): {exc.sentence}"
