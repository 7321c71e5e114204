"""Checks and measures the agent on a machine with a real NVIDIA GPU: `python -m bench.hardware --help`."""
