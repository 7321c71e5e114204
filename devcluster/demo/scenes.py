"""The demo's scenes: each changes the cluster, shows the change and checks the result.

The first broken promise raises ExpectationFailed. Scenes depend on each other in the order of SCENES.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from atoll.api import names
from atoll.cluster.consistency import Finding, audit
from atoll.cluster.objects import Pod
from devcluster.demo import facts
from devcluster.demo.errors import ExpectationFailed
from devcluster.demo.facts import PodRow, Progress
from devcluster.demo.observer import CONTENTION, Observer
from devcluster.demo.stage import Terminal
from devcluster.installation import Installation

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ONE = "one"
WHOLE = "the-rest"


@dataclass(frozen=True, slots=True)
class Play:
    """Cluster, terminal and observer that every scene uses."""

    stage: Terminal
    observer: Observer
    installation: Installation

    def expect(self, holds: object, text: str, *, process: str) -> None:
        """Print `text` if `holds` is true. Raises ExpectationFailed otherwise."""
        if not holds:
            raise ExpectationFailed(f"not so: {text}", process=process)
        self.stage.kept(text)

    def show_pods(self, pods: Sequence[Pod]) -> tuple[PodRow, ...]:
        """Draw the pods once. Raises ExpectationFailed if a container saw other GPUs than promised."""
        rows = facts.pod_rows(pods, self.observer.snapshot().reports, self.observer.printed)
        with self.stage.pods() as draw:
            draw(rows)
        _expect_kept(rows)
        return rows


Scene = Callable[[Play], None]


def show_machines(play: Play) -> None:
    """Show four machines as their agents report them."""
    play.stage.scene("The machines, as each node's agent reports them")
    play.stage.machines(facts.machine_rows(play.observer.snapshot().reports))


def run_examples(play: Play) -> None:
    """Apply examples/: every pod gets its GPUs, and its containers print exactly those."""
    play.stage.scene("examples/: GPUs of each pod, and what its container sees")
    files = sorted(EXAMPLES.glob("*.yaml"))
    documents = [document for file in files for document in yaml.safe_load_all(file.read_text()) if document]
    wanted = sum(map(facts.pod_count, documents))
    reports = play.observer.snapshot().reports
    play.observer.enter()
    play.observer.apply(files)
    with play.stage.pods() as draw:

        def question() -> tuple[PodRow, ...] | None:
            pods = play.observer.pods()
            play.observer.read_prints(pods)
            rows = facts.pod_rows(pods, reports, play.observer.printed)
            draw(rows)
            done = all(facts.is_printed(pod, play.observer.printed) for pod in pods)
            return rows if done and len(pods) >= wanted else None

        rows = play.observer.wait(question, f"{wanted} pods of examples/ to print their GPUs", process="extender")
    _expect_kept(rows)
    _await_jobs(play)


def _await_jobs(play: Play) -> None:
    """Wait until the Jobs' pods have ended and hold no GPUs."""
    observer = play.observer

    def question() -> bool:
        snapshot = observer.snapshot()
        workers = [pod for pod in snapshot.pods if facts.is_of_job(pod)]
        return all(pod.status.phase == "Succeeded" and not snapshot.held_by(pod.metadata.uid) for pod in workers)

    observer.wait(question, "the Job's pods to end and give their GPUs back", process="controllers")
    play.stage.kept("the Job's pods have ended: their GPUs are free again")


def contend(play: Play) -> None:
    """A pod waits for GPUs that another one holds, shows why, and gets them once they are proven free."""
    stage, observer = play.stage, play.observer
    stage.scene("Two pods want the same GPUs")
    room = next((room for room in facts.free_gpus(observer.snapshot()) if len(room.ids) > 1), None)
    if room is None:
        raise ExpectationFailed("examples/ left no node with two free GPUs for this scene", process="extender")
    observer.create_claim(WHOLE, count=len(room.ids), models=(room.model,))
    uid = observer.create_pod("first", claim=WHOLE)
    first = observer.wait_printed("first")
    play.show_pods([first])
    observer.create_pod("second", claim=WHOLE)
    stage.say(f"first holds the last {len(room.ids)} GPUs of {room.node}; second requests as many and waits:")
    stage.quote(f"kube-scheduler: {_wait_refused(play, 'second')}")
    told = observer.wait(
        lambda: observer.events("second", names.REASON_WAITING),
        "Atoll's event that says why second waits",
        process="controllers",
    )
    stage.quote(f"Atoll: {told[-1]['note']}")
    with stage.step("first is deleted, second gets its GPUs"):
        observer.delete_pod("first")
        second = observer.wait_printed("second")
    _tell_hand_over(play, uid, second)
    play.expect(
        _uuids(first) == _uuids(second) and not observer.snapshot().held_by(uid),
        "second has exactly the GPUs of first, and nothing of first is left",
        process="controllers",
    )
    play.show_pods([second])


def _tell_hand_over(play: Play, former_uid: str, follower: Pod) -> None:
    """Print when the proof came, when the follower was bound, and what woke it."""
    observer, name = play.observer, follower.metadata.name
    release = facts.find_release(play.installation.log_lines("controllers"), former_uid)
    bound = observer.wait(lambda: observer.events(name, "Scheduled"), f"the event of {name}", process="kube-scheduler")
    if release is None:
        raise ExpectationFailed(
            f"the controllers' log has no release of the GPUs of pod {former_uid}", process="controllers"
        )
    seconds = facts.seconds_between(release.time, bound[-1]["eventTime"])
    play.stage.kept(f"proof that the former pod has ended: {release.words}")
    play.stage.kept(f"{seconds:.2f} s later {name} was bound (kube-scheduler's back-off included)")
    woken = follower.metadata.annotations.get(names.WOKEN)
    if woken:
        play.stage.kept(f"Atoll woke it: annotation {names.WOKEN}={woken}, event {names.REASON_POD_WOKEN}")
    else:
        play.stage.say("kube-scheduler had tried it again by itself before Atoll could wake it")


def delete_midway(play: Play) -> None:
    """Delete pods during creation and bind: nothing of them is left."""
    observer = play.observer
    play.stage.scene("Pods are deleted during creation and bind")
    observer.create_claim(ONE, count=1)
    uids = {name: observer.create_pod(name, claim=ONE) for name in ("brief-a", "brief-b", "brief-c")}
    with play.stage.step("one is deleted at once, one when bound, one when bound and by force (--grace-period=0)"):
        observer.delete_pod("brief-a")
        for name, force in (("brief-b", False), ("brief-c", True)):
            _wait_bound(play, name)
            observer.delete_pod(name, force=force)
        for name, uid in uids.items():
            observer.wait_gone(name, uid)
    play.stage.kept("none of these pods and none of their Leases is left")


def kill_parts(play: Play) -> None:
    """Kill parts of Atoll: no pod gets a GPU that another may still use, and all pods go on once the parts are back."""
    play.stage.scene("Parts are killed (SIGKILL) and restarted while pods start and end")
    second = play.observer.pod("second")
    if second is None:
        raise ExpectationFailed("pod second is gone although nobody deleted it", process="kube-apiserver")
    parts = ("controllers", f"agent@{second.spec.node_name}")
    newcomer = _go_on_without(play, parts, second)
    for part in parts:
        play.installation.start(part, wait=False)
    patient = _go_on_without_extender(play)
    with play.stage.step(f"{' and '.join(parts)} are back: proof, release, wake-up, and third gets the GPUs"):
        play.installation.wait_ready(parts)
        third = play.observer.wait_printed("third")
    _tell_hand_over(play, second.metadata.uid, third)
    play.show_pods([newcomer, patient, third])


def _go_on_without(play: Play, parts: Sequence[str], second: Pod) -> Pod:
    """Kill the parts and end a pod while another waits for its GPUs; return a pod that was bound meanwhile."""
    stage, observer = play.stage, play.observer
    for part in parts:
        play.installation.kill(part)
    stage.say(
        f"{' and '.join(parts)} are killed; second will end, third waits for its GPUs, newcomer requests another:"
    )
    observer.create_pod("third", claim=WHOLE)
    observer.create_pod("newcomer", claim=ONE)
    with stage.step("newcomer still gets its GPU, since a bind needs none of these parts"):
        newcomer = observer.wait_printed("newcomer")
    with stage.step("second is deleted and gone"):
        observer.delete_pod("second")
        observer.wait(lambda: observer.pod("second") is None, "second to be gone", process="kube-apiserver")
    held = observer.snapshot().held_by(second.metadata.uid)
    play.expect(
        len(held) == len(_uuids(second)) and not _is_bound(observer.pod("third")),
        "nobody gets its GPUs: the parts that could prove its end are down",
        process="extender",
    )
    return newcomer


def _go_on_without_extender(play: Play) -> Pod:
    """Kill and restart the extender; return a pod that was created in between."""
    stage, observer = play.stage, play.observer
    play.installation.kill("extender")
    stage.say("the extender is killed; patient requests a GPU, plain requests none:")
    observer.create_pod("patient", claim=ONE)
    observer.create_pod("plain", claim=None)
    with stage.step("plain starts as usual"):
        observer.wait(lambda: _phase(observer.pod("plain")) == "Running", "plain to run", process="kube-scheduler")
    stage.quote(f"patient waits, kube-scheduler: {_wait_refused(play, 'patient')}")
    with stage.step("the extender is restarted, patient gets its GPU"):
        play.installation.start("extender")
        return observer.wait_printed("patient")


def check(play: Play) -> None:
    """Compare Leases with pods, pods with the output of their containers, and locks with each other."""
    stage, observer = play.stage, play.observer
    stage.scene("Check of every promise")
    observer.read_prints_again()
    findings = _findings_twice(play)
    for finding in findings:
        stage.broken(str(finding))
    if findings:
        raise ExpectationFailed(f"{len(findings)} broken promises", process="controllers")
    snapshot = observer.snapshot()
    contention = observer.cluster.shared_dir / CONTENTION
    locks = len(list(observer.cluster.shared_dir.glob("GPU-*")))
    stage.kept(f"every one of {len(snapshot.records)} Leases has a live holder, and every held GPU has its Lease")
    stage.kept(f"every one of {len(observer.printed)} containers saw exactly its pod's GPUs")
    play.expect(
        not contention.exists(),
        f"the demo's pods locked {locks} GPUs, no GPU twice at a time",
        process="controllers",
    )


def summarize(play: Play) -> str:
    """Return the last line of a demo in which every promise held."""
    observer = play.observer
    reports = observer.snapshot().reports
    total = sum(report.status.device_count for report in reports if report.status is not None)
    pods = len({uid for uid, _ in observer.printed})
    used = f"{len(observer.used)} of {total} GPUs"
    return f"every promise held: {pods} pods, {used}, {play.stage.seconds:.0f} s"


SCENES: tuple[Scene, ...] = (
    show_machines,
    run_examples,
    contend,
    delete_midway,
    kill_parts,
    check,
)


def _findings_twice(play: Play) -> tuple[Finding, ...]:
    """Return findings of two audits in a row: lists fetched one after another may disagree for a moment."""
    both: set[Finding] | None = None
    for _ in range(2):
        snapshot = play.observer.snapshot()
        found = set(audit(snapshot.pods, snapshot.leases, snapshot.reports, play.observer.printed.values()))
        both = found if both is None else both & found
    return tuple(sorted(both or ()))


def _expect_kept(rows: Iterable[PodRow]) -> None:
    for row in rows:
        if row.progress is not Progress.KEPT:
            promised, saw = ",".join(row.promised) or "nothing", ",".join(row.saw or ()) or "nothing"
            what = f"pod {row.pod} on {row.node or 'no node'} was promised GPUs {promised}; its container saw {saw}"
            raise ExpectationFailed(what, process="webhook")


def _wait_bound(play: Play, name: str) -> None:
    play.observer.wait(lambda: _is_bound(play.observer.pod(name)), f"pod {name} to be bound", process="extender")


def _wait_refused(play: Play, name: str) -> str:
    def question() -> str | None:
        pod = play.observer.pod(name)
        return facts.waiting_reason(pod) if pod is not None else None

    return play.observer.wait(question, f"pod {name} to be refused", process="kube-scheduler")


def _uuids(pod: Pod) -> frozenset[str]:
    return frozenset(pod.metadata.annotations.get(names.UUIDS, "").split(","))


def _is_bound(pod: Pod | None) -> bool:
    return pod is not None and bool(pod.spec.node_name)


def _phase(pod: Pod | None) -> str:
    return pod.status.phase if pod is not None else ""
