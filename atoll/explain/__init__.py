"""Explains why a pod waits and what would help, by the scheduler's own functions on a snapshot of the cluster."""
