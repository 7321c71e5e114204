"""Removable guards of the production code: the simulation must detect their removal.

Each guard is one line of defence that a careless change could remove. The removal of each of GUARDS must make the
simulation fail. A row's `seed` is a seed with a failure, where the test starts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from atoll.api.times import seconds_of
from atoll.cluster import release as proof
from atoll.cluster import reports
from atoll.cluster.gangs import lifecycle, member_requests
from atoll.cluster.gangs.membership import key_of
from atoll.cluster.gangs.queue import AdmissionAttempts, Ahead
from atoll.cluster.holds import DeviceHolds
from atoll.cluster.leases import Holder
from atoll.cluster.ledger import Ledger
from atoll.cluster.lost_leases import LostLeases
from atoll.cluster.objects import Pod
from atoll.cluster.requests import Rejection
from atoll.kube import patches
from controllers import pod_calls
from controllers.context import Context
from controllers.gangs import lifecycle as gang_loop
from controllers.gangs.admission import AdmissionReconciler
from controllers.gangs.cache import GangCache
from controllers.leases import orphans, terminations
from controllers.leases import release as releasing
from controllers.leases import writes as lease_writes
from extender import bind_plan, binder, posting, reading, reservations


@dataclass(frozen=True, slots=True)
class Guard:
    """What it protects from, and how it is taken away; the returned value puts it back."""

    why: str
    remove: Callable[[], "Undo"]
    seed: int = 0


Undo = Callable[[], None]


def swapping(*swaps: tuple[Any, str, Any]) -> Undo:
    """Replace attributes; the result puts the old ones back."""
    old = [(owner, name, getattr(owner, name)) for owner, name, _ in swaps]
    for owner, name, value in swaps:
        setattr(owner, name, value)

    def undo() -> None:
        for owner, name, value in old:
            setattr(owner, name, value)

    return undo


def _binding_without_version() -> Undo:
    def body(pod: Pod, node: str, annotations: dict[str, str], resource_version: str) -> dict[str, Any]:
        return bind_plan.binding_body(pod, node, annotations, "")

    return swapping((posting, "binding_body", body))


def _deletes_without_preconditions() -> Undo:
    def options(**_: Any) -> dict[str, object]:
        return patches.delete_options()

    return swapping((lease_writes, "delete_options", options), (reservations, "delete_options", options))


def _assume_after_the_first_await() -> Undo:
    original, assume = reservations.create_leases, Ledger.assume

    async def create(client: Any, attempt: Any, allocation: Any) -> Any:
        lost = await original(client, attempt, allocation)
        if binder_ledgers:
            assume(binder_ledgers[-1], attempt.reservation.holder.uid, allocation, attempt=attempt.reservation.attempt)
        return lost

    binder_ledgers: list[Ledger] = []

    def late(self: Ledger, uid: str, _allocation: Any, **_: str) -> None:
        self.drop_tentative(uid)
        binder_ledgers.append(self)

    return swapping((reservations, "create_leases", create), (Ledger, "assume", late))


def _attempts_without_tokens() -> Undo:
    async def adopt(_client: Any, attempt: Any, record: Any, _body: Any) -> None:
        attempt.reservation = replace(attempt.reservation, attempt=record.attempt)

    return swapping((reservations, "_adopt", adopt))


def _unanswered_deleted_whoever_made_them() -> Undo:
    async def delete(client: Any, name: str, _token: str) -> None:
        lease = await reservations._read(client, name)
        record = reservations._record(lease) if lease is not None else None
        if record is not None:
            await reservations._delete(client, record)

    return swapping((reservations, "_delete_if_own", delete))


def _taken_over_leases_go_back() -> Undo:
    class Forgetful(set[str]):
        def __rsub__(self, other: Any) -> Any:
            return set(other)

    class UnguardedAttempt(reservations.BindAttempt):
        def __init__(self, *facts: Any) -> None:
            super().__init__(*facts)
            self.adopted = Forgetful()

    return swapping((reservations, "BindAttempt", UnguardedAttempt))


def _take_over_without_moving_the_pod() -> Undo:
    async def move(context: Context, holder: Holder, *, generation: int) -> Pod | None:
        del generation
        return context.mirror.pods.by_uid.get(holder.uid)

    return swapping((orphans, "move", move))


def _newer_version_without_asking_for_the_leases() -> Undo:
    async def check(*_: Any) -> None:
        pass

    return swapping((posting, "_check_still_held", check))


def _leases_given_back_when_in_doubt() -> Undo:
    original = binder.post_binding

    async def post(*arguments: Any) -> Any:
        try:
            return await original(*arguments)
        except binder.BindInDoubt as doubt:
            raise binder.BindRefused(str(doubt)) from doubt

    return swapping((binder, "post_binding", post))


def _first_answer_taken_for_the_only_one() -> Undo:
    original = posting._send_until_answered

    async def send(*arguments: Any) -> Any:
        sent = await original(*arguments)
        return replace(sent, may_have_landed=False)

    return swapping((posting, "_send_until_answered", send))


def _release_without_a_live_look() -> Undo:
    async def look_up(_api: Any, _holder: Any) -> pod_calls.PodLookup:
        return pod_calls.PodLookup(None, 0)

    return swapping((releasing, "look_up", look_up))


def _look_up_by_name() -> Undo:
    async def look_up(api: Any, holder: Any) -> pod_calls.PodLookup:
        selector = {"fieldSelector": f"metadata.name={holder.name}"}
        listing = await api.list(pod_calls.paths.pods(holder.namespace), pod_calls.decode_pod, params=selector)
        return pod_calls.PodLookup(next(iter(listing.items), None), pod_calls.version_number(listing.resource_version))

    return swapping((releasing, "look_up", look_up))


def _evidence_of_any_time() -> Undo:
    return swapping((proof, "version_number", lambda _version: 10**9))


def _terminal_phase_is_enough() -> Undo:
    return swapping((proof, "has_ended", proof.pods.is_terminal))


def _any_machine_of_that_name() -> Undo:
    return swapping((proof, "_is_same_machine", lambda *_: True))


def _every_deletion_counts_as_seen() -> Undo:
    original = terminations.PodTerminations.note_absence

    def note(self: Any, uid: str, version: int) -> Any:
        gone = replace(original(self, uid, version), is_seen=True)
        self._gone[uid] = gone
        return gone

    def observe_pod(self: Any, change: Any) -> None:
        if change.kind is terminations.ChangeKind.DELETED:
            pod = change.object
            version = terminations.version_number(pod.metadata.resource_version)
            self._gone[pod.metadata.uid] = terminations.DeletedPod(pod, version, is_seen=True)

    return swapping(
        (terminations.PodTerminations, "note_absence", note),
        (terminations.PodTerminations, "_observe_pod", observe_pod),
    )


def _any_new_boot_is_proof() -> Undo:
    original = proof._fold_boot

    def fold(departure: Any, boot_id: str) -> Any:
        folded = original(departure, boot_id)
        return replace(folded, boot_changed=folded.boot_changed or bool(departure.boot_id not in {"", boot_id}))

    return swapping((proof, "_fold_boot", fold))


def _what_kubelet_lists_does_not_matter() -> Undo:
    original = proof._fold_evidence

    def fold(known: Any, report: Any, entry: Any) -> Any:
        return original(known, report, entry if entry is not None and entry.live else None)

    return swapping((proof, "_fold_evidence", fold))


def _annotation_does_not_outrank_the_lease() -> Undo:
    original = DeviceHolds._hold

    def hold(self: DeviceHolds, node: str, ids: Any, uuids: Any, hold: Any) -> None:
        if hold.source != "pod":
            original(self, node, ids, uuids, hold)

    return swapping((DeviceHolds, "_hold", hold))


def _successor_taken_for_its_predecessor() -> Undo:
    original = Ledger.drop_lease

    def put(self: Ledger, pod: Pod) -> None:
        for record in list(self.leases.values()):
            if record.holder.name == pod.metadata.name and record.holder.uid != pod.metadata.uid:
                original(self, record.lease_name)
        put_pod(self, pod)

    put_pod = Ledger.put_pod
    return swapping((Ledger, "put_pod", put))


def _lost_leases_are_forgotten() -> Undo:
    return swapping((LostLeases, "records", lambda *_: ()))


def _pods_run_beside_their_reservation() -> Undo:
    original = reading.request_of

    def request_of(*arguments: Any, **options: Any) -> Any:
        found = original(*arguments, **options)
        return found if isinstance(found, Rejection) else replace(found, reservation="")

    return swapping((reading, "request_of", request_of))


def _gangs_run_beside_their_reservation() -> Undo:
    original = member_requests.request_of

    def request_of(*arguments: Any, **options: Any) -> Any:
        found = original(*arguments, **options)
        return found if isinstance(found, Rejection) else replace(found, reservation="")

    return swapping((member_requests, "request_of", request_of))


def _time_of_an_adopted_gang_never_begins() -> Undo:
    original = lifecycle._with_start

    def start(status: Any, now_seconds: float) -> Any:
        return status if status.assignment is None else original(status, now_seconds)

    return swapping((lifecycle, "_with_start", start))


def _successes_are_read_off_objects() -> Undo:
    return swapping((lifecycle, "remember", lambda *_, **__: ()))


def _admissions_are_not_told_apart() -> Undo:
    return swapping((lifecycle, "of_admission", lambda members, *_: tuple(members)))


def _attempts_belong_to_a_name() -> Undo:
    def attempts(self: GangCache, gang: Any) -> AdmissionAttempts:
        return self.attempts.get(key_of(gang)) or AdmissionAttempts()

    return swapping((GangCache, "attempts_of", attempts))


def _age_of_a_heartbeat_by_its_agents_clock() -> Undo:
    return swapping((reports, "stored_seconds", lambda heartbeat: seconds_of(heartbeat.spec.renew_time or "")))


def _members_let_go_with_what_there_is() -> Undo:
    original = AdmissionReconciler._reserve

    async def reserve(self: Any, view: Any, assignments: Any, reservation: str) -> bool:
        await original(self, view, assignments[:1], reservation)
        return True

    return swapping((AdmissionReconciler, "_reserve", reserve))


def _leases_of_a_gang_taken_back_without_a_fence() -> Undo:
    """The two guards of gates that follow hide its loss, so they go too."""

    async def fence(*_: Any) -> None:
        pass

    undo_others = (_gates_open_for_what_the_mirror_shows(), _gates_open_for_members_that_hold_nothing())
    undo_own = swapping((gang_loop, "fence", fence), (GangCache, "is_in_doubt", lambda *_: False))

    def undo() -> None:
        for one in (undo_own, *undo_others):
            one()

    return undo


def _gates_open_for_what_the_mirror_shows() -> Undo:
    async def is_reserved(*_: Any) -> bool:
        return True

    return swapping((gang_loop, "is_reserved", is_reserved))


def _gates_open_for_members_that_hold_nothing() -> Undo:
    original = lifecycle.quorum

    def quorum(spec: Any, members: Any, succeeded: Any = ()) -> Any:
        return original(spec, quorum_members[-1], succeeded) if quorum_members else original(spec, members, succeeded)

    quorum_members: list[Any] = []
    decide = lifecycle._decide_admitted

    def decide_admitted(view: Any, *facts: Any, **options: Any) -> Any:
        quorum_members.append(view.members)
        try:
            return decide(view, *facts, **options)
        finally:
            quorum_members.pop()

    return swapping((lifecycle, "quorum", quorum), (lifecycle, "_decide_admitted", decide_admitted))


def _gangs_ahead_are_not_counted() -> Undo:
    return swapping((Ahead, "with_gang", lambda ahead, _name, _usable: ahead))


GUARDS: dict[str, Guard] = {
    "version in the Binding": Guard("a late Binding lands on a moved pod", _binding_without_version, seed=168),
    "preconditions on deletes": Guard(
        "a late deletion hits the successor's Lease", _deletes_without_preconditions, seed=42
    ),
    "assume before await": Guard("two binds of one process choose one GPU", _assume_after_the_first_await, seed=18),
    "attempt token": Guard("a rollback frees what a newer attempt relies on", _attempts_without_tokens, seed=299),
    "token of the unanswered": Guard(
        "a rollback frees another attempt's Lease", _unanswered_deleted_whoever_made_them, seed=85
    ),
    "taken over stays": Guard("a failed adoption frees the bound pod's Lease", _taken_over_leases_go_back, seed=148),
    "take-over moves the pod": Guard(
        "the old Binding lands after the GPU was sold", _take_over_without_moving_the_pod, seed=9
    ),
    "Leases asked before a newer version": Guard(
        "a bind goes on with Leases that were taken back", _newer_version_without_asking_for_the_leases, seed=92
    ),
    "live look before release": Guard("the cache has not seen the pod yet", _release_without_a_live_look, seed=228),
    "uid of the live look": Guard("a successor keeps the predecessor's GPUs for ever", _look_up_by_name, seed=12),
    "kubelet's own word": Guard("somebody else set the phase", _terminal_phase_is_enough, seed=27),
    "machine of the report": Guard("another machine has the name now", _any_machine_of_that_name, seed=24),
    "annotation outranks the Lease": Guard(
        "a lost Lease sells a GPU in use", _annotation_does_not_outrank_the_lease, seed=39
    ),
    "lost Leases are remembered": Guard(
        "a Lease and its pod go at once, and the container runs on", _lost_leases_are_forgotten, seed=39
    ),
    "request with its reservation": Guard(
        "a pod runs outside of what it names", _pods_run_beside_their_reservation, seed=7
    ),
    "identity is the uid": Guard(
        "a successor frees its predecessor's GPUs", _successor_taken_for_its_predecessor, seed=4
    ),
    "Leases stay in doubt": Guard(
        "an unanswered Binding had landed after all", _leases_given_back_when_in_doubt, seed=174
    ),
    "earlier copies of a Binding": Guard(
        "an unanswered copy lands later, or had landed", _first_answer_taken_for_the_only_one, seed=174
    ),
    "position of the evidence": Guard("a report from before the departure frees", _evidence_of_any_time, seed=1209),
    "seen deletion": Guard(
        "a pod that was bound in the gap counts as never bound", _every_deletion_counts_as_seen, seed=1206
    ),
    "boot after the departure": Guard("kubelet restarts a pod that is still bound", _any_new_boot_is_proof, seed=21),
    "kubelet's list": Guard("kubelet starts the sandbox again", _what_kubelet_lists_does_not_matter, seed=1356),
    "time of an adopted gang": Guard("it holds its GPUs for ever", _time_of_an_adopted_gang_never_begins, seed=1500),
    "successes are remembered": Guard(
        "who is done and collected is missed", _successes_are_read_off_objects, seed=1500
    ),
    "gang within its reservation": Guard(
        "a gang runs outside of what it names", _gangs_run_beside_their_reservation, seed=1500
    ),
    "id of an admission": Guard("one of the last ends the next", _admissions_are_not_told_apart, seed=1500),
    "attempts by uid": Guard("a successor waits for its predecessor", _attempts_belong_to_a_name, seed=1500),
    "clock of the API server": Guard("a dead agent looks alive", _age_of_a_heartbeat_by_its_agents_clock, seed=1500),
    "fence of a gang": Guard(
        "an admission arrives whose Leases are gone", _leases_of_a_gang_taken_back_without_a_fence, seed=1500
    ),
    "Leases renewed before a gate": Guard(
        "a member starts whose Leases are being deleted", _gates_open_for_what_the_mirror_shows, seed=2822
    ),
    "all hold before the first gate": Guard(
        "half a gang starts when one is made anew", _gates_open_for_members_that_hold_nothing, seed=1545
    ),
    "strict order": Guard("a gang passes one that waits for room", _gangs_ahead_are_not_counted, seed=20_000),
    "every Lease before a gate": Guard("half a gang starts", _members_let_go_with_what_there_is, seed=1500),
}
"""Whose loss a history shows."""


@contextmanager
def without(guard: str) -> Iterator[None]:
    """Run with one guard removed; with none for an empty name."""
    if not guard:
        yield
        return
    undo = GUARDS[guard].remove()
    try:
        yield
    finally:
        undo()
