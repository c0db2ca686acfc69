"""The operator among a thousand jobs: a real API server and S3 server, pods that are objects with a simulated sidecar.

What is measured is the operator alone: the pods are made by the simulation, since Kubernetes' own Job controller makes
20 a second for the whole cluster (operator.md O12).
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterable

from figures import Figure

from scale.course import run


def measure(options: argparse.Namespace) -> Iterable[Figure]:
    """All figures of one run, as they come."""
    course = run(options.jobs, options.failures, options.idle_seconds)

    async def following() -> Figure | None:
        return await anext(course, None)

    with asyncio.Runner() as runner:
        try:
            while (figure := runner.run(following())) is not None:
                yield figure
        finally:
            runner.run(course.aclose())
