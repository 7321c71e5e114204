"""Process plumbing that every part needs: settings, logs, metrics, health endpoints, TLS, clock, start and stop.

It knows nothing of Kubernetes or GPUs, and nothing here decides anything.
"""
