"""The only room that talks to the Kubernetes API server.

In go paths, JSON bodies and callbacks; out come bytes, decoded objects, watched changes and typed errors.
It is separate so that every retry, time-out, precondition and stale watch is handled in one place; it knows no
scheduling, and takes the clock from its caller.
"""
