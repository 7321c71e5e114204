"""Attributes of machine-learning jobs: accelerators, models, checkpoints and priorities. Pure."""
