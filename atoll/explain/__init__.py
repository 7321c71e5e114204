"""Answers for people: why a pod waits and what would help, by the scheduler's own functions on a frozen cluster."""
