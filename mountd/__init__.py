"""The daemon: kernel channels, operations, assembly, services, logs."""
