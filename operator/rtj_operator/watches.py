"""kopf as the source of watch events: its handlers put a key on the queue and keep the last body of a pod, no more.

kopf runs in a thread and an event loop of its own. Two properties of kopf ask for that: when one of its root tasks
ends it cancels every task of its loop that it does not know, and an error in a watch stream that is no 410 ends all
of it. The supervisor here starts it again, so that API trouble never ends or freezes the process.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import kopf

from rtj_operator.kube import DRILLS, JOBS, PODS, RTJ, Object

log = logging.getLogger(__name__)
Handler = Callable[[str, Object], None]
"""Called in kopf's thread with the event type (ADDED, MODIFIED, DELETED, or "" while listing) and the object."""
LISTED_AT_ONCE = 100
"""Objects in one answer when a watch begins."""
IDLE_SECONDS = 0.1
"""kopf has a task for each object of which it heard lately, and that holds the last body: with kopf's 5 s, a start
among thousands of pods has all of their bodies in memory at once."""


class EndlessBackoffs:
    """1, 1, 2, 3, 5, 8, 13, 21, 21, ... seconds for ever. kopf gives up after the last of a sized collection."""

    def __iter__(self) -> Iterator[float]:
        current, after = 1.0, 1.0
        while True:
            yield current
            current, after = after, min(21.0, current + after)


@dataclass(frozen=True)
class WatchOptions:
    """What to watch. An empty `namespaces` means the whole cluster; `login` gives kopf its credentials."""

    login: Callable[..., Any]
    label_selector: str
    namespaces: tuple[str, ...] = ()


@dataclass
class Supervisor:
    """Keeps kopf running in its own thread until `stop`."""

    options: WatchOptions
    on_job: Handler
    on_owned: Handler
    on_restart: Callable[[], None] = lambda: None
    on_drill: Handler = lambda *_: None
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._supervise, name="kopf", daemon=True)
        self._thread.start()

    def stop(self, timeout: float = 10.0) -> None:
        """Ask kopf to end and wait for its thread."""
        self._stop.set()
        if self._thread:
            self._thread.join(timeout)

    def _supervise(self) -> None:
        backoffs = iter(EndlessBackoffs())
        while not self._stop.is_set():
            started = time.monotonic()
            try:
                asyncio.run(self._run_once())
            except Exception:  # whatever ended kopf, the answer is the same: watch again
                log.exception("the watches ended with an error; starting them again")
            if self._stop.is_set():
                return
            self.on_restart()
            if time.monotonic() - started > 60:
                backoffs = iter(EndlessBackoffs())
            self._stop.wait(next(backoffs))

    async def _run_once(self) -> None:
        await kopf.operator(
            registry=self._registry(),
            settings=_settings(self.options.label_selector),
            standalone=True,
            clusterwide=not self.options.namespaces,
            namespaces=list(self.options.namespaces),
            # kopf would ask for the name of the user, and a container's numeric user has none.
            identity="rtj-operator",  # type: ignore[arg-type]  # a NewType of str that kopf does not export
            stop_flag=self._stop,
        )

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()
        kopf.on.login(registry=registry)(self.options.login)

        async def job_event(event: Any, **_: Any) -> None:
            self.on_job(event.get("type") or "", dict(event["object"]))

        async def owned_event(event: Any, **_: Any) -> None:
            self.on_owned(event.get("type") or "", dict(event["object"]))

        async def drill_event(event: Any, **_: Any) -> None:
            self.on_drill(event.get("type") or "", dict(event["object"]))

        kopf.on.event(RTJ.group, RTJ.version, RTJ.plural, id="rtj", registry=registry)(job_event)
        kopf.on.event(DRILLS.group, DRILLS.version, DRILLS.plural, id="drill", registry=registry)(drill_event)
        kopf.on.event(JOBS.group, JOBS.version, JOBS.plural, id="job", registry=registry)(owned_event)
        kopf.on.event("", PODS.version, PODS.plural, id="pod", registry=registry)(owned_event)
        return registry


class NoDiffs(kopf.DiffBaseStorage):
    """No essence of an object is kept or compared: only raw events are wanted, and kopf would copy every body twice to
    find out what changed for handlers that there are none of."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence({})

    def fetch(self, **_: Any) -> kopf.BodyEssence | None:
        return None

    def store(self, **_: Any) -> None:
        return None


def _settings(label_selector: str) -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.persistence.diffbase_storage = NoDiffs()
    settings.watching.chunk_size = LISTED_AT_ONCE
    settings.queueing.idle_timeout = IDLE_SECONDS
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
    settings.watching.connect_timeout = 10
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 10
    settings.networking.error_backoffs = EndlessBackoffs()
    settings.process.ultimate_exiting_timeout = (
        None  # never let kopf kill the process: the supervisor restarts it
    )
    settings.watching.label_selectors[JOBS.group, JOBS.plural] = label_selector
    settings.watching.label_selectors["", PODS.plural] = label_selector
    return settings
