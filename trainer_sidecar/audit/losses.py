"""Loss curves of the surviving history, and how far two of them are apart."""

from trainer_sidecar.audit.history import History
from trainer_sidecar.audit.ledger import Ledgers
from trainer_sidecar.audit.proof import Proof

Curve = dict[int, float]
"""Step to mean loss over the global batch."""


def loss_curve(history: History, ledgers: Ledgers) -> Curve:
    """Loss of every surviving step as the epoch that trained it logged it; steps without one are left out."""
    curve: Curve = {}
    for stretch in history.stretches:
        for step in stretch.steps:
            record = ledgers.step(stretch.epoch, step)
            if record is not None and record.loss is not None:
                curve[step] = record.loss
    return curve


def relative_differences(run: Curve, control: Curve) -> Curve:
    """|run - control| / |control| at every step that both have."""
    return {
        step: abs(run[step] - control[step]) / abs(control[step])
        for step in sorted(run.keys() & control.keys())
    }


def prove_same_losses(run: Curve, control: Curve, *, tolerance: float, steps: int) -> Proof:
    """At each of steps 1 to `steps`, the losses differ by at most `tolerance`, relatively."""
    differences = relative_differences(run, control)
    missing = [f"no loss of step {step}" for step in range(1, steps + 1) if step not in differences]
    apart = [
        f"step {step}: {run[step]:.6f} against {control[step]:.6f} ({difference:.2e})"
        for step, difference in differences.items()
        if not difference <= tolerance
    ]
    largest = max(differences.values(), default=0.0)
    claim = (
        f"largest relative difference over {len(differences)} steps {largest:.1e}, allowed {tolerance:.0e}"
    )
    numbers = {"steps": len(differences), "largest": largest, "tolerance": tolerance}
    return Proof("loss of the control run", claim, numbers, missing + apart)
