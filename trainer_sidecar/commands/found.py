"""A run as the commands find it: its history, a checkpoint by name, and in whose name entries are appended.

The command line appends as the operator does (protocol R4): entries carry the run's owner and the newest epoch.
"""

import argparse
import getpass
import os
import socket

from trainer_sidecar.contract.journal import Owner, RestorePoint
from trainer_sidecar.contract.keys import parse_checkpoint_id
from trainer_sidecar.store.history import History
from trainer_sidecar.store.quarantine import why_not

APPEND_SECONDS = 30.0
NEWEST = "newest"


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
        required=required,
        default=None if required else _user(),
        help="the person who answers for it" + ("" if required else " (default: the user of this process)"),
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"
