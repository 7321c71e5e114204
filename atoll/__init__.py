"""What the parts share: api (models, names), cluster (pure decisions), kube (API server), service (processes)."""
