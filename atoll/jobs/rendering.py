"""Renders a job as Kubernetes objects, with notes that map fields to objects.

Takes a Job, the administrator's settings, the cluster's nodes if known, and the time from which a deadline counts.
kubectl can apply the objects of the frozen Rendered in order. Raises JobMistake. Pure: the same job gives the same
bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel

from atoll.api import job_names, names
from atoll.api.claims import GpuClaimSpec
from atoll.api.gangs import GangPodSet, GpuGangSpec
from atoll.jobs.container import JobContainer
from atoll.jobs.contracts import CONTRACTS
from atoll.jobs.labels import (
    NOT_FOR_CONTAINERS,
    ON_PODS,
    POD_SET,
    identity_of,
    labels_of,
    queue_labels,
    workload,
    workload_annotations,
)
from atoll.jobs.model import Job
from atoll.jobs.needs import Needs, needs_of
from atoll.jobs.notes import HINT, NO_EFFECT, ONLY_SERVICE, Note, NoteBook
from atoll.jobs.pods import Rendering, checkpoint_claim, served, template_of
from atoll.jobs.selection import KnownNode
from atoll.jobs.settings import RenderSettings
from atoll.jobs.words import DeploymentType, JobType, TopologyConstraint
from atoll.ml.attributes import NAMES, PREFIX
from atoll.ml.tables import TPU_RESOURCE

CPU_UTILIZATION: Final = 80
"""Share of the CPU request, in percent, at which an autoscaler adds replicas."""
DISRUPTED: Final = {"type": "DisruptionTarget", "status": "True"}
DEVICES: Final = (names.GPU_RESOURCE, TPU_RESOURCE)
HELM_LISTS: Final = ("nodeSelector", "tolerations", "affinity", "priorityClassName", "schedulerName")
FOR_CHARTS: Final = {
    "policy": frozenset({"priority_class", "preemptible", "topology", "node_selector", "tolerations"}),
    "intent": frozenset({"optimization_goal", "workload_class", "spot_eligible"}),
}
"""Fields that the values for Helm express, by their part of the job."""
NOT_FOR_CHARTS: Final = (
    frozenset(ON_PODS) - NOT_FOR_CONTAINERS - {"accelerator", "tpu_type", "tpu_topology", "model_id", "model_version"}
) | {"shm_size_gb", "preemption_grace_period_s", *(name for name in NAMES if name.startswith("checkpoint_"))}
"""Attributes that need variables, volumes or times of the container, which every chart names in its own way."""

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class HelmInstall:
    """Values for Helm, for a job from a chart: most charts pass these to their pods."""

    release: str
    chart: str
    version: str
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rendered:
    """Objects in the order of application, notes in the order of the decisions."""

    objects: tuple[Object, ...]
    notes: tuple[Note, ...]
    needs: Needs
    helm: HelmInstall | None = None


def render(
    job: Job,
    settings: RenderSettings | None = None,
    *,
    nodes: Sequence[KnownNode] | None = None,
    now_seconds: float | None = None,
) -> Rendered:
    """Return the objects of a job. Raises JobMistake with the field and what to do."""
    settings, book = settings or RenderSettings(), NoteBook()
    needs = needs_of(job, settings, now_seconds=now_seconds, book=book)
    of = Rendering(job, needs, settings, nodes, book)
    template = template_of(of)
    objects = _claims(of)
    helm = None
    if job.deployment_type is DeploymentType.HELM:
        helm = _helm(job, template, book)
    else:
        container = served(of)
        objects += [*_volume(of), *_service(of, container)]
        objects += _deployment(of, template, container) if job.job_type is JobType.SERVICE else [_job(of, template)]
    _tell_rest(job, needs, book)
    if helm is not None:
        _tell_chart(job, book)
    return Rendered(tuple(objects), book.notes, needs, helm)


def _head(of: Rendering, api_version: str, kind: str, name: str) -> Object:
    metadata: Object = {"name": name}
    if of.job.namespace is not None:
        metadata["namespace"] = of.job.namespace
    labels = labels_of if kind in ("Job", "Deployment") else identity_of
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata | {"labels": labels(of.job, of.needs)}}


def _claims(of: Rendering) -> list[Object]:
    """Return the GpuClaim of each pod with GPUs, and the GpuGang of pods that work together."""
    job, needs = of.job, of.needs
    objects = []
    if needs.gpus is not None:
        spec = GpuClaimSpec(devices=needs.gpus.claim, gang_ref=job.name if needs.is_gang else None)
        objects.append(_head(of, names.API_VERSION, "GpuClaim", job.name) | {"spec": _plain(spec)})
    if needs.is_gang:
        gang = GpuGangSpec(pod_sets=(GangPodSet(name=POD_SET, count=needs.workers),), topology=needs.together)
        objects.append(_head(of, names.API_VERSION, "GpuGang", job.name) | {"spec": _plain(gang)})
    return objects


def _plain(spec: GpuClaimSpec | GpuGangSpec) -> Object:
    return spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)


def _volume(of: Rendering) -> list[Object]:
    """Return the volume for checkpoints. Pods on several nodes need one that all can write."""
    job, checkpoint = of.job, of.needs.checkpoint
    if checkpoint is None or not checkpoint.mount_path:
        return []
    is_shared = of.needs.workers > 1 and job.policy.topology is not TopologyConstraint.SAME_NODE
    mode = "ReadWriteMany" if is_shared or _pods(job) > 1 else "ReadWriteOnce"
    spec = {
        "accessModes": [mode],
        "storageClassName": checkpoint.storage_class,
        "resources": {"requests": {"storage": checkpoint.storage_size}},
    }
    name = checkpoint_claim(job)
    for field, value in (("storage_class", checkpoint.storage_class), ("storage_size", checkpoint.storage_size)):
        given = job.intent.checkpoint_config is not None and field in job.intent.checkpoint_config.model_fields_set
        path = "spec.storageClassName" if field == "storage_class" else "spec.resources.requests.storage"
        of.book.tell(
            f"intent.checkpoint_config.{field}",
            value if given else None,
            f"{path} {value}",
            f"PersistentVolumeClaim/{name}",
        )
    return [_head(of, "v1", "PersistentVolumeClaim", name) | {"spec": spec}]


def _pods(job: Job) -> int:
    """Return the number of independent pods of a batch that run at once."""
    most = job.completions or job.parallelism or 1
    return min(job.parallelism or 1, most)


def _service(of: Rendering, container: JobContainer) -> list[Object]:
    """Return the Service for the job's name; for pods that work together, one name per pod."""
    job, needs = of.job, of.needs
    selector = {job_names.JOB_NAME: job.name}
    ports = [{"name": one.name, "port": one.port, "targetPort": one.name} for one in container.ports]
    if needs.workers > 1:
        port = {"name": "rendezvous", "port": job_names.MASTER_PORT_NUMBER}
        spec: Object = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector, "ports": [port]}
        of.book.tell("workers", needs.workers, f"found as {job.name}-0.{job.name} and so on", f"Service/{job.name}")
    elif job.job_type is JobType.SERVICE and ports:
        spec = {"selector": selector, "ports": ports}
        of.book.tell(
            "container.ports",
            ", ".join(str(one.port) for one in container.ports),
            f"reachable at http://{job.name}:{container.ports[0].port}",
            f"Service/{job.name}",
        )
    else:
        return []
    return [_head(of, "v1", "Service", job.name) | {"spec": spec}]


def _workload(of: Rendering, api_version: str, kind: str) -> Object:
    job = of.job
    head = _head(of, api_version, kind, job.name)
    head["metadata"]["labels"] |= queue_labels(job, of.settings.priority_classes[of.needs.priority], of.book)
    annotations = workload_annotations(job)
    if annotations:
        head["metadata"]["annotations"] = annotations
    return head


def _deployment(of: Rendering, template: Object, container: JobContainer) -> list[Object]:
    """Return a Deployment, with its autoscaler if requested."""
    job, policy = of.job, of.job.policy
    replicas = policy.least_replicas
    if policy.min_replicas is not None:
        of.book.tell("policy.min_replicas", policy.min_replicas, "spec.replicas", workload(job))
    spec: Object = {"replicas": replicas, "selector": {"matchLabels": {job_names.JOB_NAME: job.name}}}
    if of.needs.gpus is not None:
        spec["strategy"] = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    spec["template"] = template
    scaler = _autoscaler(of, container)
    if scaler is not None:
        del spec["replicas"]
    return [_workload(of, "apps/v1", "Deployment") | {"spec": spec}, *([scaler] if scaler is not None else [])]


def _autoscaler(of: Rendering, container: JobContainer) -> Object | None:
    """Return the autoscaler, by requests or by load; None for a fixed number of replicas."""
    job, policy = of.job, of.job.policy
    least, most = policy.least_replicas, policy.max_replicas
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": job.name}
    if policy.scale_to_zero:
        if not container.ports:
            of.book.tell("policy.scale_to_zero", value=True, text=f"{NO_EFFECT}no port on which a request could come")
            return None
        of.book.tell(
            "policy.scale_to_zero",
            value=True,
            text="spec.replicas; the first request starts a pod (KEDA's HTTP add-on)",
            of=f"HTTPScaledObject/{job.name}",
        )
        if most is not None:
            of.book.tell("policy.max_replicas", most, "spec.replicas.max", f"HTTPScaledObject/{job.name}")
        reference = target | {"service": job.name, "port": container.ports[0].port}
        spec: Object = {"hosts": [job.name], "scaleTargetRef": reference, "replicas": {"min": least, "max": most or 1}}
        return _head(of, "http.keda.sh/v1alpha1", "HTTPScaledObject", job.name) | {"spec": spec}
    if most is None or most == least:
        return None
    of.book.tell(
        "policy.max_replicas",
        most,
        f"spec.maxReplicas; more above {CPU_UTILIZATION} % of the CPU asked for",
        f"HorizontalPodAutoscaler/{job.name}",
    )
    metric = {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": CPU_UTILIZATION}}
    spec = {
        "scaleTargetRef": target,
        "minReplicas": least,
        "maxReplicas": most,
        "metrics": [{"type": "Resource", "resource": metric}],
    }
    return _head(of, "autoscaling/v2", "HorizontalPodAutoscaler", job.name) | {"spec": spec}


def _job(of: Rendering, template: Object) -> Object:
    """Return a Job of independent pods, or of pods that work together, with ranks as indices."""
    job, needs, policy, book = of.job, of.needs, of.job.policy, of.book
    completions = needs.workers if needs.workers > 1 else job.completions or job.parallelism or 1
    at_once = needs.workers if needs.workers > 1 else _pods(job)
    spec: Object = {"completions": completions, "parallelism": at_once, "backoffLimit": policy.max_retries}
    for field in ("completions", "parallelism"):
        if getattr(job, field) is not None:
            book.tell(field, getattr(job, field), f"spec.{field} {spec[field]}", workload(job))
    if completions > 1:
        spec["completionMode"] = "Indexed"
    if "max_retries" in policy.model_fields_set:
        book.tell("policy.max_retries", policy.max_retries, "spec.backoffLimit", workload(job))
    if needs.deadline_seconds is not None:
        spec["activeDeadlineSeconds"] = needs.deadline_seconds
    spec["ttlSecondsAfterFinished"] = of.settings.finished_ttl_seconds
    spec |= _endings(of)
    restart = "Never" if "podFailurePolicy" in spec else CONTRACTS[job.job_type].restart_policy
    template["spec"] = {"restartPolicy": restart} | template["spec"]
    return _workload(of, "batch/v1", "Job") | {"spec": spec | {"template": template}}


def _endings(of: Rendering) -> Object:
    """Return the failure policy for a preempted pod: ignore it, or fail the job.

    Kubernetes distinguishes kinds of ends only if pods are never restarted in place. So a preemptible training is
    retried in a new pod, and another one is restarted in place.
    """
    job, policy = of.job, of.job.policy
    restarts = not of.needs.is_preemptible and policy.retry_on_preemption and job.job_type is JobType.TRAINING
    if "retry_on_preemption" in policy.model_fields_set:
        text = "spec.podFailurePolicy: a preempted pod " + (
            "is no failure" if policy.retry_on_preemption else "ends the job"
        )
        text = f"{NO_EFFECT}the job is kept from being preempted" if restarts else text
        of.book.tell("policy.retry_on_preemption", policy.retry_on_preemption, text, workload(job))
    if restarts:
        return {}
    action = "Ignore" if policy.retry_on_preemption else "FailJob"
    return {"podFailurePolicy": {"rules": [{"action": action, "onPodConditions": [DISRUPTED]}]}}


def _helm(job: Job, template: Object, book: NoteBook) -> HelmInstall:
    """Return the values for Helm: the job's own values win and are noted, but labels and annotations are merged, and so
    are resources, of which GPUs and TPUs are as the job asks for them."""
    assert job.helm is not None
    metadata, spec = template["metadata"], template["spec"]
    values: Object = {key: spec[key] for key in HELM_LISTS if key in spec}
    for key in values.keys() & job.helm.values.keys():
        book.tell(f"helm.values.{key}", "given", f"{HINT}it replaces what Atoll would set")
    values |= job.helm.values
    values["resources"] = _helm_resources(job.helm.values.get("resources"), spec["containers"][0]["resources"], book)
    for key, own in (("podLabels", metadata["labels"]), ("podAnnotations", metadata.get("annotations", {}))):
        given = job.helm.values.get(key)
        values[key] = (given if isinstance(given, dict) else {}) | own
    return HelmInstall(job.name, job.helm.chart, job.helm.version or "", values)


def _helm_resources(given: object, own: Object, book: NoteBook) -> Object:
    """Return the resources of a chart's pods: the job's own, with the devices that Atoll gives out."""
    if not isinstance(given, dict):
        return own
    merged: Object = dict(given)
    for part, amounts in own.items():
        devices = {name: amount for name, amount in amounts.items() if name in DEVICES}
        mine = given.get(part)
        merged[part] = (mine if isinstance(mine, dict) else {}) | devices
    text = "it replaces CPU and memory that Atoll would set; GPUs and TPUs are as the job's other fields ask for them"
    book.tell("helm.values.resources", "given", f"{HINT}{text}")
    return merged


def _tell_chart(job: Job, book: NoteBook) -> None:
    """Note what the pods of a chart do not get."""
    lost = {PREFIX + name: value for name, value in job.attributes.given().items() if name in NOT_FOR_CHARTS}
    for part, kept in FOR_CHARTS.items():
        fields = getattr(job, part)
        lost |= {f"{part}.{name}": getattr(fields, name) for name in sorted(fields.model_fields_set - kept)}
    for source, value in lost.items():
        text = f"{HINT}the chart alone sets its queue, variables, volumes and times; name it in helm.values"
        book.replace(source, value if not isinstance(value, BaseModel) else "set", text)


def _tell_rest(job: Job, needs: Needs, book: NoteBook) -> None:
    """Note fields that become labels or annotations for other tools, and fields that Kubernetes ignores."""
    policy = job.policy
    if policy.scheduled_start is not None:
        text = f"{ONLY_SERVICE}waits for it; without the service, apply the objects at that time"
        book.tell("policy.scheduled_start", policy.scheduled_start.isoformat(), text)
    given = policy.model_fields_set
    if "retry_delay_seconds" in given:
        text = f"{ONLY_SERVICE}uses it; Kubernetes waits 10 s, then twice as long each time"
        book.tell("policy.retry_delay_seconds", policy.retry_delay_seconds, text)
    if policy.unique_seconds is not None:
        text = f"{ONLY_SERVICE}compares submissions; kubectl refuses a name that is taken"
        book.tell("policy.unique_seconds", policy.unique_seconds, text)
    if job.job_type is JobType.SERVICE:
        for field in ("max_retries", "retry_on_preemption"):
            if field in given:
                book.tell(f"policy.{field}", getattr(policy, field), f"{NO_EFFECT}a service always starts again")
    if policy.cohort is not None:
        text = f"annotation {job_names.PREFIX}cohort; Kueue's ClusterQueue names it"
        book.tell("policy.cohort", policy.cohort, text, workload(job))
    _tell_intent(job, book)
    _tell_accelerator(job, needs, book)


def _tell_intent(job: Job, book: NoteBook) -> None:
    intent = job.intent
    for field, key, where in (
        ("optimization_goal", job_names.OPTIMIZATION_GOAL, "label"),
        ("workload_class", job_names.WORKLOAD_CLASS, "label"),
        ("budget_cap", "budget-cap", "annotation"),
        ("budget_action", "budget-action", "annotation"),
        ("cost_center", "cost-center", "annotation"),
        ("sla_tier", "sla-tier", "annotation"),
        ("expected_duration_hint", "expected-duration", "annotation"),
        ("gpu_memory_hint", "gpu-memory-hint", "annotation"),
    ):
        if field in intent.model_fields_set and getattr(intent, field) is not None:
            name = key if "/" in key else job_names.PREFIX + key
            book.tell(f"intent.{field}", str(getattr(intent, field)), f"{where} {name}", workload(job))


def _tell_accelerator(job: Job, needs: Needs, book: NoteBook) -> None:
    said = job.attributes.accelerator
    if said is not None:
        became = {"gpu": "a GpuClaim", "tpu": "TPUs of nodes", "cpu": "no GpuClaim: any node will do"}
        book.tell("ext_ml_accelerator", said.value, became.get(said.value, ""))
    if job.attributes.tpu_chip_count is not None and needs.tpus is not None:
        text = f"{needs.workers} pods with {needs.tpus.chips} chips each"
        book.tell("ext_ml_tpu_chip_count", job.attributes.tpu_chip_count, text)
