"""What operator, sidecar, launcher and training library agree on: documents, key names, files of the shared volume.

Every document that crosses a process boundary is declared here, once, as a pydantic model; everybody else imports
it. The package may import neither torch, boto3, kubernetes nor kopf, and does no I/O of its own.
"""

CONTRACT_VERSION = 1
"""Version of everything in this package. Library, launcher, sidecar and operator compare it and refuse a mismatch."""

API_GROUP = "resumabletraining.io"
API_VERSION = "v1alpha1"
