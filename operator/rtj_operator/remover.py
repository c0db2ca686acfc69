"""One part of a run's removal at its store, and what is said of it. Blocks, in threads of its own: a removal of many
objects must not keep an attempt from being fenced.
"""

from dataclasses import dataclass

from rtj_operator.api.effective import EffectiveSpec
from rtj_operator.conditions import EventReason
from rtj_operator.decide.actions import Event
from rtj_operator.decide.removal import LET_GO
from rtj_operator.fencetrouble import FenceTrouble, trouble
from rtj_operator.fencing import APPEND_TIMEOUT, Stores
from rtj_operator.text import many
from trainer_sidecar.contract.journal import Owner
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.store.base import StoreError
from trainer_sidecar.store.fence import FenceError
from trainer_sidecar.store.journal import JournalError
from trainer_sidecar.store.removal import Removal, remove_run
from trainer_sidecar.store.verify import FormatTooNewError

ABOUT = "removal"
"""Of the trouble that a removal meets: told apart from the same trouble of an attempt."""


@dataclass(frozen=True)
class RemovalOrder:
    """Whose run shall go, and what is known of it."""

    spec: EffectiveSpec
    owner: Owner
    writer: str
    known_attempts: int
    credentials: dict[str, str]


def remove(stores: Stores, order: RemovalOrder) -> Removal:
    """Delete a part of the run. Blocks. Raises FenceTrouble with what is in the way and how to let the object go,
    Unavailable."""
    source = order.spec.resume_from
    kept = None
    try:
        kept = stores.journal(order.spec, order.credentials)
        with kept.use() as journal:
            return remove_run(
                journal,
                owner=order.owner,
                writer=order.writer,
                known_attempts=order.known_attempts,
                source=RunKeys(order.spec.namespace, source.run_id) if source else None,
                timeout=APPEND_TIMEOUT,
            )
    except (StoreError, FenceError, JournalError, FormatTooNewError, ValueError) as exc:
        if kept is not None:
            stores.forget(kept)
        found = trouble(exc)
        text = f"the checkpoints cannot be deleted now: {found}. It is tried again; or {LET_GO}"
        raise FenceTrouble(found.reason, text, about=ABOUT) from exc


def said(removal: Removal, spec: EffectiveSpec, left_behind: tuple[str, ...] = ()) -> tuple[Event, ...]:
    """Events of a removal that has come to its end. `left_behind`: pods that nobody could end."""
    keys = RunKeys(spec.namespace, spec.run_id)
    where = f"run {keys.prefix} in {spec.store.url}"
    events = []
    if removal.total or removal.objects or not removal.kept:
        text = f"{where}: {many(removal.total, 'checkpoint')} deleted; its journal stays"
        events.append(Event(EventReason.CHECKPOINTS_DELETED, text, "removal/done"))
    told = [f"these stay: {'; '.join(removal.kept)}"] if removal.kept else []
    if left_behind:
        told.append(
            f"{', '.join(left_behind[:3])} could not be ended and may upload still: nobody sweeps this run again, so "
            f"delete what lies below {keys.checkpoints_prefix} once they have ended"
        )
    if told:
        text = f"{where}: {'; '.join(reversed(told))}"[:1000]
        events.append(Event(EventReason.CHECKPOINTS_KEPT, text, "removal/kept", warning=True))
    return tuple(events)
