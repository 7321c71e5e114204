"""The only package that talks to the Kubernetes API server.

Every retry, time-out, precondition and stale watch is handled here. It knows no scheduling, and takes the clock from
its caller.
"""
