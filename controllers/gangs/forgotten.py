"""Resumes what was suspended for gangs that are gone.

A GpuGang's status lists the owners that were suspended for it. The list goes with the gang, or with its status in a
restored backup, perhaps while nobody leads. The owners carry a label, so they are looked for when a gang goes, and from
time to time: a suspension may also arrive after its gang has gone.
"""

from collections.abc import Iterable
from typing import Any, Final

from atoll.kube.cache import Change, ChangeKind
from atoll.kube.mirror import WatchedKind
from controllers.context import Context
from controllers.gangs.owners import resume_forgotten

LOOK_SECONDS = 60.0
ALL: Final = ("",)
"""The one key: owners of every kind."""


class ForgottenOwnerReconciler:
    """Looks for suspended owners that no gang lists."""

    name = "forgotten-owners"

    def __init__(self, context: Context) -> None:
        self._context = context
        self._has_looked = False

    def affected(self, kind: WatchedKind, change: Change[Any]) -> Iterable[str]:
        """Return the key when a gang goes for which owners are suspended."""
        if kind is not WatchedKind.GANG or change.kind is not ChangeKind.DELETED:
            return ()
        status = change.object.status
        return ALL if status is not None and status.suspended_owners else ()

    def all_keys(self) -> Iterable[str]:
        """Return the key until the first look; the later ones follow from that."""
        return () if self._has_looked else ALL

    async def reconcile(self, _key: str) -> float | None:
        """Look once. Raises KubeError."""
        self._has_looked = True
        await resume_forgotten(self._context)
        return LOOK_SECONDS
