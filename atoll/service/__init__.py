"""Infrastructure of every part: settings, logs, metrics, health endpoints, TLS, clock, start and stop.

It is independent of Kubernetes and GPUs.
"""
