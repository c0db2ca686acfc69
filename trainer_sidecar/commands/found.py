"""A run as the commands find it: its history, a checkpoint by name, and in whose name entries are appended.

The command line appends as the operator does (protocol R4): entries carry the run's owner and the newest epoch.
"""

import argparse
import getpass
import os
import socket
import sys
from collections.abc import Callable

from trainer_sidecar.contract.journal import Owner, RestorePoint
from trainer_sidecar.contract.keys import parse_checkpoint_id
from trainer_sidecar.store.base import Store, StoreError
from trainer_sidecar.store.history import History
from trainer_sidecar.store.journal import Journal, JournalError
from trainer_sidecar.store.quarantine import why_not

APPEND_SECONDS = 30.0
NEWEST = "newest"
_RUNS_NAMED = 8


def read_run(journal: Journal) -> History:
    """The run's history. A journal that is damaged or too new is shown as far as it can be read, with a word on stderr.

    Raises ValueError for a run without a journal, naming the runs that the store has.
    """
    history = journal.read()
    try:
        journal.check_writable(history)
    except JournalError as exc:
        print(f"rtj: {exc}", file=sys.stderr)
    if history.damage:
        print(f"rtj: {history.damage}", file=sys.stderr)
    if not history.tail:
        keys = journal.keys
        raise ValueError(
            f"no run {keys.namespace}/{keys.run_id} in {journal.store.url}: "
            f"check --store, --namespace and --run-id; {_what_is_there(journal.store)}"
        )
    return history


def _what_is_there(store: Store) -> str:
    try:
        found = _runs_in(store)
    except StoreError as exc:  # who may read one run may not be allowed to list all
        return f"its runs cannot be listed ({exc.reason})"
    return f"it has {', '.join(found)}" if found else "it has no run"


def _runs_in(store: Store) -> list[str]:
    """`namespace/run` of the first runs, one listing for each: it goes on behind all objects of the one before."""
    runs: dict[str, None] = {}
    after = ""
    for _ in range(_RUNS_NAMED + 1):
        item = next(iter(store.list("", start_after=after)), None)
        if item is None:
            return list(runs)
        parts = item.key.split("/")
        if len(parts) > 2:
            runs["/".join(parts[:2])] = None
        after = "/".join([*parts[:2], "~"])  # "~" sorts behind every name that a run's folder holds
    return [*list(runs)[:_RUNS_NAMED], "..."]


def find_checkpoint(history: History, wanted: str) -> RestorePoint:
    """A commit by id, or 'newest': what a resume would take. Raises ValueError that names the newest commits."""
    if wanted == NEWEST:
        if history.newest_restorable is None:
            raise ValueError("this run has no checkpoint that a resume would take")
        return history.newest_restorable
    parse_checkpoint_id(wanted)
    if wanted not in history.manifests:
        raise ValueError(f"checkpoint {wanted} {why_not(history, wanted)}")
    return history.restore_point_of(wanted)


def find_stored(history: History, wanted: str) -> RestorePoint:
    """As `find_checkpoint`, for who wants to read its objects. Raises ValueError for one that is retired as well."""
    point = find_checkpoint(history, wanted)
    if point.checkpoint_id in history.retired:
        raise ValueError(f"checkpoint {wanted} {why_not(history, wanted)}")
    return point


def line(limit: int) -> Callable[[str], str]:
    """An argument that goes into the journal for people to read: one line of text, at most `limit` characters."""

    def parse(text: str) -> str:
        if not text.strip() or not text.isprintable():
            raise argparse.ArgumentTypeError(f"{text[:80]!a} is not a line of text")
        if len(text) > limit:
            raise argparse.ArgumentTypeError(f"{len(text)} characters, the limit is {limit}")
        return text

    return parse


def owner_of(history: History) -> Owner:
    """The run's owner, in whose name the command line appends. Raises ValueError for a run that does not exist."""
    if history.owner is None:
        raise ValueError("this run has no attempt in its journal: check --store, --namespace and --run-id")
    return history.owner


def writer() -> str:
    """Who appends, for people."""
    return f"rtj/{socket.gethostname()}-{os.getpid()}"


def add_by(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    """--by: the person who answers for it."""
    parser.add_argument(
        "--by",
        metavar="NAME",
        type=line(200),
        required=required,
        default=None if required else _user(),
        help="the person who answers for it" + ("" if required else " (default: the user of this process)"),
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"
