"""The `ctx` command: one module per sub-command."""
