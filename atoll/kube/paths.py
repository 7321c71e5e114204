"""URL paths of the API objects that Atoll touches.

Pure. Every segment is quoted, so that a hostile name cannot reach another path.
Without a name a path is the collection; without a namespace it is the collection of the whole cluster.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import quote

from atoll.api.names import API_VERSION

API_GROUPS: Final = "/apis"
"""Lists the groups that the API server serves."""


def core(plural: str, *, namespace: str = "", name: str = "", sub: str = "") -> str:
    """Path in the core group, `/api/v1/...`."""
    return _join("/api/v1", plural, namespace, name, sub)


def group(api: str, plural: str, *, namespace: str = "", name: str = "", sub: str = "") -> str:
    """Path in a named group, `/apis/<api>/...` with `api` such as `coordination.k8s.io/v1`."""
    return _join(f"/apis/{api}", plural, namespace, name, sub)


def pods(namespace: str = "", name: str = "", sub: str = "") -> str:
    return core("pods", namespace=namespace, name=name, sub=sub)


def binding(namespace: str, name: str) -> str:
    return pods(namespace, name, "binding")


def eviction(namespace: str, name: str) -> str:
    return pods(namespace, name, "eviction")


def nodes(name: str = "", sub: str = "") -> str:
    return core("nodes", name=name, sub=sub)


def persistentvolumes() -> str:
    return core("persistentvolumes")


def persistentvolumeclaims() -> str:
    return core("persistentvolumeclaims")


def namespaces(name: str = "") -> str:
    return core("namespaces", name=name)


def secrets(namespace: str = "", name: str = "") -> str:
    return core("secrets", namespace=namespace, name=name)


def leases(namespace: str = "", name: str = "") -> str:
    return group("coordination.k8s.io/v1", "leases", namespace=namespace, name=name)


def poddisruptionbudgets(namespace: str = "", name: str = "") -> str:
    return group("policy/v1", "poddisruptionbudgets", namespace=namespace, name=name)


def deviceclasses() -> str:
    return group("resource.k8s.io/v1", "deviceclasses")


def resourceclaims(namespace: str, name: str) -> str:
    return group("resource.k8s.io/v1", "resourceclaims", namespace=namespace, name=name)


def resourceclaimtemplates(namespace: str, name: str) -> str:
    return group("resource.k8s.io/v1", "resourceclaimtemplates", namespace=namespace, name=name)


def storageclasses() -> str:
    return group("storage.k8s.io/v1", "storageclasses")


def csinodes() -> str:
    return group("storage.k8s.io/v1", "csinodes")


def csidrivers() -> str:
    return group("storage.k8s.io/v1", "csidrivers")


def csistoragecapacities() -> str:
    return group("storage.k8s.io/v1", "csistoragecapacities")


def priorityclasses(name: str = "") -> str:
    return group("scheduling.k8s.io/v1", "priorityclasses", name=name)


def podgroups(namespace: str, name: str) -> str:
    return group("scheduling.k8s.io/v1beta1", "podgroups", namespace=namespace, name=name)


def kueue_workloads(namespace: str, name: str = "") -> str:
    return group("kueue.x-k8s.io/v1beta2", "workloads", namespace=namespace, name=name)


def events(namespace: str = "", name: str = "") -> str:
    return group("events.k8s.io/v1", "events", namespace=namespace, name=name)


def gpuclaims(namespace: str = "", name: str = "", sub: str = "") -> str:
    return group(API_VERSION, "gpuclaims", namespace=namespace, name=name, sub=sub)


def gpunodestatuses(name: str = "", sub: str = "") -> str:
    return group(API_VERSION, "gpunodestatuses", name=name, sub=sub)


def gpugangs(namespace: str = "", name: str = "", sub: str = "") -> str:
    return group(API_VERSION, "gpugangs", namespace=namespace, name=name, sub=sub)


def gpureservations(name: str = "", sub: str = "") -> str:
    return group(API_VERSION, "gpureservations", name=name, sub=sub)


def topologies(name: str = "", sub: str = "") -> str:
    return group(API_VERSION, "topologies", name=name, sub=sub)


def mutatingwebhookconfigurations(name: str = "") -> str:
    return group("admissionregistration.k8s.io/v1", "mutatingwebhookconfigurations", name=name)


def _join(root: str, plural: str, namespace: str, name: str, sub: str) -> str:
    if sub and not name:
        raise ValueError(f"subresource {sub!r} of {plural} needs a name")
    segments = [root]
    if namespace:
        segments += ["namespaces", _quote(namespace)]
    segments.append(_quote(plural))
    if name:
        segments.append(_quote(name))
    if sub:
        segments.append(_quote(sub))
    return "/".join(segments)


def _quote(segment: str) -> str:
    if segment in {".", ".."}:
        raise ValueError(f"not an object name: {segment!r}")
    return quote(segment, safe="")
