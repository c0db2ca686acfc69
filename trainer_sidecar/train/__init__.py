"""The training library: lives in the ranks; captures, stages, restores and checks state. No store, no credentials."""

from trainer_sidecar.train.environment import join
from trainer_sidecar.train.errors import (
    EnvironmentMissing,
    Fenced,
    FolderRefused,
    FolderUnusable,
    ResumeRefused,
    SaveFailed,
    SidecarLost,
    TrainingLibraryError,
)
from trainer_sidecar.train.fingerprint_content import DatasetManifest
from trainer_sidecar.train.fingerprints import fingerprint
from trainer_sidecar.train.folder_session import FolderSession
from trainer_sidecar.train.mixture import Mixture
from trainer_sidecar.train.order import SampleOrder
from trainer_sidecar.train.packing import Packed
from trainer_sidecar.train.rank_0 import OfRank0
from trainer_sidecar.train.session import Session
from trainer_sidecar.train.stage import Stage
from trainer_sidecar.train.stateful import StatefulLoader
from trainer_sidecar.train.streams import Streams

__all__ = [
    "DatasetManifest",
    "EnvironmentMissing",
    "Fenced",
    "FolderRefused",
    "FolderSession",
    "FolderUnusable",
    "Mixture",
    "OfRank0",
    "Packed",
    "ResumeRefused",
    "SampleOrder",
    "SaveFailed",
    "Session",
    "SidecarLost",
    "Stage",
    "StatefulLoader",
    "Streams",
    "TrainingLibraryError",
    "fingerprint",
    "join",
]
