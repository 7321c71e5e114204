"""What the parts share: api (models, names), cluster (pure decisions), kube (API server), service (processes)."""

VERSION = "0.1.0"
"""Of this code; the image has no package to ask."""
