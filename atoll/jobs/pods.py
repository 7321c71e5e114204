"""The pod template of a job: container, volumes, placement, termination.

The template includes the GPUs, the scheduler and a gang's gate: quotas count the template, and the webhook's changes to
pods come too late for them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from atoll.api import job_names, names
from atoll.api.topologies import HOSTNAME
from atoll.jobs.amounts import SCRATCH_PATH, SHM_PATH, Amounts, amounts_of
from atoll.jobs.checkpoints import Checkpoint
from atoll.jobs.container import JobContainer, JobProbe
from atoll.jobs.errors import JobMistake, NodesUnknown
from atoll.jobs.labels import POD_SET, labels_of, pod_annotations, tell_pods, workload
from atoll.jobs.model import Job
from atoll.jobs.needs import Needs
from atoll.jobs.notes import HINT, NO_EFFECT, NoteBook
from atoll.jobs.policy import JobToleration
from atoll.jobs.selection import KnownNode, affinity_of
from atoll.jobs.servers import LOAD_SECONDS, notes_of, server_of
from atoll.jobs.settings import RenderSettings
from atoll.jobs.variables import variables_of
from atoll.jobs.words import DeploymentType, JobType, TopologyConstraint
from atoll.ml.attributes import PREFIX
from atoll.ml.selection import NODE_LABELS, REPORTED_LABELS
from atoll.ml.tables import TPU_RESOURCE, TPU_TYPE_LABEL

DRAIN_SECONDS: Final = 5
"""Time for which a service still answers after its end begins, until no request is routed to it."""
CHECKPOINTS: Final = "checkpoints"
TPU_TAINT: Final = JobToleration(key=TPU_RESOURCE, operator="Exists", effect="NoSchedule")


@dataclass(frozen=True, slots=True)
class Rendering:
    """Input of a template. `nodes`: the known ones; None without a cluster."""

    job: Job
    needs: Needs
    settings: RenderSettings
    nodes: Sequence[KnownNode] | None
    book: NoteBook


def checkpoint_claim(job: Job) -> str:
    """Return the name of the PersistentVolumeClaim for checkpoints."""
    return f"{job.name}-ckpt"


def served(of: Rendering) -> JobContainer:
    """Return the container of the pods, completed with the server of its model if it has one."""
    job, needs = of.job, of.needs
    container = job.container or JobContainer()
    if job.deployment_type is not DeploymentType.MODEL:
        return container
    gpus = needs.gpus.claim.count if needs.gpus is not None else 0
    server = server_of(needs.attributes, gpus, container.image, of.settings)
    of.book.tell(f"{PREFIX}runtime", needs.attributes.runtime, f"image {server.image}", workload(job))
    for name, value, text in notes_of(needs.attributes):
        of.book.tell(f"{PREFIX}{name}", value, text)
    _tell_load_time(container, of.book)
    changes: dict[str, Any] = {"image": server.image}
    if container.command:
        of.book.tell("container.command", container.command[0], f"{HINT}it gets none of the server's arguments")
    else:
        changes["args"] = (*_not_given(server.args, container.args), *container.args)
        own_port = next((arg for arg in container.args if arg.partition("=")[0] == "--port"), None)
        if own_port is not None and not container.ports:
            limit = f"the Service leads to port {server.port}"
            raise JobMistake("container.args", own_port, limit, "name the port in container.ports too")
        if not container.ports:
            changes["ports"] = JobContainer.model_validate({"ports": [{"port": server.port, "name": "http"}]}).ports
            changes["readiness"] = container.readiness or JobProbe(port=server.port, path=server.health)
    return container.model_copy(update=changes)


def _tell_load_time(container: JobContainer, book: NoteBook) -> None:
    """Note a probe that restarts the server while it still loads its model."""
    name, probe = ("startup", container.startup) if container.startup is not None else ("liveness", container.liveness)
    if probe is None:
        return
    seconds = probe.initial_delay_seconds + probe.period_seconds * probe.failure_threshold
    if seconds < LOAD_SECONDS:
        text = f"{HINT}it restarts the server after {seconds} s, and a large model takes {LOAD_SECONDS} s to load"
        book.tell(f"container.{name}", f"{seconds} s", f"{text}; give startup a larger failure_threshold")


def _not_given(args: Sequence[str], given: Sequence[str]) -> Iterator[str]:
    """Yield the server's arguments without the options that the user gives."""
    options = {arg.partition("=")[0] for arg in given}
    return (arg for arg in args if arg.partition("=")[0] not in options)


def template_of(of: Rendering) -> dict[str, Any]:
    """Return the template of the pods. Raises JobMistake."""
    job, needs = of.job, of.needs
    tell_pods(job, of.book)
    amounts = amounts_of(job, needs.attributes, of.book)
    container = served(of)
    spec: dict[str, Any] = {
        "terminationGracePeriodSeconds": needs.grace_seconds,
        "priorityClassName": of.settings.priority_classes[needs.priority],
        "enableServiceLinks": False,
        "containers": [_container(of, container, amounts)],
    }
    spec |= _where(of) | _volumes(needs.checkpoint, container, amounts, checkpoint_claim(job))
    if needs.gpus is not None or needs.is_gang:
        spec["schedulerName"] = names.SCHEDULER_NAME
    if needs.is_gang:
        spec["schedulingGates"] = [{"name": names.GANG_GATE}]
    if needs.workers > 1:
        spec["subdomain"] = job.name
    if container.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in container.image_pull_secrets]
    if container.service_account_name is not None:
        spec["serviceAccountName"] = container.service_account_name
    metadata: dict[str, Any] = {"labels": labels_of(job, needs)}
    annotations = pod_annotations(job, needs)
    if annotations:
        metadata["annotations"] = annotations
    return {"metadata": metadata, "spec": spec}


def _container(of: Rendering, container: JobContainer, amounts: Amounts) -> dict[str, Any]:
    job, needs = of.job, of.needs
    told: dict[str, Any] = {"name": POD_SET, "image": container.image}
    if container.command:
        told["command"] = list(container.command)
    if container.args:
        told["args"] = list(container.args)
    if container.working_dir is not None:
        told["workingDir"] = container.working_dir
    told["env"] = variables_of(job, needs, of.settings, of.book)
    if container.env_secrets:
        told["envFrom"] = [{"secretRef": {"name": name}} for name in container.env_secrets]
    if container.ports:
        told["ports"] = [{"name": one.name, "containerPort": one.port} for one in container.ports]
    told["resources"] = _resources(needs, amounts)
    for name, probe in (
        ("readinessProbe", _readiness(job, container)),
        ("livenessProbe", container.liveness),
        ("startupProbe", container.startup),
    ):
        if probe is not None:
            told[name] = probe.manifest()
    if job.job_type is JobType.SERVICE and container.ports and needs.grace_seconds:
        told["lifecycle"] = {"preStop": {"sleep": {"seconds": min(DRAIN_SECONDS, max(1, needs.grace_seconds // 2))}}}
    mounts = _mounts(needs.checkpoint, container, amounts)
    if mounts:
        told["volumeMounts"] = mounts
    return told


def _readiness(job: Job, container: JobContainer) -> JobProbe | None:
    if container.readiness is not None or job.job_type is not JobType.SERVICE or not container.ports:
        return container.readiness
    return JobProbe(port=container.ports[0].port)


def _resources(needs: Needs, amounts: Amounts) -> dict[str, Any]:
    requests = {"cpu": amounts.cpu_request, "memory": amounts.memory_request}
    limits = {"memory": amounts.memory_limit}
    if amounts.cpu_limit:
        limits["cpu"] = amounts.cpu_limit
    if amounts.scratch:
        requests["ephemeral-storage"] = amounts.scratch
    counted = {names.GPU_RESOURCE: needs.gpus.claim.count} if needs.gpus is not None else {}
    counted |= {TPU_RESOURCE: needs.tpus.chips} if needs.tpus is not None else {}
    for resource, count in counted.items():
        requests[resource] = limits[resource] = str(count)
    return {"requests": requests, "limits": limits}


def _volumes(checkpoint: Checkpoint | None, container: JobContainer, amounts: Amounts, claim: str) -> dict[str, Any]:
    volumes = [one.manifest() for one in container.volumes]
    if amounts.shm:
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": amounts.shm}})
    if amounts.scratch:
        volumes.append({"name": "scratch", "emptyDir": {"sizeLimit": amounts.scratch}})
    if checkpoint is not None and checkpoint.mount_path:
        volumes.append({"name": CHECKPOINTS, "persistentVolumeClaim": {"claimName": claim}})
    if checkpoint is not None:
        field = {"fieldPath": f"metadata.annotations['{names.PREEMPTION_NOTICE}']"}
        volumes.append(
            {"name": "notice", "downwardAPI": {"items": [{"path": job_names.NOTICE_FILE, "fieldRef": field}]}}
        )
    twice = {one["name"] for one in volumes if [other["name"] for other in volumes].count(one["name"]) > 1}
    if twice:
        raise JobMistake("container.volumes", min(twice), "the job has a volume of that name already", "choose another")
    return {"volumes": volumes} if volumes else {}


def _mounts(checkpoint: Checkpoint | None, container: JobContainer, amounts: Amounts) -> list[dict[str, Any]]:
    mounts = [one.mount() for one in container.volumes]
    if amounts.shm:
        mounts.append({"name": "shm", "mountPath": SHM_PATH})
    if amounts.scratch:
        mounts.append({"name": "scratch", "mountPath": SCRATCH_PATH})
    if checkpoint is not None and checkpoint.mount_path:
        mounts.append({"name": CHECKPOINTS, "mountPath": checkpoint.mount_path})
    if checkpoint is not None:
        mounts.append({"name": "notice", "mountPath": job_names.NOTICE_FOLDER, "readOnly": True})
    paths = [one["mountPath"] for one in mounts]
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        raise JobMistake(
            "container.volumes", twice, "something else of the job is mounted there", "choose another mount_path"
        )
    return mounts


def _where(of: Rendering) -> dict[str, Any]:
    """Return node selector, affinity and tolerations."""
    job, book = of.job, of.book
    selector, expressions = _selector(of)
    apart: list[dict[str, str]] = []
    if job.policy.topology is TopologyConstraint.SPREAD:
        book.tell("policy.topology", "spread", "no two pods of the job on one node", workload(job))
        apart.append({job_names.JOB_NAME: job.name})
    affinity = affinity_of(job.attributes, of.nodes, required=expressions, apart=apart, beside=_beside(of))
    for name in ("affinity", "anti_affinity"):
        if getattr(job.attributes, name) is not None:
            book.tell(f"{PREFIX}{name}", None, f"spec.affinity of the pods{_of_nodes(of.nodes)}", workload(job))
    told: dict[str, Any] = {}
    if selector:
        told["nodeSelector"] = selector
    if affinity:
        told["affinity"] = affinity
    tolerations = _tolerations(of)
    if tolerations:
        told["tolerations"] = tolerations
    return told


def _of_nodes(nodes: Sequence[KnownNode] | None) -> str:
    return "" if nodes is None else f", where it had to be so resolved against {len(nodes)} nodes"


def _selector(of: Rendering) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Return node labels, and expressions for selectors that one label cannot express."""
    job, needs = of.job, of.needs
    selector: dict[str, str] = {}
    expressions: list[dict[str, Any]] = []
    for source, pairs in (
        ("policy.node_selector", job.policy.node_selector),
        (f"{PREFIX}node_selector", job.attributes.node_selector),
    ):
        for key, value in sorted((pairs or {}).items()):
            if key in REPORTED_LABELS:
                expressions.append(_reported(of, source, key, value))
                continue
            selector[NODE_LABELS.get(key, key)] = value
            of.book.tell(f"{source}.{key}", value, f"nodeSelector {NODE_LABELS.get(key, key)}", workload(job))
    for key, values in needs.tpus.labels if needs.tpus is not None else ():
        _check_slice(of, key, values, selector.get(key))
        if len(values) == 1:
            selector[key] = values[0]
        else:
            expressions.append({"key": key, "operator": "In", "values": list(values)})
        of.book.tell(
            f"{PREFIX}tpu_{'type' if key.endswith('accelerator') else 'topology'}",
            None,
            f"nodes with label {key} {' or '.join(values)}",
            workload(job),
        )
    return selector, expressions


def _check_slice(of: Rendering, key: str, values: Sequence[str], selected: str | None) -> None:
    """Refuse a selector that contradicts the slice. Raises JobMistake."""
    if selected in (None, *values):
        return
    policy = of.job.policy.node_selector or {}
    source = "policy.node_selector" if policy.get(key) == selected else f"{PREFIX}node_selector"
    name = "tpu_type" if key == TPU_TYPE_LABEL else "tpu_topology"
    limit = f"{PREFIX}{name} {getattr(of.job.attributes, name)} is on nodes with {' or '.join(values)}"
    raise JobMistake(f"{source}.{key}", selected, limit, "remove it, or ask for that slice")


def _reported(of: Rendering, source: str, key: str, value: str) -> dict[str, Any]:
    """Return the nodes whose machine meets a selector that no node label expresses."""
    if of.nodes is None:
        raise NodesUnknown(
            f"{source}.{key}",
            value,
            "no label of a node says it",
            f"say {PREFIX}gpu_* attributes, or render against a cluster",
        )
    found = sorted({node.labels.get(HOSTNAME, node.name) for node in of.nodes if node.labels.get(key) == value})
    if not found:
        raise JobMistake(f"{source}.{key}", value, f"none of the {len(of.nodes)} known nodes has it", "change it")
    of.book.tell(f"{source}.{key}", value, f"the {len(found)} nodes that have it now", workload(of.job))
    return {"key": HOSTNAME, "operator": "In", "values": found}


def _beside(of: Rendering) -> dict[str, Any] | None:
    """Return the term that keeps pods that are no gang on one node."""
    job, needs = of.job, of.needs
    if needs.gpus is None and job.policy.topology is TopologyConstraint.NVLINK:
        of.book.tell("policy.topology", "nvlink", f"{NO_EFFECT}there are no GPUs")
    if job.policy.topology is not TopologyConstraint.SAME_NODE or needs.is_gang:
        return None
    of.book.tell("policy.topology", "same_node", "all pods of the job on one node", workload(job))
    return {"labelSelector": {"matchLabels": {job_names.JOB_NAME: job.name}}, "topologyKey": HOSTNAME}


def _tolerations(of: Rendering) -> list[dict[str, Any]]:
    job, needs = of.job, of.needs
    wanted = list(job.policy.tolerations or ())
    if wanted:
        of.book.tell("policy.tolerations", None, "tolerations of the pods", workload(job))
    wanted += of.settings.gpu_tolerations if needs.gpus is not None else ()
    wanted += (TPU_TAINT,) if needs.tpus is not None else ()
    wanted += of.settings.spot_tolerations if needs.is_spot else ()
    told = []
    for one in wanted:
        entry = {
            "key": one.key,
            "operator": one.operator,
            "value": one.value or None,
            "effect": one.effect,
            "tolerationSeconds": one.toleration_seconds,
        }
        entry = {key: value for key, value in entry.items() if value is not None}
        if entry not in told:
            told.append(entry)
    return told
