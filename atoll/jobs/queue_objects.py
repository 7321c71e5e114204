"""From the file of queues to the objects of Kubernetes and Kueue, in the order of creation.

Objects hold every field that Atoll keeps; None means that the field must be absent. Kueue's v1beta2 is written.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from atoll.api import job_names, names
from atoll.jobs.queue_file import FlavorQuota, QueueCohort, QueueFile, QueueTenant, Reclaim, Stop, TenantQueue
from atoll.jobs.settings import RenderSettings
from atoll.jobs.tenant_network import POLICY, network_spec
from atoll.jobs.words import PRIORITY_VALUES, Priority

Object = dict[str, Any]

KUEUE_API: Final = "kueue.x-k8s.io/v1beta2"
MULTIKUEUE: Final = "kueue.x-k8s.io/multikueue"
"""Kueue's controller of checks that send jobs to other clusters; it also manages those jobs."""
PRIORITIES: Final[Mapping[Priority, str]] = {
    Priority.CRITICAL: "the highest, so never preempted; for reserved capacity",
    Priority.HIGH: "preempted only by critical jobs; the default of services",
    Priority.NORMAL: "may be preempted; the default of batch and training jobs",
    Priority.LOW: "preempted by all others: spot and background work",
}
"""Description of each priority class."""
BORROWER_PRIORITY_MAX: Final = PRIORITY_VALUES[Priority.NORMAL]
"""A job that must borrow preempts borrowers of other queues up to this priority."""
UNLIMITED: Final[Mapping[str, str]] = {"cpu": "1000000", "memory": "1000000Gi", "ephemeral-storage": "1000000Gi"}
"""Quotas that a flavor leaves out: Kueue admits no pod that requests a resource without a quota."""
NONE: Final = "0"
_RECLAIM: Final = {Reclaim.ANY: "Any", Reclaim.LOWER_PRIORITY: "LowerPriority", Reclaim.NEVER: "Never"}
_STOP: Final = {None: "None", Stop.HOLD: "Hold", Stop.DRAIN: "HoldAndDrain"}


def objects_of_queues(file: QueueFile, settings: RenderSettings, *, service_id: str) -> tuple[Object, ...]:
    """Return the objects of a completed file. Those that the service owns carry its id."""
    mine = {job_names.SERVICE_ID: service_id}
    found = [_namespace(tenant, name) for tenant in file.tenants for name in tenant.namespaces]
    for tenant in file.tenants:
        if tenant.network.isolated:
            found += [_policy(tenant, name, mine | {job_names.TENANT_ID: tenant.name}) for name in tenant.namespaces]
    for priority, description in PRIORITIES.items():
        body = {"value": PRIORITY_VALUES[priority], "description": description}
        name = settings.priority_classes[priority]
        found.append(_object("scheduling.k8s.io/v1", "PriorityClass", name, mine) | body)
        found.append(_object(KUEUE_API, "WorkloadPriorityClass", name, mine) | body)
    found += [_flavor(file, number, settings, mine) for number in range(len(file.flavors))]
    found += [_cohort(file, cohort, mine) for cohort in file.cohorts]
    found += _cluster_sets(file, mine)
    for tenant in file.tenants:
        of_tenant = mine | {job_names.TENANT_ID: tenant.name}
        for queue in tenant.queues:
            found.append(_cluster_queue(file, tenant, queue, of_tenant))
            found += [_local_queue(queue, namespace, of_tenant) for namespace in tenant.namespaces]
    return tuple(found)


def _object(api: str, kind: str, name: str, labels: Mapping[str, str], namespace: str = "") -> Object:
    metadata: Object = {"name": name, "labels": dict(labels)}
    return {
        "apiVersion": api,
        "kind": kind,
        "metadata": metadata | ({"namespace": namespace} if namespace else {}),
    }


def _namespace(tenant: QueueTenant, name: str) -> Object:
    """Return a tenant's namespace. It shows the GPUs of claims to the quota; it may exist, and is never removed."""
    return _object("v1", "Namespace", name, {job_names.TENANT_ID: tenant.name, names.COMPLETE_JOBS: "true"})


def _policy(tenant: QueueTenant, namespace: str, labels: Mapping[str, str]) -> Object:
    head = _object("networking.k8s.io/v1", "NetworkPolicy", POLICY, labels, namespace)
    return head | {"spec": network_spec(tenant.network, tenant.namespaces)}


def _flavor(file: QueueFile, number: int, settings: RenderSettings, labels: Mapping[str, str]) -> Object:
    flavor = file.flavors[number]
    taints = [one.model_dump() for one in flavor.taints]
    if flavor.spot and not taints:
        first = settings.spot_tolerations[0] if settings.spot_tolerations else None
        taints = (
            [{"key": first.key, "value": first.value, "effect": first.effect or "NoSchedule"}]
            if first is not None
            else []
        )
    spec = {"nodeLabels": dict(flavor.node_labels), "nodeTaints": taints or None}
    return _object(KUEUE_API, "ResourceFlavor", flavor.name, labels) | {"spec": spec}


def _cohort(file: QueueFile, cohort: QueueCohort, labels: Mapping[str, str]) -> Object:
    groups = _groups(file.spot_first(cohort.flavors), defaults={}) if cohort.flavors else None
    return _object(KUEUE_API, "Cohort", cohort.name, labels) | {"spec": {"resourceGroups": groups}}


def _cluster_sets(file: QueueFile, labels: Mapping[str, str]) -> list[Object]:
    """Return how Kueue reaches other clusters, and for each set the check that a job passes in one of them."""
    secrets = {cluster: secret for one in file.multikueue for cluster, secret in one.clusters.items()}
    found = []
    for cluster, secret in secrets.items():
        source = {"kubeConfig": {"location": secret, "locationType": "Secret"}}
        found.append(_object(KUEUE_API, "MultiKueueCluster", cluster, labels) | {"spec": {"clusterSource": source}})
    for one in file.multikueue:
        config = {"clusters": list(one.clusters)}
        found.append(_object(KUEUE_API, "MultiKueueConfig", one.name, labels) | {"spec": config})
        parameters = {"apiGroup": KUEUE_API.partition("/")[0], "kind": "MultiKueueConfig", "name": one.name}
        check = {"controllerName": MULTIKUEUE, "parameters": parameters}
        found.append(_object(KUEUE_API, "AdmissionCheck", one.name, labels) | {"spec": check})
    return found


def _cluster_queue(file: QueueFile, tenant: QueueTenant, queue: TenantQueue, labels: Mapping[str, str]) -> Object:
    spaces = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": list(tenant.namespaces)}
    spec = {
        "cohortName": queue.cohort,
        "namespaceSelector": {"matchExpressions": [spaces]},
        "admissionChecksStrategy": {"admissionChecks": [{"name": queue.multikueue}]} if queue.multikueue else None,
        "queueingStrategy": "StrictFIFO" if queue.strict_order else "BestEffortFIFO",
        "stopPolicy": _STOP[queue.stop],
        "preemption": _preemption(queue, fair_sharing=file.fair_sharing),
        "fairSharing": {"weight": str(queue.weight or 1)} if file.fair_sharing and queue.cohort is not None else None,
        "resourceGroups": _groups(
            file.spot_first(queue.flavors),
            defaults=UNLIMITED,
            in_cohort=queue.cohort is not None,
            borrows=not queue.critical,
        ),
    }
    return _object(KUEUE_API, "ClusterQueue", queue.name, labels) | {"spec": spec}


def _preemption(queue: TenantQueue, *, fair_sharing: bool) -> Object:
    """Return whom the queue's jobs preempt. Kueue refuses to preempt while borrowing with fair sharing, and without
    reclaiming."""
    borrowing: Object = {"policy": "Never"}
    if queue.cohort is not None and not fair_sharing and not queue.critical and queue.reclaim is not Reclaim.NEVER:
        borrowing = {"policy": "LowerPriority", "maxPriorityThreshold": BORROWER_PRIORITY_MAX}
    return {
        "withinClusterQueue": "LowerPriority",
        "reclaimWithinCohort": _RECLAIM[queue.reclaim],
        "borrowWithinCohort": borrowing,
    }


def _groups(
    quotas: Sequence[FlavorQuota], *, defaults: Mapping[str, str], in_cohort: bool = False, borrows: bool = True
) -> list[Object]:
    """Return one group: Kueue counts resources that belong to one machine together. Every flavor lists the same
    resources; of one that it leaves out it has none, and borrows none."""
    covered = [*defaults]
    covered += sorted({name for quota in quotas for name in quota.resources()} - {*covered})
    flavors = []
    for quota in quotas:
        given, rows = quota.resources(), []
        for name in covered:
            one = given.get(name)
            row: Object = {"name": name, "nominalQuota": one.nominal if one is not None else defaults.get(name, NONE)}
            if in_cohort:
                row["borrowingLimit"] = one.borrow if one is not None and borrows else NONE
                row["lendingLimit"] = one.lend if one is not None else NONE
            rows.append(row)
        flavors.append({"name": quota.flavor, "resources": rows})
    return [{"coveredResources": covered, "flavors": flavors}]


def _local_queue(queue: TenantQueue, namespace: str, labels: Mapping[str, str]) -> Object:
    spec = {"clusterQueue": queue.name, "stopPolicy": "None"}
    return _object(KUEUE_API, "LocalQueue", queue.name, labels, namespace) | {"spec": spec}
