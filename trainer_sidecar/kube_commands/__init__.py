"""Subcommands of `rtj` that talk to a cluster, so that it is `kubectl rtj` too: one module each, as in `commands`.

They read and patch the job as its user would, with the user's own rights; the operator alone acts on it.
"""
