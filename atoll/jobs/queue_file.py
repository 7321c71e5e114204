"""The file of queues: flavors of machines, cohorts, and tenants with their quotas. One file describes one cluster.

Bytes become a QueueFile, or all its problems with their lines. Names and defaults are completed here, so a later
reader finds every queue with its name and every tenant with its namespaces.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, ValidationError

from atoll.api import names
from atoll.jobs.base import Flag, JobPart, LabelKey, LabelValue, ObjectName, ShortName
from atoll.jobs.tenant_network import TenantNetwork
from atoll.ml.attributes import PREFIX
from atoll.ml.document import Document, Path, read
from atoll.ml.problems import AttributeProblem, Problems, shown
from atoll.ml.queue_rules import QueueRules, parse_queue_rules
from atoll.ml.wording import dotted, problems_of_errors

FLAVORS_MAX: Final = 64
TENANTS_MAX: Final = 1000
QUEUES_MAX: Final = 16
RESOURCES_MAX: Final = 16
SHORT_NAMES: Final = {"gpu": names.GPU_RESOURCE}
MIG: Final = "mig-"
DEFAULTS: Final = "ml_defaults"
LIMITS: Final = "ml_limits"

Tenant = Annotated[str, Field(max_length=40, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
ResourceName = Annotated[str, Field(max_length=128, pattern=r"^([a-z0-9][-a-z0-9.]*/)?[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]


def _text(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


QuotaAmount = Annotated[
    str, BeforeValidator(_text), Field(max_length=16, pattern=r"^[0-9]{1,12}(m|k|Ki|M|Mi|G|Gi|T|Ti)?$")
]


class Reclaim(StrEnum):
    """From whom a queue takes its own quota back, if it was lent."""

    ANY = "any"
    LOWER_PRIORITY = "lower-priority"
    NEVER = "never"


class Stop(StrEnum):
    """How a queue is stopped."""

    HOLD = "hold"
    """It admits no new job."""
    DRAIN = "drain"
    """It also evicts the admitted ones."""


class QueueTaint(JobPart):
    """A taint of machines: only jobs that tolerate it use the flavor."""

    key: LabelKey
    value: LabelValue = ""
    effect: Annotated[str, Field(pattern="^(NoSchedule|NoExecute)$")] = "NoSchedule"


class QueueFlavor(JobPart):
    """One kind of machine."""

    name: ShortName
    node_labels: Annotated[dict[LabelKey, LabelValue], Field(max_length=8)] = Field(default_factory=dict)
    taints: Annotated[tuple[QueueTaint, ...], Field(max_length=8)] = ()
    spot: Flag = False
    """Only for jobs with intent.spot_eligible, which try it first."""


class ResourceQuota(JobPart):
    """Quota of one resource. `borrow`, `lend`: the most that is borrowed from, or lent to, the cohort; no limit if
    absent."""

    nominal: QuotaAmount
    borrow: QuotaAmount | None = None
    lend: QuotaAmount | None = None


def _quota(value: object) -> object:
    return {"nominal": value} if isinstance(value, int | str) and not isinstance(value, bool) else value


Quota = Annotated[ResourceQuota, BeforeValidator(_quota)]


class FlavorQuota(JobPart):
    """Quotas of one flavor, by resource: gpu, mig-PROFILE, cpu, memory, or a full name."""

    flavor: ShortName
    quota: Annotated[dict[ResourceName, Quota], Field(min_length=1, max_length=RESOURCES_MAX)]

    def resources(self) -> dict[str, ResourceQuota]:
        """Return the quotas by full name of the resource."""
        return {full_name(name): one for name, one in self.quota.items()}


class QueueCohort(JobPart):
    """Queues that lend each other unused quota, and quota that all of them may borrow."""

    name: ShortName
    flavors: Annotated[tuple[FlavorQuota, ...], Field(max_length=FLAVORS_MAX)] = ()


class ClusterSet(JobPart):
    """Clusters to one of which Kueue sends a job (MultiKueue)."""

    name: ShortName
    clusters: Annotated[dict[ShortName, ObjectName], Field(min_length=1, max_length=20)]
    """By name: the Secret in Kueue's namespace with the key kubeconfig."""


class TenantQueue(JobPart):
    """One queue of a tenant: a ClusterQueue, and a LocalQueue of the same name in each of the tenant's namespaces."""

    name: ShortName = ""
    """tenant-NAME-queue if absent, tenant-NAME-critical for the critical queue."""
    cohort: ShortName | None = None
    critical: Flag = False
    """For jobs of priority critical: it borrows nothing, so nobody takes its quota back and no job of it is
    preempted."""
    weight: Annotated[int, Field(strict=True, ge=1, le=1000)] | None = None
    """Share of borrowed quota, with fair_sharing."""
    strict_order: Flag = False
    """No job overtakes one that does not fit yet."""
    reclaim: Reclaim = Reclaim.ANY
    stop: Stop | None = None
    multikueue: ShortName | None = None
    """Set of clusters in which its jobs run, instead of this one."""
    ml_defaults: Annotated[dict[str, Any], Field(max_length=64)] = Field(default_factory=dict)
    """Attributes of jobs that leave them out, with or without ext_ml_."""
    ml_limits: Annotated[dict[str, Any], Field(max_length=64)] = Field(default_factory=dict)
    """Jobs beyond one are refused; those for which a budget is spent wait. See atoll.ml.queue_rules."""
    flavors: Annotated[tuple[FlavorQuota, ...], Field(min_length=1, max_length=FLAVORS_MAX)]
    """In the order of trial; spot flavors come first anyway."""


class QueueTenant(JobPart):
    """A tenant."""

    name: Tenant
    namespaces: Annotated[tuple[ShortName, ...], Field(max_length=64)] = ()
    """The namespace of the service's jobs if absent."""
    network: TenantNetwork = TenantNetwork()
    queues: Annotated[tuple[TenantQueue, ...], Field(min_length=1, max_length=QUEUES_MAX)]

    def queue_for(self, *, critical: bool) -> TenantQueue:
        """Return the queue of jobs that name none: the critical one for critical jobs, else the first other one."""
        fitting = [queue for queue in self.queues if queue.critical is critical]
        return (fitting or list(self.queues))[0]


class QueueFile(JobPart):
    """All queues of a cluster. `fair_sharing`: Kueue runs with its setting fairSharing, and divides borrowed quota by
    weight."""

    fair_sharing: Flag = False
    flavors: Annotated[tuple[QueueFlavor, ...], Field(min_length=1, max_length=FLAVORS_MAX)]
    cohorts: Annotated[tuple[QueueCohort, ...], Field(max_length=FLAVORS_MAX)] = ()
    multikueue: Annotated[tuple[ClusterSet, ...], Field(max_length=FLAVORS_MAX)] = ()
    tenants: Annotated[tuple[QueueTenant, ...], Field(min_length=1, max_length=TENANTS_MAX)]

    def tenant(self, name: str) -> QueueTenant | None:
        """Return a tenant, or None if the file does not name it."""
        return next((one for one in self.tenants if one.name == name), None)

    def spot_first(self, quotas: Sequence[FlavorQuota]) -> list[FlavorQuota]:
        """Return quotas in the order of trial: spot flavors first, otherwise as given."""
        spot = {one.name for one in self.flavors if one.spot}
        return sorted(quotas, key=lambda quota: quota.flavor not in spot)


def full_name(resource: str) -> str:
    """Return the full name of a resource: gpu and mig-PROFILE are Atoll's."""
    if resource.startswith(MIG):
        return names.MIG_RESOURCE_PREFIX + resource.removeprefix(MIG)
    return SHORT_NAMES.get(resource, resource)


@dataclass(frozen=True, slots=True)
class _Fault:
    path: Path
    value: object
    limit: str
    hint: str


def parse_queue_file(data: bytes, *, namespace: str) -> QueueFile | Problems:
    """Parse the file from YAML or JSON. `namespace`: of a tenant's jobs, with {tenant} for its name."""
    document = read(data)
    if isinstance(document, AttributeProblem):
        return (document,)
    try:
        file = completed(QueueFile.model_validate(document.value), namespace=namespace)
    except ValidationError as error:
        return _worded(error, document)
    faults = [
        AttributeProblem(dotted(one.path), shown(one.value), one.limit, one.hint, document.line_of(one.path))
        for one in _faults(file)
    ]
    return (*faults, *_rule_problems(file, document)) or file


def rules_in(queue: TenantQueue) -> QueueRules | Problems:
    """Return the rules of a queue, or their problems."""
    return parse_queue_rules(queue.name, {DEFAULTS: queue.ml_defaults, LIMITS: queue.ml_limits})


def _rule_problems(file: QueueFile, document: Document) -> Iterator[AttributeProblem]:
    """Yield the problems of each queue's rules, each with the line of its mapping."""
    for number, tenant in enumerate(file.tenants):
        for place, queue in enumerate(tenant.queues):
            found = rules_in(queue)
            for one in found if isinstance(found, tuple) else ():
                section = DEFAULTS if one.attribute.startswith(PREFIX) else LIMITS
                path: Path = ("tenants", number, "queues", place, section)
                where = f"{dotted(path)}.{one.attribute}"
                yield replace(one, attribute=where, line=document.line_of(path), step="")


def completed(file: QueueFile, *, namespace: str) -> QueueFile:
    """Return the file with the names of queues and namespaces that it leaves out."""
    return file.model_copy(update={"tenants": tuple(_completed(one, namespace) for one in file.tenants)})


def _completed(tenant: QueueTenant, namespace: str) -> QueueTenant:
    def named(queue: TenantQueue) -> TenantQueue:
        kind = "critical" if queue.critical else "queue"
        return queue.model_copy(update={"name": queue.name or f"tenant-{tenant.name}-{kind}"})

    spaces = tenant.namespaces or (namespace.replace("{tenant}", tenant.name),)
    return tenant.model_copy(update={"namespaces": spaces, "queues": tuple(map(named, tenant.queues))})


def _worded(error: ValidationError, document: Document) -> Problems:
    worded = problems_of_errors(error, QueueFile, prefix="")
    details = error.errors(include_url=False)
    paths = [tuple(part for part in one["loc"] if part != "[key]") for one in details]
    return tuple(
        AttributeProblem(dotted(path), one.value, one.limit, one.hint, document.line_of(path))
        for one, path in zip(worded, paths, strict=True)
    )


# What no single field can tell


def _faults(file: QueueFile) -> Iterator[_Fault]:
    flavors, cohorts = {one.name for one in file.flavors}, {one.name for one in file.cohorts}
    yield from _repeated(("flavors",), [one.name for one in file.flavors])
    yield from _repeated(("cohorts",), [one.name for one in file.cohorts])
    yield from _repeated(("tenants",), [one.name for one in file.tenants])
    yield from _set_faults(file)
    yield from _shared_names(file)
    yield from _zone_faults(file)
    for number, cohort in enumerate(file.cohorts):
        yield from _flavor_faults(("cohorts", number), cohort.flavors, flavors)
        yield from _cohort_faults(("cohorts", number), cohort)
    for number, tenant in enumerate(file.tenants):
        path: Path = ("tenants", number, "queues")
        if sum(queue.critical for queue in tenant.queues) > 1:
            yield _Fault(path, tenant.name, "has several critical queues", "keep one")
        if all(queue.critical for queue in tenant.queues):
            yield _Fault(path, tenant.name, "has only a critical queue", "add a queue for its other jobs")
        for place, queue in enumerate(tenant.queues):
            yield from _flavor_faults((*path, place), queue.flavors, flavors)
            yield from _queue_faults((*path, place), queue, cohorts, fair_sharing=file.fair_sharing)


def _set_faults(file: QueueFile) -> Iterator[_Fault]:
    """Yield clusters that two sets reach with different Secrets, and queues of unknown sets."""
    yield from _repeated(("multikueue",), [one.name for one in file.multikueue])
    secrets: dict[str, str] = {}
    for number, one in enumerate(file.multikueue):
        for cluster, secret in one.clusters.items():
            if secrets.setdefault(cluster, secret) != secret:
                told = f"has the Secret {secrets[cluster]} in another set"
                yield _Fault(("multikueue", number, "clusters", cluster), secret, told, "give one Secret to a cluster")
    known = [one.name for one in file.multikueue]
    for number, tenant in enumerate(file.tenants):
        for place, queue in enumerate(tenant.queues):
            if queue.multikueue not in (None, *known):
                path = ("tenants", number, "queues", place, "multikueue")
                choice = f"name one of {', '.join(known[:8])}" if known else "list it under multikueue"
                yield _Fault(path, queue.multikueue, "is no set of clusters of this file", choice)


def _zone_faults(file: QueueFile) -> Iterator[_Fault]:
    """Yield networks with an IPv6 zone, which a NetworkPolicy may not have."""
    for number, tenant in enumerate(file.tenants):
        for field in ("from_networks", "to_networks"):
            for place, one in enumerate(getattr(tenant.network, field) or ()):
                if "%" in one:
                    told, hint = "has a zone, which no NetworkPolicy takes", "remove what is between % and /"
                    yield _Fault(("tenants", number, "network", field, place), one, told, hint)


def _shared_names(file: QueueFile) -> Iterator[_Fault]:
    """Yield namespaces of two tenants, and names of two queues."""
    owners: dict[str, str] = {}
    queues: set[str] = set()
    for number, tenant in enumerate(file.tenants):
        for space in tenant.namespaces:
            owner = owners.setdefault(space, tenant.name)
            if owner != tenant.name:
                told, hint = f"belongs to tenant {owner}", "give each tenant namespaces of its own"
                yield _Fault(("tenants", number, "namespaces"), space, told, hint)
        for place, queue in enumerate(tenant.queues):
            if queue.name in queues:
                path = ("tenants", number, "queues", place, "name")
                yield _Fault(path, queue.name, "is the name of another queue", "give it a name of its own")
            queues.add(queue.name)


def _cohort_faults(path: Path, cohort: QueueCohort) -> Iterator[_Fault]:
    for place, shared in enumerate(cohort.flavors):
        for resource, quota in shared.quota.items():
            if quota.borrow is not None or quota.lend is not None:
                where = (*path, "flavors", place, "quota", resource)
                yield _Fault(where, "", "may not have borrow or lend, which are for queues", "give nominal alone")


def _repeated(path: Path, found: Sequence[str]) -> Iterator[_Fault]:
    for name, count in Counter(found).items():
        if count > 1:
            yield _Fault(path, name, f"is listed {count} times", "list it once")


def _flavor_faults(path: Path, quotas: Sequence[FlavorQuota], known: set[str]) -> Iterator[_Fault]:
    yield from _repeated((*path, "flavors"), [one.flavor for one in quotas])
    for place, quota in enumerate(quotas):
        if quota.flavor not in known:
            choice = f"name one of {', '.join(sorted(known)[:8])}"
            yield _Fault((*path, "flavors", place, "flavor"), quota.flavor, "is no flavor of this file", choice)
        if len(quota.resources()) < len(quota.quota):
            yield _Fault((*path, "flavors", place, "quota"), quota.flavor, "names a resource twice", "name it once")


def _queue_faults(path: Path, queue: TenantQueue, cohorts: set[str], *, fair_sharing: bool) -> Iterator[_Fault]:
    if queue.cohort is not None and queue.cohort not in cohorts:
        known = f"name one of {', '.join(sorted(cohorts)[:8])}" if cohorts else "list it under cohorts"
        yield _Fault((*path, "cohort"), queue.cohort, "is no cohort of this file", known)
    if queue.weight is not None and (not fair_sharing or queue.cohort is None):
        hint = "set fair_sharing, with Kueue's setting of that name, and a cohort" if not fair_sharing else "set cohort"
        yield _Fault((*path, "weight"), queue.weight, "has no effect here", hint)
    for place, one in enumerate(queue.flavors):
        for resource, quota in one.quota.items():
            field = ("borrow" if quota.borrow is not None else "lend") if quota.borrow or quota.lend else ""
            where = (*path, "flavors", place, "quota", resource, field)
            if field and queue.cohort is None:
                yield _Fault(where, getattr(quota, field), "needs a cohort", "set cohort, or remove it")
            elif queue.critical and quota.borrow not in (None, "0"):
                yield _Fault(where, quota.borrow, "is not for a critical queue, which borrows nothing", "remove it")


def held(file: QueueFile) -> QueueFile:
    """Return the file with every queue stopped for new jobs."""

    def stopped(queue: TenantQueue) -> TenantQueue:
        return queue.model_copy(update={"stop": queue.stop or Stop.HOLD})

    def quiet(tenant: QueueTenant) -> QueueTenant:
        return tenant.model_copy(update={"queues": tuple(map(stopped, tenant.queues))})

    return file.model_copy(update={"tenants": tuple(map(quiet, file.tenants))})


def as_stored(file: QueueFile) -> dict[str, Any]:
    """Return the file as plain values."""
    return file.model_dump(mode="json", exclude_defaults=True)
