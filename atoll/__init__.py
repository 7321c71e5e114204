"""What the parts of Atoll share: api (models and names), cluster (pure decisions), kube (API server), service (processes)."""
