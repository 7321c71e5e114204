"""Where a job would run, what it waits for and what would help, by the functions of `atoll simulate`.

Quotas are not checked: Kueue holds a job that exceeds them before any of this counts.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from atoll.api import job_names
from atoll.api.gangs import GpuGang
from atoll.cluster.gangs.membership import gang_key
from atoll.cluster.objects import Metadata, Pod, PriorityClass
from atoll.cluster.reservation_use import has_one_user
from atoll.explain.codec import with_objects
from atoll.explain.decision import IndexedSnapshot, index_snapshot
from atoll.explain.explanation import PodState
from atoll.explain.gang_decision import index_gangs
from atoll.explain.gang_explanation import GangExplanation, explain_gang
from atoll.explain.simulation import Simulation, simulate
from atoll.explain.snapshot import ClusterSnapshot
from atoll.jobs.fitting import workers_of
from atoll.jobs.model import Job
from atoll.jobs.profiles import patterns_of, profile_of
from atoll.jobs.rendering import Rendered
from atoll.jobs.selection import KnownNode
from atoll.jobs.words import PRIORITY_VALUES, DeploymentType
from atoll.ml.attributes import MlAttributes, ModelRegistry
from atoll.ml.capabilities import WorkerCapability
from atoll.ml.matching import MatchInput, impossible_tpu, rank, score, unmet
from atollctl.explain_text import gang_lines, lines
from atollctl.manifests import BUILT_IN, shaped, sort_documents
from atollctl.output import counted
from atollctl.simulate import as_json, new_claims, text_lines

WITHOUT_GPUS: Final = "asks Atoll for no GPU: kube-scheduler places it by cpu, memory and labels"

NODES_MAX: Final = 5
REACHABLE: Final = MatchInput(registries={ModelRegistry.HUGGINGFACE: ""})
"""A job that names no registry has its model from the public one."""
OF_HELM: Final = "Helm makes the pods: ask `helm template` for them, and `atoll simulate -f` where they would go"


@dataclass(frozen=True, slots=True)
class JobAnswer:
    """The answer for one job. `gang`: why its gang would wait; `hints`: what to set up first."""

    job: Job
    rendered: Rendered
    simulation: Simulation
    scene: IndexedSnapshot
    gang: GangExplanation | None
    hints: tuple[str, ...]
    workers: tuple[WorkerCapability, ...]

    @property
    def impossible(self) -> str:
        """Why no node can ever give the job its TPU slice; empty if one can."""
        return impossible_tpu(self.rendered.needs.attributes, self.workers)

    @property
    def fits(self) -> bool:
        """True if every pod that Atoll places has a place, and a slice of TPUs exists."""
        return not self.impossible and all(
            one.allocation is not None or (one.explanation is not None and one.explanation.state is PodState.NO_GPUS)
            for one in self.simulation.outcomes
        )


def known_nodes(found: ClusterSnapshot) -> tuple[KnownNode, ...]:
    """Return the nodes with their labels and hardware, by the names used in rules."""
    return tuple(KnownNode(worker.worker_id, worker.labels) for worker in workers_of(found))


def answer_job(found: ClusterSnapshot, job: Job, rendered: Rendered, *, namespace: str, file: Path) -> JobAnswer:
    """Place the job's pods. Raises ManifestMistake and QuestionMistake if the cluster would refuse its objects."""
    wanted = sort_documents([(file, one) for one in rendered.objects], namespace=namespace)
    found = with_objects(found, claims=new_claims(found, wanted.claims))
    found, hints = _with_priorities(found, rendered)
    asking = shaped(wanted.pods, namespace=namespace, cluster=found)
    simulation = simulate(found, asking, wanted.gangs)
    scene = index_snapshot(found)
    waits = bool(wanted.gangs) and any(one.allocation is None for one in simulation.outcomes)
    gang = _waiting_gang(found, asking, wanted.gangs[0]) if waits else None
    hints += _timeout_hints(found, rendered.needs.attributes)
    return JobAnswer(job, rendered, simulation, scene, gang, hints, workers_of(found))


def _timeout_hints(found: ClusterSnapshot, attributes: MlAttributes) -> tuple[str, ...]:
    """Return a hint if the job asks for a release that its reservation does not obey."""
    name, seconds = attributes.reservation_id, attributes.reservation_timeout_s
    reservation = next((one for one in found.reservations if one.metadata.name == name), None)
    if seconds is None or reservation is None or has_one_user(reservation):
        return ()
    text = f"GpuReservation {name} has several users, so only its own unusedTimeoutSeconds releases it"
    return (f"ext_ml_reservation_timeout_s {seconds} has no effect: {text}",)


def _with_priorities(found: ClusterSnapshot, rendered: Rendered) -> tuple[ClusterSnapshot, tuple[str, ...]]:
    """Return the cluster with the job's PriorityClass, and a hint if it is missing."""
    known = {one.metadata.name for one in (*BUILT_IN, *found.priority_classes)}
    templates = [one["spec"]["template"]["spec"] for one in rendered.objects if "template" in one["spec"]]
    missing = {spec["priorityClassName"] for spec in templates} - known
    if not missing:
        return found, ()
    made = tuple(PriorityClass(Metadata(name), PRIORITY_VALUES[rendered.needs.priority]) for name in sorted(missing))
    hint = (
        f"there is no PriorityClass {', '.join(sorted(missing))}, so the cluster would refuse the pods: "
        "set priorityClasses.create in Atoll's chart, or kubectl apply -f examples/jobs/complete/priority-classes.yaml"
    )
    return replace(found, priority_classes=(*found.priority_classes, *made)), (hint,)


def _waiting_gang(found: ClusterSnapshot, asking: list[Pod], gang: GpuGang) -> GangExplanation:
    others = (one for one in found.gangs if one.metadata.uid != gang.metadata.uid)
    members = [pod for pod in asking if gang_key(pod) is not None]
    scene = index_snapshot(with_objects(replace(found, gangs=(*others, gang)), pods=members))
    return explain_gang(index_gangs(scene), gang)


def job_text(job: Job, rendered: Rendered) -> str:
    """Return one line about a job: its kind and its request."""
    needs = rendered.needs
    workload = next((one for one in rendered.objects if "template" in one["spec"]), None)
    spec = workload["spec"] if workload is not None else {}
    at_once = spec.get("parallelism", spec.get("replicas", 1))
    pods = counted(at_once, "pod", "pods")
    if needs.gpus is not None:
        pods += f" with {counted(needs.gpus.claim.count, 'GPU', 'GPUs')}" + (" each" if at_once > 1 else "")
    elif needs.tpus is not None:
        pods += f" with {counted(needs.tpus.chips, 'TPU chip', 'TPU chips')}" + (" each" if at_once > 1 else "")
    together = ", started together" if needs.is_gang else ""
    made = f" by Helm from {job.helm.chart}" if job.deployment_type is DeploymentType.HELM and job.helm else ""
    return f"{job.job_type} {job.name}{made}: {pods}{together}; priority {needs.priority}"


def answer_lines(answer: JobAnswer, *, show_all: bool) -> Iterator[str]:
    """Yield the answer as lines."""
    job, needs = answer.job, answer.rendered.needs
    profile = profile_of(job, needs.attributes)
    yield job_text(job, answer.rendered)
    yield f"  profile {profile.name}, flavors {', '.join(profile.flavors)}" + "".join(
        f"; {pattern}" for pattern in patterns_of(job)
    )
    queue = _queue(answer.rendered)
    if queue:
        yield f"  queue {queue}: Kueue starts it when its quota allows; what follows counts from then"
    yield from (f"  {hint}" for hint in answer.hints)
    yield ""
    if answer.rendered.helm is not None or answer.impossible:
        yield OF_HELM if answer.rendered.helm is not None else answer.impossible
        return
    if needs.gpus is None and not needs.is_gang:
        yield WITHOUT_GPUS
        yield from _node_lines(answer)
        return
    yield from _node_lines(answer)
    yield from text_lines(answer.simulation, show_all=show_all)
    if answer.gang is not None:
        yield ""
        yield from gang_lines(answer.gang, answer.scene, show_all=show_all)
        return
    waiting = [one for one in answer.simulation.outcomes if one.allocation is None and one.explanation is not None]
    for one in waiting[:1]:
        assert one.explanation is not None
        yield ""
        yield from lines(one.explanation, answer.scene, one.pod, show_all=show_all)


def _node_lines(answer: JobAnswer) -> Iterator[str]:
    """Yield the nodes that meet every condition of the job when they are empty, those with its model first."""
    attributes = answer.rendered.needs.attributes
    if attributes.model_id is None and answer.rendered.needs.gpus is not None:
        return
    best = rank(attributes, answer.workers, REACHABLE)
    if best:
        scores = ((worker.worker_id, score(attributes, worker, REACHABLE)) for worker in best[:NODES_MAX])
        shown = ", ".join(f"{name} ({points} points)" if points else name for name, points in scores)
        more = f", and {len(best) - NODES_MAX} more" if len(best) > NODES_MAX else ""
        yield f"nodes that serve it, the nearest to its model first: {shown}{more}"
        return
    lacking = Counter(reason for worker in answer.workers for reason in unmet(attributes, worker, REACHABLE)[:1])
    reasons = "; ".join(f"{reason} ({counted(count, 'node', 'nodes')})" for reason, count in lacking.most_common(3))
    yield f"no node serves it: {reasons}" if reasons else "no node serves it: there is none"


def _queue(rendered: Rendered) -> str:
    labels = (one["metadata"]["labels"].get(job_names.QUEUE_NAME) for one in rendered.objects)
    return next((str(label) for label in labels if label), "")


def answer_json(answer: JobAnswer) -> dict[str, Any]:
    """Return the answer as plain values."""
    profile = profile_of(answer.job, answer.rendered.needs.attributes)
    return {
        "job": answer.job.name,
        "fits": answer.fits,
        "priority": answer.rendered.needs.priority.value,
        "profile": profile.name,
        "flavors": list(profile.flavors),
        "patterns": [pattern.value for pattern in patterns_of(answer.job)],
        "queue": _queue(answer.rendered),
        "impossible": answer.impossible,
        "hints": list(answer.hints),
        **as_json(answer.simulation),
    }
