"""Machines that are gone: deletes what a deleted Node leaves behind, and acts on declarations that a machine is gone.

Report and heartbeat of a name without a Node are deleted after a grace time, measured by our own clock from when the
Node was first missed, if the agent is silent. A report with cordons or XIDs that are open is kept: no agent could find
them out again when the machine comes back. Leases stay: this frees no GPU. A declaration that a machine is gone for
good frees the GPUs of pods that left it, through the release, which asks this module. An agent is silent if we have
not seen its heartbeat change for long enough; no other machine's clock counts. Keys are node names.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import structlog

from atoll.api import names
from atoll.api.node_status import GoneMachine
from atoll.cluster.health import must_be_remembered
from atoll.cluster.machine_life import MachineFacts, declaration_on, is_out_of_service, newest_sequence
from atoll.cluster.objects import Lease
from atoll.cluster.release import PodTermination
from atoll.cluster.reports import silence_seconds_max
from atoll.kube import paths
from atoll.kube.cache import Change, ChangeKind
from atoll.kube.errors import Conflict, NotFound
from atoll.kube.mirror import WatchedKind
from atoll.kube.patches import delete_options
from controllers.context import Context, node_reference

log = structlog.get_logger(__name__)

RECHECK_SECONDS = 15.0
FREEING_SECONDS = 2.0
UNHEARD_SECONDS = 2.0


class MachineDeclarations:
    """Valid declarations that a machine is gone: those that nothing contradicts."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._renewals: dict[str, tuple[str | None, float]] = {}

    def is_heard(self, node: str) -> bool:
        """Return whether the agent may be alive: its heartbeat changed in time, or we have not watched long enough.

        Stricter than the ledger's `is_stale`, which trusts the API servers' clocks about the time before this process
        started. An error there delays a placement; here it would free GPUs that are in use."""
        return self.silent_in_seconds(node) > 0

    def silent_in_seconds(self, node: str) -> float:
        """Return the seconds until the agent counts as silent; 0 or less if it already does. Silence is what our watch
        has shown: while it says nothing itself, a renewal may be on its way, however short the agent's period is."""
        beat = self._heartbeat(node)
        if beat is None:
            self._renewals.pop(node, None)
            return 0.0
        now = self._context.clock.monotonic_seconds()
        renewed, since = self._renewals.get(node, (None, now))
        if renewed != beat.spec.renew_time:
            since = now
        self._renewals[node] = (beat.spec.renew_time, since)
        silent_at = since + silence_seconds_max(beat)
        heard_at = now - self._context.mirror.heartbeats.seconds_since_heard()
        return silent_at - now if now < silent_at or heard_at >= silent_at else UNHEARD_SECONDS

    def facts(self, node: str) -> MachineFacts:
        """Return the facts about the machine with this name."""
        mirror = self._context.mirror
        return MachineFacts(mirror.nodes.store.get(("", node)), mirror.reports.get(node), self.is_heard(node))

    def on(self, node: str, node_uid: str) -> GoneMachine | None:
        """Return the valid declaration for the machine that had this Node's uid, or None."""
        return declaration_on(node_uid, self.facts(node)) if node_uid else None

    def applied(self, termination: PodTermination) -> PodTermination:
        """Return the termination with the declaration for its machine. A report that is known to come from that
        machine, under any uid, overrides earlier declarations, and every declaration while its agent is alive."""
        declaration = self.on(termination.node, termination.node_uid)
        has_reported = declaration is not None and newest_sequence(self.facts(termination.node)) > declaration.sequence
        is_contradicted = termination.is_of_machine and (has_reported or self.is_heard(termination.node))
        return replace(termination, is_declared=declaration is not None and not is_contradicted)

    def follow(self, nodes: Iterable[str]) -> None:
        """Watch the heartbeats of these nodes, and forget all others."""
        kept = set(nodes)
        self._renewals = {node: seen for node, seen in self._renewals.items() if node in kept}
        for node in kept:
            self.silent_in_seconds(node)

    def _heartbeat(self, node: str) -> Lease | None:
        return self._context.mirror.heartbeats.store.get((names.HEARTBEAT_NAMESPACE, node))


class MachineReconciler:
    """Deletes what deleted Nodes leave behind, and triggers the release for machines that are declared gone."""

    name = "machines"

    def __init__(
        self,
        context: Context,
        declarations: MachineDeclarations,
        release: Callable[[str], None],
        *,
        forget_after_seconds: float,
    ) -> None:
        self._context = context
        self._declarations = declarations
        self._release = release
        self._forget_after_seconds = forget_after_seconds
        self._missed: dict[str, float] = {}
        self._recorded: set[tuple[str, str, int]] = set()

    def affected(self, kind: WatchedKind, change: Change[Any]) -> Iterable[str]:
        """Return the node of a report or Node that was added, deleted, or has declarations."""
        if kind in {WatchedKind.REPORT, WatchedKind.NODE}:
            name = change.object.metadata.name
            return (name,) if change.kind is not ChangeKind.MODIFIED or self._has_declaration(name) else ()
        return ()

    def all_keys(self) -> Iterable[str]:
        """Return names with a report, heartbeat or declaration but no Node; and Nodes with a declaration."""
        mirror = self._context.mirror
        traces = {name for _, name in mirror.heartbeats.store} | set(mirror.reports)
        nodes = {name for _, name in mirror.nodes.store}
        wanted = (traces - nodes) | {name for name in nodes | traces if self._has_declaration(name)}
        self._missed = {name: since for name, since in self._missed.items() if name in wanted}
        self._declarations.follow(wanted)
        return tuple(wanted)

    async def reconcile(self, node: str) -> float | None:
        """Act on declarations for a node; delete report and heartbeat if its Node is gone for long enough. Raises
        KubeError."""
        mirror = self._context.mirror
        if mirror.unready_reason():
            return RECHECK_SECONDS
        declaration, waits = self._valid_declaration(node), self._declarations.silent_in_seconds(node)
        if ("", node) in mirror.nodes.store or not self._has_traces(node):
            self._missed.pop(node, None)
            return max(1.0, waits) if waits > 0 and self._has_declaration(node) else None
        now = self._context.clock.monotonic_seconds()
        since = self._missed.setdefault(node, now)
        may_forget_at_once = (
            declaration is not None and declaration.forget and self._reports_of(node) in {"", declaration.node_uid}
        )
        left_seconds = max(waits, 0.0 if may_forget_at_once else since + self._forget_after_seconds - now)
        if left_seconds > 0:
            return max(1.0, min(left_seconds, self._forget_after_seconds))
        if declaration is not None and self._frees_yet(node, declaration):
            return FREEING_SECONDS
        return await self._forget(node, declaration)

    def _valid_declaration(self, node: str) -> GoneMachine | None:
        """Record each declaration once, and trigger the release for the node. Return a valid one, if any, preferably
        for the machine that the report is about."""
        facts, valid = self._declarations.facts(node), []
        uids = {record.node_uid for record in self._context.mirror.ledger.leases.values() if record.node == node}
        uids |= {one.node_uid for one in (facts.status.spec.gone if facts.status is not None else ())}
        for uid in sorted(uids | ({facts.node.metadata.uid} if facts.node is not None else set())):
            declaration = declaration_on(uid, facts) if uid else None
            if declaration is None:
                continue
            valid.append(declaration)
            held = [r for r in self._context.mirror.ledger.leases.values() if (r.node, r.node_uid) == (node, uid)]
            if (node, uid, declaration.sequence) not in self._recorded:
                self._recorded.add((node, uid, declaration.sequence))
                self._record(node, declaration, count=len(held))
            for record in held:
                self._release(record.holder.uid)
        return max(valid, key=lambda one: (one.node_uid == self._reports_of(node), one.forget), default=None)

    def _reports_of(self, node: str) -> str:
        """Return the uid of the Node that the report is about; empty without a report."""
        status = self._context.mirror.reports.get(node)
        return status.status.node_uid if status is not None and status.status is not None else ""

    def _frees_yet(self, node: str, declaration: GoneMachine) -> bool:
        """Return whether Leases still wait to be freed by the declaration, which is deleted with the report. Pods that
        are there now may be deleted a moment later: Kubernetes does that itself once the Node is gone."""
        leases = self._context.mirror.ledger.leases.values()
        held = (record for record in leases if (record.node, record.node_uid) == (node, declaration.node_uid))
        return any(not record.holder.is_reservation for record in held)

    def _record(self, node: str, declaration: GoneMachine, *, count: int) -> None:
        who, machine = declaration.by or "somebody", f"machine {declaration.node_uid} of node {node}"
        at = f" at {declaration.time}" if declaration.time else ""
        note = f"{who} declared {machine} gone for good{at}: {declaration.reason}"
        log.warning(
            "A machine was declared gone",
            node=node,
            node_uid=declaration.node_uid,
            by=declaration.by,
            reason=declaration.reason,
            declared=declaration.time,
            leases=count,
        )
        self._context.events.record(
            node_reference(node),
            reason=names.REASON_MACHINE_GONE,
            note=f"{note}; GPUs of {count} Leases are freed as their pods have left",
            action="Release",
            type="Warning",
        )

    async def _forget(self, node: str, declaration: GoneMachine | None) -> float | None:
        """Delete heartbeat and report if the Node is really gone. If one changed in the meantime, try again later."""
        api, mirror = self._context.api, self._context.mirror
        try:
            await api.get(paths.nodes(node))
        except NotFound:
            pass
        else:
            return RECHECK_SECONDS
        beat = mirror.heartbeats.store.get((names.HEARTBEAT_NAMESPACE, node))
        status, keeps_report = mirror.reports.get(node), self._keeps_report(node)
        traces = (
            (paths.leases(names.HEARTBEAT_NAMESPACE, node), beat.metadata if beat is not None else None),
            (paths.gpunodestatuses(node), status.metadata if status is not None and not keeps_report else None),
        )
        for path, metadata in traces:
            if metadata is None:
                continue
            options = delete_options(uid=metadata.uid, resource_version=metadata.resource_version)
            try:
                await api.delete(path, options)
            except NotFound:
                continue
            except Conflict:
                return 1.0
        self._missed.pop(node, None)
        self._recorded = {one for one in self._recorded if one[0] != node}
        who = (
            f"{declaration.by} declared it gone"
            if declaration is not None
            else f"it has had no Node for {self._forget_after_seconds:.0f} s"
        )
        what = "heartbeat (its report stays, with cordons or XIDs) was" if keeps_report else "report and heartbeat were"
        log.warning("Forgot a node", node=node, why=who, keeps_report=keeps_report)
        self._context.events.record(
            node_reference(node),
            reason=names.REASON_MACHINE_FORGOTTEN,
            note=f"{what} of node {node} deleted: {who}; GPUs in doubt stay in doubt",
            action="Forget",
        )
        return None

    def _has_traces(self, node: str) -> bool:
        mirror = self._context.mirror
        has_report = node in mirror.reports and not self._keeps_report(node)
        return has_report or (names.HEARTBEAT_NAMESPACE, node) in mirror.heartbeats.store

    def _keeps_report(self, node: str) -> bool:
        """Return whether the report must outlive its Node: nobody said that this machine never comes back."""
        status = self._context.mirror.reports.get(node)
        declaration = self._declarations.on(node, self._reports_of(node))
        return status is not None and must_be_remembered(status) and not (declaration and declaration.forget)

    def _has_declaration(self, node: str) -> bool:
        status = self._context.mirror.reports.get(node)
        found = self._context.mirror.nodes.store.get(("", node))
        return bool(status is not None and status.spec.gone) or (found is not None and is_out_of_service(found))
