"""Exceptions of the extender.

BindRefused      the pod cannot be bound here and nothing of this attempt stays behind
  BindsBusy      too many binds write their Leases already; nothing was begun, and the node is not to blame
BindInDoubt      the API server may have bound the pod; its Leases stay until that is known
"""


class BindRefused(Exception):
    """The bind failed for certain; `args[0]` says why, in words for kube-scheduler's event."""


class BindsBusy(BindRefused):
    """The bind found no turn in time."""


class BindInDoubt(Exception):
    """Nobody knows whether the Binding landed; `args[0]` says what is known."""
