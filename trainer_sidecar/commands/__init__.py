"""Subcommands of `rtj`, one module each: `add(subcommands)` declares arguments, the handler returns the exit code."""
