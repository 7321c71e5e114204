"""A real Kubernetes with several real nodes on one machine."""
