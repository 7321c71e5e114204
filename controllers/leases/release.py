"""Releases the GPUs of pods that are gone or terminal, on proof and never without.

Without proof the pod's Leases stay, are marked in doubt once, and the node's agent is asked for the missing report. An
agent publishes by itself when something changes and after each deletion of a GPU pod; it cannot know of a pod that it
never saw, or of a deletion that only the controllers missed. Keys of the release are pod uids.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import structlog

from atoll.api import names
from atoll.cluster import pods
from atoll.cluster.leases import LeaseRecord
from atoll.cluster.objects import Pod
from atoll.cluster.release import ANSWERED_BY_A_REPORT, Doubt, PodTermination, Proof, judge, version_number
from atoll.kube import paths
from atoll.kube.cache import Change, ChangeKind
from atoll.kube.errors import NotFound
from atoll.kube.mirror import WatchedKind
from atoll.kube.patches import merge_patch
from controllers.context import Context, node_reference
from controllers.leases.terminations import DeletedPod, PodTerminations
from controllers.leases.writes import annotate_lease, end_lease
from controllers.machines import MachineDeclarations
from controllers.pod_calls import look_up

log = structlog.get_logger(__name__)

DOUBT_SECONDS = 3.0
"""A doubt younger than this is the usual gap between a deletion and the agent's next report."""
RECHECK_SECONDS = 15.0
CACHE_LAG_SECONDS = 0.5

ASK_AGAIN_SECONDS = 15.0
ASK_AGAIN_SECONDS_MAX = 300.0

AskEvidence = Callable[[str, int], None]
"""Called with a node and the version that a report of it must have passed."""
ChooseHeirs = Callable[[Sequence[LeaseRecord]], Mapping[str, str]]
"""Called with Leases of one pod on one node that end; returns those that a GpuReservation takes over, by name."""


@dataclass(slots=True)
class _PodInDoubt:
    """A pod in doubt: since when, and when its node's agent is asked next; 0 for at once."""

    since_seconds: float
    ask_at_seconds: float
    pause_seconds: float = ASK_AGAIN_SECONDS


class ReleaseReconciler:
    """Judges terminations and ends Leases."""

    name = "release"

    def __init__(
        self,
        context: Context,
        terminations: PodTerminations,
        ask_evidence: AskEvidence,
        declarations: MachineDeclarations,
        choose_heirs: ChooseHeirs,
    ) -> None:
        self._context = context
        self._terminations = terminations
        self._declarations = declarations
        self._ask_evidence = ask_evidence
        self._choose_heirs = choose_heirs
        self._doubted: dict[str, _PodInDoubt] = {}

    def affected(self, kind: WatchedKind, change: Change[Any]) -> Iterable[str]:
        """Return the pods whose release a change may decide."""
        if kind is WatchedKind.POD:
            return self._concerning_pod(change)
        if kind is WatchedKind.LEASE and change.kind is not ChangeKind.DELETED:
            record = self._context.mirror.ledger.leases.get(change.object.metadata.name)
            return (record.holder.uid,) if record is not None and self._has_left(record) else ()
        if kind is WatchedKind.REPORT:
            return self._terminations.open_on(change.object.metadata.name)
        return ()

    def all_keys(self) -> Iterable[str]:
        """Return the holders of Leases that are not known to live."""
        records = self._context.mirror.ledger.leases.values()
        return {record.holder.uid for record in records if self._has_left(record)} | set(self._doubted)

    async def reconcile(self, uid: str) -> float | None:
        """Release what is proven. Raises KubeError."""
        mirror = self._context.mirror
        leases = mirror.ledger.leases_of(uid)
        pod = mirror.pods.by_uid.get(uid)
        if not leases or (pod is not None and not pods.is_terminal(pod)):
            self._forget(uid)
            return None
        if mirror.unready_reason():
            return RECHECK_SECONDS
        gone = None if pod is not None else await self._gone(leases[0])
        if pod is None and gone is None:
            return CACHE_LAG_SECONDS
        again: list[float] = []
        for _, group in groupby(leases, key=lambda record: record.node):
            records = tuple(group)
            termination = self._declarations.applied(self._termination(pod, gone, records))
            verdict = judge(termination)
            if isinstance(verdict, Proof):
                await self._release(records, verdict)
            else:
                again.append(await self._keep(records, termination, verdict))
        self._context.metrics.departures_in_doubt.set(self._terminations.count_open())
        return min(again, default=None)

    async def _gone(self, record: LeaseRecord) -> DeletedPod | None:
        """Return how a pod was deleted that the cache does not hold; None if it exists after all."""
        uid = record.holder.uid
        known = self._terminations.gone(uid)
        if known is not None:
            return known
        lookup = await look_up(self._context.api, record.holder)
        if lookup.pod is not None:
            return None
        return self._terminations.note_absence(uid, lookup.version)

    def _termination(self, pod: Pod | None, gone: DeletedPod | None, records: Sequence[LeaseRecord]) -> PodTermination:
        if pod is not None:
            return self._terminations.ended(pod, records)
        assert gone is not None
        return self._terminations.departed(records[0].holder.uid, gone, records)

    async def _release(self, records: Sequence[LeaseRecord], proof: Proof) -> None:
        """End all Leases; a conflict means that one was marked meanwhile, and the next call finds it as it is."""
        heirs, now = self._choose_heirs(records), self._context.now_text()
        results = await asyncio.gather(
            *(end_lease(self._context.api, one, now, heir=heirs.get(one.lease_name, "")) for one in records),
            return_exceptions=True,
        )
        faults = [result for result in results if isinstance(result, BaseException)]
        freed = sum(result is True for result in results)
        holder = records[0].holder
        if freed:
            self._context.metrics.leases_released.labels(proof.value).inc(freed)
            log.info(
                "Released GPUs",
                pod=str(holder),
                uid=holder.uid,
                attempt=records[0].attempt,
                node=records[0].node,
                count=freed,
                proof=proof.value,
            )
        if faults:
            raise faults[0]
        if holder.uid in self._doubted:
            note = f"{_devices(records)} of pod {holder.namespace}/{holder.name} are free again: {proof.value}"
            self._context.events.record(
                node_reference(records[0].node), reason=names.REASON_GPUS_RELEASED, note=note, action="Release"
            )
        self._forget(holder.uid)

    async def _keep(self, records: Sequence[LeaseRecord], termination: PodTermination, doubt: Doubt) -> float:
        """Keep the Leases; after a while say so on them, and ask for the report that is missing."""
        now = self._context.clock.monotonic_seconds()
        agent_knows = termination.pod is not None and (termination.deletion_seen or not termination.is_deleted)
        first_ask = now + DOUBT_SECONDS if agent_knows else now
        doubted = self._doubted.setdefault(termination.uid, _PodInDoubt(now, first_ask))
        if doubt in ANSWERED_BY_A_REPORT and now >= doubted.ask_at_seconds:
            position = version_number(self._context.mirror.pods.resource_version)
            self._ask_evidence(termination.node, max(termination.version, position))
            doubted.ask_at_seconds = now + doubted.pause_seconds
            doubted.pause_seconds = min(2 * doubted.pause_seconds, ASK_AGAIN_SECONDS_MAX)
        young_seconds = doubted.since_seconds + DOUBT_SECONDS - now
        if young_seconds > 0:
            return young_seconds
        await self._mark(records, doubt)
        return RECHECK_SECONDS

    async def _mark(self, records: Sequence[LeaseRecord], doubt: Doubt) -> None:
        """Write the doubt on every Lease that does not carry one yet, once."""
        stored = self._context.mirror.leases.store
        unmarked = [
            record
            for record in records
            if (lease := stored.get((names.SYSTEM_NAMESPACE, record.lease_name))) is not None
            and names.LEASE_IN_DOUBT not in lease.metadata.annotations
        ]
        if not unmarked:
            return
        mark = {names.LEASE_IN_DOUBT: str(doubt)}
        await asyncio.gather(*(annotate_lease(self._context.api, record, mark) for record in unmarked))
        holder = records[0].holder
        note = f"{_devices(records)} of pod {holder.namespace}/{holder.name} are given to nobody: {doubt}"
        self._context.events.record(
            node_reference(records[0].node),
            reason=names.REASON_GPUS_IN_DOUBT,
            note=note,
            action="Release",
            type="Warning",
        )
        log.warning(
            "Keeping GPUs in doubt",
            pod=str(holder),
            uid=holder.uid,
            attempt=records[0].attempt,
            node=records[0].node,
            doubt=str(doubt),
        )

    def _concerning_pod(self, change: Change[Any]) -> tuple[str, ...]:
        pod: Pod = change.object
        uid = pod.metadata.uid
        if change.kind is not ChangeKind.DELETED and not pods.is_terminal(pod):
            return (uid,) if uid in self._doubted else ()
        return (uid,) if self._context.mirror.ledger.leases_of(uid) else ()

    def _has_left(self, record: LeaseRecord) -> bool:
        if record.holder.is_reservation:
            return False
        pod = self._context.mirror.pods.by_uid.get(record.holder.uid)
        return pod is None or pods.is_terminal(pod)

    def _forget(self, uid: str) -> None:
        self._doubted.pop(uid, None)
        self._terminations.close(uid)
        self._context.metrics.departures_in_doubt.set(self._terminations.count_open())


class EvidenceReconciler:
    """Keys are node names. `want` is called by the release; the loop writes, once per version."""

    name = "evidence"

    def __init__(self, context: Context) -> None:
        self._context = context
        self._wanted: dict[str, int] = {}
        self._asked: dict[str, int] = {}

    def want(self, node: str, version: int) -> bool:
        """Note that reports of `node` past `version` are wanted; False if that was asked for already."""
        if version <= max(self._asked.get(node, 0), self._wanted.get(node, 0)):
            return False
        self._wanted[node] = version
        return True

    def affected(self, kind: WatchedKind, change: Change[Any]) -> Iterable[str]:
        """Return nothing: only the release knows which nodes to ask. Stop asking a node whose report is deleted."""
        if kind is WatchedKind.REPORT and change.kind is ChangeKind.DELETED:
            self._asked.pop(change.object.metadata.name, None)
        return ()

    def all_keys(self) -> Iterable[str]:
        """Return the nodes whose agents must still be asked."""
        return tuple(self._wanted)

    async def reconcile(self, node: str) -> float | None:
        """Write the annotation, also over a version that no pod has reached yet: nobody who waits for proof wrote that.

        A node without a report has no agent to be asked.
        """
        version = self._wanted.get(node, 0)
        status = self._context.mirror.reports.get(node)
        if not version or status is None:
            self._wanted.pop(node, None)
            if status is None:
                self._asked.pop(node, None)
            return None
        present = version_number(status.metadata.annotations.get(names.EVIDENCE_WANTED, ""))
        if present < version or present > version_number(self._context.mirror.pods.resource_version):
            body = merge_patch(uid=status.metadata.uid, annotations={names.EVIDENCE_WANTED: str(version)})
            try:
                await self._context.api.patch(paths.gpunodestatuses(node), body)
            except NotFound:
                self._wanted.pop(node, None)
                return None
            self._context.metrics.evidence_requests.inc()
        self._asked[node] = version
        if self._wanted.get(node) == version:
            del self._wanted[node]
        return None


def _devices(records: Sequence[LeaseRecord]) -> str:
    return "GPUs " + ",".join(str(record.device_id) for record in records)
