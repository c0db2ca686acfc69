"""`rtj run`: the same sidecar, launcher and library on one machine, with this package in the operator's place."""
