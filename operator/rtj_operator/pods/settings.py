"""What the chart says about pods: the sidecar's image and size, and where things lie inside a pod."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PodSettings:
    """Operator-wide settings of the pods that it builds."""

    sidecar_image: str
    sidecar_pull_policy: str | None = None
    sidecar_command: tuple[str, ...] = ()
    """Empty: the image's entry point."""
    sidecar_cpu: str = "250m"
    """Requested; the sidecar may use idle CPU beyond it."""
    sidecar_cpu_limit: str = "1"
    """Requested and limit inside Guaranteed pods, where each container must have both. One core hashes about 2 GB/s."""
    sidecar_memory: str = "512Mi"
    """Without the pages of the shared volume, which are added where they count against the sidecar."""
    sidecar_user: int = 65532
    python: str = "python3"
    """Python of the trainer's image; the launcher needs its standard library only."""
    volume_path: str = "/run/rtj"
    """Where the shared volume is mounted in both containers."""
    plan_path: str = "/run/rtj-plan"
    """Where the plan's volume is mounted in both containers."""

    @property
    def plan_file(self) -> str:
        """The live plan, as both containers see it."""
        return f"{self.plan_path}/plan.json"
