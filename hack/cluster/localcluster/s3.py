"""The S3 server of the cluster: versitygw over a folder, with real conditional writes and checksums.

Reachable from pods at `http://172.31.77.1:7070` and, through a Service without a selector, at
`http://s3.rtj-system.svc:7070`; from the host through the forwarder.
"""

from __future__ import annotations

from localcluster.api import Api
from localcluster.processes import Spec
from localcluster.settings import (
    CONTROL_PLANE_IP,
    CONTROL_PLANE_NS,
    S3_ACCESS_KEY,
    S3_PORT,
    S3_REGION,
    S3_SECRET_KEY,
    S3_SERVICE_NAMESPACE,
    Settings,
)

NAME = "s3"


def server(settings: Settings) -> Spec:
    """The process; its buckets are the folders below `STATE/s3/data`."""
    data, metadata = settings.state / "s3/data", settings.state / "s3/metadata"
    data.mkdir(parents=True, exist_ok=True)
    metadata.mkdir(parents=True, exist_ok=True)
    argv = ["versitygw", f"--port={CONTROL_PLANE_IP}:{S3_PORT}", f"--region={S3_REGION}", "--quiet"]
    argv += ["posix", f"--sidecar={metadata}", str(data)]
    secrets = {"ROOT_ACCESS_KEY": S3_ACCESS_KEY, "ROOT_SECRET_KEY": S3_SECRET_KEY}
    return Spec(NAME, argv, CONTROL_PLANE_NS, env=secrets)


def create_service(api: Api) -> None:
    """Give the server a name inside the cluster."""
    namespace = f"/api/v1/namespaces/{S3_SERVICE_NAMESPACE}"
    api.create("/api/v1/namespaces", {"metadata": {"name": S3_SERVICE_NAMESPACE}})
    port = {"name": "http", "port": S3_PORT, "protocol": "TCP"}
    api.create(f"{namespace}/services", {"metadata": {"name": "s3"}, "spec": {"ports": [port]}})
    slices = f"/apis/discovery.k8s.io/v1/namespaces/{S3_SERVICE_NAMESPACE}/endpointslices"
    metadata = {"name": "s3", "labels": {"kubernetes.io/service-name": "s3"}}
    endpoint = {"addresses": [CONTROL_PLANE_IP], "conditions": {"ready": True}}
    api.create(
        slices, {"metadata": metadata, "addressType": "IPv4", "ports": [port], "endpoints": [endpoint]}
    )
