"""One local cluster with the operator from its chart, and jobs on it, as a user with kubectl meets them."""

from __future__ import annotations

import copy
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import boto3
from botocore.exceptions import ClientError
from kubernetes.client import ApiException
from urllib3.exceptions import HTTPError

from hack.demo.cluster import Cluster
from hack.demo.settings import DemoError
from hack.demo.watch import ApiServer
from trainer_sidecar.audit.history import History, surviving_history
from trainer_sidecar.audit.journal import read_entries
from trainer_sidecar.audit.ledger import Ledgers
from trainer_sidecar.contract.journal import Attempt, Entry, Manifest
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.contract.status import SidecarStatus
from trainer_sidecar.store.open import open_store

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "charts" / "rtj-operator"
RELEASE, SYSTEM = "rtj", "rtj-system"
NAMESPACE = time.strftime("test-%d-%H%M%S")
LABEL = "rtj-cluster-tests"
BUCKET = "test-cluster"
IMAGES = {"operator": "localhost/rtj-operator:dev", "sidecar": "localhost/rtj-sidecar:dev"}
TRAINER_IMAGE = "localhost/rtj-base:dev"
GPUS = 2
"""Of each node."""
OPERATOR_NODE = "node1"
"""Where the operator runs, so that a test can cut the other node."""
START_SECONDS = 240.0
"""For pods and ranks to start: seconds on an idle machine, minutes on a busy one."""
POLL_SECONDS = 0.3
T = TypeVar("T")


@dataclass
class World:
    """The cluster, the namespace of the tests, and a folder that ranks write their ledgers into."""

    folder: Path
    cluster: Cluster = field(default_factory=Cluster)
    stamp: str = field(default_factory=lambda: time.strftime("%Y%m%d-%H%M%S"))
    jobs: list[Job] = field(default_factory=list)

    # ------------------------------------------------------------------------------------------ up and down

    def up(self) -> None:
        """Everything that the tests need, from whatever is there already."""
        self.cluster.tool("build", timeout=1800)
        self.cluster.tool("up", "--nodes", "2", "--gpus", str(GPUS), timeout=180)
        for node in ("1", "2"):
            self.cluster.tool("node", "heal", node)
        for target, tag in IMAGES.items():
            self.cluster.build_image(target, tag)
        self.cluster.tool("base-image", "--load", timeout=900)
        self._make_buckets(BUCKET, "ckpt")
        # Left by a session that was killed, with its hands on the GPUs.
        self.cluster.kubectl("delete", "namespace", "-l", LABEL, "--timeout=120s", timeout=130)
        variables = self.cluster.variables
        keys = {name: variables[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
        meta = {"name": "rtj-store", "namespace": NAMESPACE}
        self.cluster.apply(
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": {LABEL: ""}}},
            {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "stringData": keys},
        )
        self.install()
        self._server = ApiServer(variables["KUBECONFIG"])

    def install(self, **more: Any) -> None:
        """`helm upgrade --install` of the chart for the tests' namespace, and wait until the operator is ready."""
        values: dict[str, Any] = {
            "image": _image(IMAGES["operator"]),
            "sidecarImage": _image(IMAGES["sidecar"]),
            "store": {
                "endpoint": self.cluster.pod_s3_endpoint,
                "region": self.cluster.variables["AWS_REGION"],
            },
            "namespaces": [NAMESPACE],
            "nodeSelector": {"kubernetes.io/hostname": OPERATOR_NODE},
            # The images change under their tag while one works on them: a new pod each time.
            "podAnnotations": {"tests/started": self.stamp},
            **more,
        }
        self.cluster.helm(
            "upgrade", "--install", RELEASE, str(CHART), "--namespace", SYSTEM, "--create-namespace",
            # Other tests put the definition there with kubectl.
            "--take-ownership", "--force-conflicts",
            "--set-json", ",".join(f"{name}={json.dumps(value)}" for name, value in values.items()),
            "--wait", "--timeout", "180s", timeout=240,
        )  # fmt: skip

    def down(self) -> None:
        """Take everything of the tests away; the cluster stays up for the next ones."""
        self.cluster.tool("s3", "start")
        self.cluster.tool("node", "heal", "2")
        self.kubectl("delete", "rtj", "--all", "--timeout=60s")
        self.cluster.helm("uninstall", RELEASE, "--namespace", SYSTEM, "--wait")
        self.kubectl("delete", "jobs,pods", "--all", "--grace-period=1", "--timeout=60s")
        self.cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false")

    def _make_buckets(self, *names: str) -> None:
        variables = self.cluster.variables
        s3 = boto3.client(
            "s3",
            endpoint_url=self.cluster.host_s3_endpoint,
            region_name=variables["AWS_REGION"],
            aws_access_key_id=variables["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=variables["AWS_SECRET_ACCESS_KEY"],
        )
        for name in names:
            try:
                s3.create_bucket(Bucket=name)
            except ClientError as error:
                if error.response["Error"]["Code"] not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
                    raise
        s3.close()

    # ------------------------------------------------------------------------------------------ what tests ask

    def kubectl(self, *words: str, timeout: float = 90, stdin: str | None = None) -> str:
        """kubectl in the tests' namespace. Raises DemoError with what it printed."""
        return self.cluster.kubectl("-n", NAMESPACE, *words, timeout=timeout, stdin=stdin)

    def refusal(self, document: dict[str, Any]) -> str:
        """What the API server answers to an object that it refuses. Fails when it accepts it."""
        try:
            self.kubectl("apply", "-f", "-", stdin=json.dumps(document))
        except DemoError as error:
            return str(error)
        raise AssertionError(f"the API server accepted {document['metadata']['name']}")

    def get(self, path: str, seconds: float = 10.0) -> Any:
        """The JSON behind a path of the API server; None for 404."""
        try:
            return json.loads(self._server.get(path, seconds))
        except ApiException as error:
            if error.status != 404:
                raise
            return None

    def job(self, document: dict[str, Any]) -> Job:
        """Apply a job."""
        self.kubectl("apply", "-f", "-", stdin=json.dumps(document))
        job = Job(self, document["metadata"]["name"], self.stamp)
        self.jobs.append(job)
        return job

    def ledger(self, name: str) -> Path:
        """Folder that the ranks of a job see as /ledger."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        folder.chmod(0o777)
        return folder

    def scale_operator(self, replicas: int) -> None:
        """Stop or start the operator, and wait until that is done."""
        self.cluster.kubectl("-n", SYSTEM, "scale", "deployment", RELEASE, f"--replicas={replicas}")
        if replicas:
            self.cluster.kubectl(
                "-n", SYSTEM, "rollout", "status", f"deployment/{RELEASE}", "--timeout=120s", timeout=130
            )
        else:
            labels = f"app.kubernetes.io/instance={RELEASE}"
            self.cluster.kubectl(
                "-n", SYSTEM, "wait", "pods", "-l", labels, "--for=delete", "--timeout=60s", timeout=70
            )

    def document(
        self,
        name: str,
        *,
        nodes: int = 1,
        ranks: int = 1,
        gpus: int = 0,
        steps: int = 400,
        interval: int = 10,
        env: dict[str, str] | None = None,
        **spec: Any,
    ) -> dict[str, Any]:
        """A job that trains `train.py` of this folder. `gpus` per node; more of the spec in `spec`."""
        trainer = trainer_container(env or {})
        trainer["args"] = ["--steps", str(steps)]
        limits = {"nvidia.com/gpu": gpus} if gpus else {}
        trainer["resources"] = {"limits": limits}
        return {
            "apiVersion": "resumabletraining.io/v1alpha1",
            "kind": "ResumableTrainingJob",
            "metadata": {"name": name},
            "spec": {
                "nodes": nodes,
                "ranksPerNode": ranks,
                "batch": {"globalBatchSize": 8, "maxMicroBatchSize": 2},
                "checkpoint": {"store": {"url": f"s3://{BUCKET}/{self.stamp}"}, "intervalSteps": interval},
                "template": {"spec": {"containers": [trainer], "volumes": volumes(self.ledger(name))}},
                **copy.deepcopy(spec),
            },
        }

    def diagnosis(self, lines: int = 40) -> str:
        """What a user would look at: jobs, events, the last lines of the operator's log and of those of the pods."""
        looks = [
            ("-n", NAMESPACE, "get", "rtj,jobs,pods", "-o", "wide"),
            ("-n", NAMESPACE, "get", "events", "--sort-by=.metadata.creationTimestamp"),
            ("-n", SYSTEM, "logs", f"deployment/{RELEASE}", f"--tail={lines}"),
        ]
        looks += [("-n", NAMESPACE, "get", "rtj", job.name, "-o", "jsonpath={.status}") for job in self.jobs]
        pods = _output(self.cluster, "-n", NAMESPACE, "get", "pods", "-o", "name").split()
        for pod in pods:
            looks += [
                ("-n", NAMESPACE, "logs", pod, "-c", c, f"--tail={lines}") for c in ("trainer", "rtj-sidecar")
            ]
        return "\n".join(f"--- kubectl {' '.join(words)}\n{_output(self.cluster, *words)}" for words in looks)


@dataclass
class Job:
    """One job, seen from outside."""

    world: World
    name: str
    stamp: str

    @property
    def object(self) -> dict[str, Any]:
        """The object as it is now, {} when it does not exist."""
        root = f"/apis/resumabletraining.io/v1alpha1/namespaces/{NAMESPACE}/resumabletrainingjobs"
        return self.world.get(f"{root}/{self.name}") or {}

    @property
    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.object.get("status") or {}
        return found

    def condition(self, kind: str) -> dict[str, Any]:
        """A condition, {} when it is not there."""
        return next((c for c in self.status.get("conditions", []) if c["type"] == kind), {})

    def wait(self, what: str, seconds: float, reached: Callable[[Job], T | None]) -> T:
        """What `reached` answers, once that is true. Fails naming `what` and where the job stands."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                found = reached(self)
            except (ApiException, HTTPError, OSError) as error:
                found, trouble = None, f"; last trouble: {error}"
            else:
                trouble = ""
            if found:
                return found
            if time.monotonic() > deadline:
                status = self.status
                where = f"{status.get('phase')}/{status.get('reason')}: {status.get('message')}"
                raise AssertionError(f"{self.name}: no {what} within {seconds:.0f} s; it is {where}{trouble}")
            time.sleep(POLL_SECONDS)

    def wait_phase(self, phase: str, seconds: float = START_SECONDS) -> dict[str, Any]:
        """The status once the job is in a phase."""
        return self.wait(f"phase {phase}", seconds, lambda job: _if_phase(job.status, phase))

    def wait_training(self, attempt: int, seconds: float = START_SECONDS) -> dict[str, Any]:
        """The status once that attempt (or a later one) has made a step."""

        def trains(job: Job) -> dict[str, Any] | None:
            status = job.status
            number = (status.get("attempt") or {}).get("number", 0)
            return status if number >= attempt and status.get("phase") in ("Running", "Complete") else None

        return self.wait(f"training in attempt {attempt}", seconds, trains)

    def wait_commit(self, beyond: int, seconds: float = START_SECONDS) -> int:
        """Step of the newest commit, once that is beyond a step."""
        return self.wait(f"commit beyond step {beyond}", seconds, lambda job: _if_more(job.committed, beyond))

    @property
    def committed(self) -> int:
        """Step of the newest commit that the status knows."""
        return int((self.status.get("lastCommitted") or {}).get("step") or 0)

    @property
    def pods(self) -> list[dict[str, Any]]:
        """Pods of the current placement that are not being deleted, by index."""
        placement = str((self.status.get("placement") or {}).get("number"))
        labels = f"resumabletraining.io/job={self.name},resumabletraining.io/placement={placement}"
        items = self.world.get(f"/api/v1/namespaces/{NAMESPACE}/pods?labelSelector={labels}")["items"]
        live = [pod for pod in items if "deletionTimestamp" not in pod["metadata"]]
        return sorted(
            live, key=lambda p: int(p["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"])
        )

    def sidecar(self, index: int = 0) -> SidecarStatus | None:
        """`/status` of a pod's sidecar, None while it does not answer."""
        pods = self.pods
        if index >= len(pods):
            return None
        name = pods[index]["metadata"]["name"]
        try:
            answer = self.world.get(f"/api/v1/namespaces/{NAMESPACE}/pods/{name}:9477/proxy/status", 2.0)
        except (ApiException, HTTPError, OSError):
            return None
        return SidecarStatus.model_validate(answer) if answer else None

    @property
    def events(self) -> list[tuple[str, str]]:
        """(reason, note) of the job's events, oldest first."""
        uid = self.object["metadata"]["uid"]
        items = self.world.get(
            f"/api/v1/namespaces/{NAMESPACE}/events?fieldSelector=involvedObject.uid={uid}"
        )["items"]
        items.sort(key=lambda e: str(e.get("eventTime") or e.get("lastTimestamp")))
        return [(e["reason"], e["message"]) for e in items]

    @property
    def placements(self) -> list[str]:
        """Names of the Jobs that exist for this job."""
        items = self.world.get(
            f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs?labelSelector=resumabletraining.io/job={self.name}"
        )["items"]
        return sorted(item["metadata"]["name"] for item in items)

    def entries(self) -> list[Entry]:
        """The run's journal."""
        variables = self.world.cluster.variables
        store = open_store(
            f"s3://{BUCKET}/{self.stamp}",
            endpoint=self.world.cluster.host_s3_endpoint,
            region=variables["AWS_REGION"],
        )
        try:
            return read_entries(store, RunKeys(NAMESPACE, self.name))
        finally:
            store.close()

    def attempts(self) -> list[Attempt]:
        """The attempts that stand in the journal."""
        return [entry for entry in self.entries() if isinstance(entry, Attempt)]

    def commits(self) -> list[Manifest]:
        """The commits that stand in the journal."""
        return [entry for entry in self.entries() if isinstance(entry, Manifest)]

    def history(self) -> History:
        """The steps that survived."""
        return surviving_history(self.entries())

    def ledgers(self) -> Ledgers:
        """What the ranks logged."""
        return Ledgers.of_folder(self.world.ledger(self.name), self.name)

    def pace(self, seconds: float) -> None:
        """Seconds that every step sleeps from now on (TEST_PACE=/ledger/pace)."""
        (self.world.ledger(self.name) / "pace").write_text(str(seconds))

    def patch(self, **spec: Any) -> None:
        """`kubectl patch` of the spec."""
        self.world.kubectl("patch", "rtj", self.name, "--type=merge", "-p", json.dumps({"spec": spec}))

    def delete(self) -> None:
        """Delete the job and wait until its pods are gone."""
        self.world.kubectl("delete", "rtj", self.name, "--ignore-not-found", "--timeout=60s")
        labels = f"resumabletraining.io/job={self.name}"
        self.world.kubectl("delete", "jobs,pods", "-l", labels, "--grace-period=1", "--timeout=60s")


def trainer_container(env: dict[str, str]) -> dict[str, Any]:
    """The trainer on a bare Python: checkout, virtual environment and interpreter are mounted from this machine."""
    path = f"{ROOT}/.venv/bin:/usr/local/bin:/usr/bin:/bin"
    variables = {
        "PATH": path,
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "RTJ_LEDGER_DIR": "/ledger",
        **env,
    }
    return {
        "name": "trainer",
        "image": TRAINER_IMAGE,
        "imagePullPolicy": "Never",
        "command": ["/workspace/train.py"],
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        "volumeMounts": [
            {"name": "scripts", "mountPath": "/workspace", "readOnly": True},
            {"name": "checkout", "mountPath": str(ROOT), "readOnly": True},
            {"name": "python", "mountPath": str(_python_home()), "readOnly": True},
            {"name": "libraries", "mountPath": str(_libraries()), "readOnly": True},
            {"name": "ledger", "mountPath": "/ledger"},
        ],
    }


def volumes(ledger: Path) -> list[dict[str, Any]]:
    """The host's folders behind `trainer_container`."""
    paths = {
        "scripts": ROOT / "tests" / "cluster",
        "checkout": ROOT,
        "python": _python_home(),
        "libraries": _libraries(),
        "ledger": ledger,
    }
    return [
        {"name": name, "hostPath": {"path": str(path), "type": "Directory"}} for name, path in paths.items()
    ]


def _python_home() -> Path:
    return Path(sys.base_prefix).resolve()


def _libraries() -> Path:
    return Path("/usr/lib") / f"{platform.machine()}-linux-gnu"


def _image(name: str) -> dict[str, str]:
    repository, _, tag = name.rpartition(":")
    return {"repository": repository, "tag": tag, "pullPolicy": "Never"}


def _if_phase(status: dict[str, Any], phase: str) -> dict[str, Any] | None:
    return status if status.get("phase") == phase else None


def _if_more(step: int, beyond: int) -> int | None:
    return step if step > beyond else None


def _output(cluster: Cluster, *words: str) -> str:
    try:
        return cluster.kubectl(*words, timeout=20)
    except DemoError as error:
        return str(error)
