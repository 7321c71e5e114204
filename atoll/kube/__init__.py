"""The only package that talks to the Kubernetes API server.

It handles retries, time-outs, preconditions and stale watches, without any scheduling. The caller passes the clock.
"""
