"""`python -m trainer_sidecar.sidecar`, for `rtj run` and tests, where no console script is installed."""

from trainer_sidecar.sidecar.main import main

if __name__ == "__main__":
    raise SystemExit(main())
