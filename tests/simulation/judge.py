"""The judge checks the promises after every write and every start, against the GPUs that containers really use.

    1  a GPU that some pod may still use is promised to no other, and its Lease is not ended
    2  when everything has come to rest, what nobody uses is free: in the API and in the memory of every part
    3  a pod is bound with all of its GPUs, each under a Lease of its own, or not at all
       A pod that names a reservation has GPUs of that alone, and nobody else has any of them.
    6  by uid alone: a successor of the same name inherits nothing and loses nothing
    7  an agent that is dead looks dead, whatever its clock said and whoever has restarted

"May use": a container runs with it, kubelet would start one, or the pod is bound with it and has not ended. `Broken`
has the promise and the events before.
"""

from collections.abc import Callable, Iterable
from typing import Any

from atoll.api import names
from atoll.cluster.leases import RESERVATION_NAMESPACE
from tests.simulation.machines import HEARTBEAT_DURATION_SECONDS, SimulatedNode, machines_of, wanted_uuids
from tests.simulation.server import LEASES, PODS, Object, SimulatedServer

TERMINAL = ("Succeeded", "Failed")
SILENCE_SECONDS_MAX = HEARTBEAT_DURATION_SECONDS + 20.0
"""A bind that was decided upon before may be carried out so much later."""


class Broken(Exception):
    """A promise was not kept."""

    def __init__(self, promise: int, text: str) -> None:
        super().__init__(f"promise {promise}: {text}")
        self.promise = promise


class Judge:
    """Listens to the server and to the machines. `broken` is the first breach; later ones follow from it."""

    def __init__(
        self, server: SimulatedServer, machines: list[SimulatedNode], *, is_excused: Callable[[str], bool]
    ) -> None:
        self._server = server
        self._machines = machines
        self._is_excused = is_excused
        self._repairs: list[Any] = []
        """Requests for Leases of pods that might already use the GPU when they were sent."""
        self.broken: Broken | None = None
        self.checks_count = 0
        server.listeners.append(self._on_write)

    def break_promise(self, promise: int, text: str) -> None:
        """Note the first breach."""
        if self.broken is None:
            self.broken = Broken(promise, text)

    # Every write

    def _on_write(self, path: str, old: Object | None, new: Object | None) -> None:
        self.checks_count += 1
        if path.startswith(PODS):
            self._on_pod(old, new)
        elif path.startswith(LEASES) and old is not None and _holder(old) != _holder(new):
            self._on_lease_end(old)

    def _on_pod(self, old: Object | None, new: Object | None) -> None:
        if new is None or old is None:
            return
        was_bound, is_bound = old["spec"].get("nodeName"), new["spec"].get("nodeName")
        if is_bound and not was_bound:
            self._on_binding(new, is_bound)
        elif wanted_uuids(old) != wanted_uuids(new):
            self.break_promise(1, f"the GPUs of {_name(new)} changed while it was bound")

    def _on_binding(self, pod: Object, node: str) -> None:
        uid, uuids = pod["metadata"]["uid"], wanted_uuids(pod)
        count = int(pod["spec"]["containers"][0]["resources"]["limits"][names.GPU_RESOURCE])
        allocated, _, ids = pod["metadata"]["annotations"].get(names.ALLOCATED, "").rpartition(":")
        if len(uuids) != count or allocated != node or len(set(ids.split(","))) != count:
            self.break_promise(
                3, f"{_name(pod)} asked for {count} GPUs and was bound to {node} with {ids} = {sorted(uuids)}"
            )
        leased = {
            lease["metadata"]["annotations"].get(names.LEASE_DEVICE_UUID)
            for lease in self._leases()
            if lease["spec"]["holderIdentity"].endswith(f"/{uid}")
        }
        if not uuids <= leased:
            self.break_promise(3, f"{_name(pod)} was bound without Leases for {sorted(uuids - leased)}")
        silent = min(machine.silent_seconds for machine in machines_of(self._machines, node))
        if silent > SILENCE_SECONDS_MAX:
            self.break_promise(7, f"{_name(pod)} was bound to {node}, whose agent was not heard for {silent:.0f} s")
        is_inside = names.RESERVATION in pod["metadata"]["annotations"]
        marks = [
            names.RESERVATION in lease["metadata"]["annotations"]
            for lease in self._leases()
            if lease["spec"]["holderIdentity"].endswith(f"/{uid}")
            and lease["metadata"]["annotations"][names.LEASE_DEVICE_UUID] in uuids
        ]
        if any(mark is not is_inside for mark in marks):
            self.break_promise(3, f"{_name(pod)} was bound {'outside' if is_inside else 'inside'} of the reservation")
        for uuid in sorted(uuids):
            for other in self._users(node, uuid):
                if other != uid:
                    self.break_promise(1, f"{uuid} was given to {_name(pod)} while {other} may still use it")

    def _on_lease_end(self, lease: Object) -> None:
        annotations = lease["metadata"]["annotations"]
        if names.LEASE_DEVICE_UUID not in annotations or self._is_excused(lease["metadata"]["name"]):
            return
        uid = lease["spec"]["holderIdentity"].rpartition("/")[2]
        node, uuid = annotations[names.LEASE_NODE], annotations[names.LEASE_DEVICE_UUID]
        if uid in self._users(node, uuid):
            by = self._server.writer
            self.break_promise(
                1, f"Lease {lease['metadata']['name']} ended by {by} while its holder {uid} may use {uuid}"
            )

    # Every container

    def on_start(self, machine: SimulatedNode, uid: str) -> None:
        """A container starts."""
        self.checks_count += 1
        for uuid in sorted(machine.running[uid]):
            for other, uuids in machine.running.items():
                if other != uid and uuid in uuids:
                    self.break_promise(1, f"containers of {uid} and {other} run on {uuid} of {machine.ident} at once")

    # Every request

    def on_sent(self, in_flight: Iterable[tuple[str, str, Any]], method: str, path: str, body: Any) -> None:
        """A process asks for a Lease: it must not have asked for the same one for another pod a moment ago.

        A pod that may use the GPU already is promised nothing: its Lease was lost and is written again at once, and the
        server carries out one of the two requests. The other order is a breach, until that pod's end is proven: whoever
        asks for the Lease of such a pod knows that the GPU is taken.
        """
        if method != "POST" or path != LEASES:
            return
        name, holder = body["metadata"]["name"], body["spec"]["holderIdentity"]
        marks = body["metadata"].get("annotations", {})
        node, uuid = marks.get(names.LEASE_NODE, ""), marks.get(names.LEASE_DEVICE_UUID, "")
        users = self._users(node, uuid)
        if holder.rpartition("/")[2] in users:
            self._repairs.append(body)
            return
        asked = [one for other_method, other_path, one in in_flight if (other_method, other_path) == ("POST", LEASES)]
        for other in asked:
            other_holder = other["spec"]["holderIdentity"]
            is_repair = any(other is one for one in self._repairs) and other_holder.rpartition("/")[2] not in users
            if other["metadata"]["name"] == name and other_holder != holder and not is_repair:
                self.break_promise(1, f"one process promised {name} to {holder} and {other_holder}")

    # The end

    def leaks(self, is_nobodys: Callable[[Object], bool]) -> list[str]:
        """Return what is held by nobody, or used without being held, now that everything should be at rest."""
        pods = {pod["metadata"]["uid"]: pod for pod in self._server.pods()}
        held: set[tuple[str, str]] = set()
        found: list[str] = []
        for lease in self._leases():
            if _holder(lease).startswith(f"{RESERVATION_NAMESPACE}/"):
                continue
            annotations = lease["metadata"]["annotations"]
            uid, uuid = lease["spec"]["holderIdentity"].rpartition("/")[2], annotations[names.LEASE_DEVICE_UUID]
            pod = pods.get(uid)
            if pod is None or not pod["spec"].get("nodeName") or _has_ended(pod) or uuid not in wanted_uuids(pod):
                if is_nobodys(annotations):
                    continue
                found.append(f"Lease {lease['metadata']['name']} of {uid} holds {uuid}: leaked")
            held.add((uid, uuid))
        for uid, pod in pods.items():
            if pod["spec"].get("nodeName") and not _has_ended(pod):
                found += [
                    f"{uuid} of {uid} has no Lease" for uuid in sorted(wanted_uuids(pod)) if (uid, uuid) not in held
                ]
        return found

    def _leases(self) -> list[Object]:
        return [
            lease
            for lease in self._server.collection(LEASES)
            if names.LEASE_DEVICE_UUID in lease["metadata"].get("annotations", {})
        ]

    def _users(self, node: str, uuid: str) -> set[str]:
        """Return the uids of the pods that may use a GPU now or without anybody's doing."""
        users = {
            pod["metadata"]["uid"]
            for pod in self._server.pods()
            if pod["spec"].get("nodeName") == node and uuid in wanted_uuids(pod) and not _has_ended(pod)
        }
        for machine in machines_of(self._machines, node):
            uids = {*machine.running, *machine.wants, *(event.object["metadata"]["uid"] for event in machine.unseen())}
            users |= {uid for uid in uids if machine.may_use(uid, uuid)}
        return users


def _holder(lease: Object | None) -> str:
    holder: str = lease["spec"].get("holderIdentity", "") if lease is not None else ""
    return holder


def _has_ended(pod: Object) -> bool:
    return pod["status"].get("phase") in TERMINAL


def _name(pod: Object) -> str:
    return f"{pod['metadata']['name']} ({pod['metadata']['uid']})"
