"""Which gang a new pod belongs to, and the gate that holds it until the whole gang has its GPUs.

However the user names the gang, the name ends up in the annotation, which is all that later parts read.
"""

import re
from collections.abc import Iterator
from typing import Any, Final

from atoll.api import names
from atoll.api.claims import GpuClaim
from atoll.api.gangs import MEMBERS_MAX
from atoll.kube.patches import add_op, pointer
from webhook.pods import AdmittedPod
from webhook.review import Denial

OBJECT_NAME: Final = re.compile(r"(?=.{1,253}\Z)[a-z0-9]([-a-z0-9.]*[a-z0-9])?\Z", re.ASCII)
POD_SET_NAME: Final = re.compile(r"(?=.{1,63}\Z)[a-z0-9]([-a-z0-9]*[a-z0-9])?\Z", re.ASCII)


def gang_of(pod: AdmittedPod, claim: GpuClaim | None, pod_group: str = "") -> str | Denial:
    """Return the gang that the pod belongs to, an empty text for none, or the denial of a membership that cannot be.

    `pod_group`: the PodGroup of policy gang that the pod belongs to; empty for none.
    """
    annotated = pod.annotations.get(names.GANG, "")
    referred = claim.spec.gang_ref or "" if claim is not None else ""
    if annotated and referred and annotated != referred:
        return Denial(
            f"annotation {names.GANG} is {annotated[:80]!r}, but GpuClaim {pod.annotations[names.CLAIM]!r} names the "
            f"gang {referred!r}; a pod belongs to one gang: remove the annotation, or use a claim without gangRef",
            400,
        )
    gang = annotated or referred
    if pod_group and gang and gang != pod_group:
        return Denial(
            f"the pod is of PodGroup {pod_group!r}, whose pods start together, and of gang {gang[:80]!r}; a pod is of "
            "one gang: give both the same name, or remove one",
            400,
        )
    if pod_group and names.GANG_SIZE in pod.annotations:
        return Denial(
            f"annotation {names.GANG_SIZE} has no effect beside minCount of PodGroup {pod_group!r}; remove it", 400
        )
    gang = gang or pod_group
    return _refuse_without_gang(pod) if not gang else _refuse_words(pod, gang) or gang


def inject_gate(pod: AdmittedPod, *, gang: str) -> Iterator[dict[str, Any]]:
    """Yield the operations that put membership and gate on a pod; nothing for one that has both or is in no gang."""
    if not gang:
        return
    if pod.annotations.get(names.GANG) != gang:
        yield add_op(pointer("metadata", "annotations", names.GANG), gang)
    gates = pod.spec.scheduling_gates
    if any(gate.name == names.GANG_GATE for gate in gates):
        return
    entry = {"name": names.GANG_GATE}
    if gates:
        yield add_op(pointer("spec", "schedulingGates", "-"), entry)
    else:
        yield add_op(pointer("spec", "schedulingGates"), [entry])


def _refuse_without_gang(pod: AdmittedPod) -> str | Denial:
    if names.GANG in pod.annotations:
        return Denial(f"annotation {names.GANG} is empty; write the gang's name, or remove it", 400)
    for key in (names.GANG_SIZE, names.POD_SET, names.RENDEZVOUS):
        if key in pod.annotations:
            return Denial(
                f"annotation {key} is for members of a gang; name the gang in {names.GANG}, or remove it", 400
            )
    if any(gate.name == names.GANG_GATE for gate in pod.spec.scheduling_gates):
        return Denial(
            f"the gate {names.GANG_GATE} is for members of a gang, and would never be removed from this pod; "
            f"name the gang in the annotation {names.GANG}, or remove the gate",
            400,
        )
    return ""


def _refuse_words(pod: AdmittedPod, gang: str) -> Denial | None:
    if not OBJECT_NAME.match(gang):
        return Denial(
            f"annotation {names.GANG} is {gang[:80]!r}, which is no name of a GpuGang; write its metadata.name", 400
        )
    size = pod.annotations.get(names.GANG_SIZE)
    if size is not None and not _is_count(size):
        return Denial(
            f"annotation {names.GANG_SIZE} is {size[:40]!r}; write a whole number from 1 to {MEMBERS_MAX}", 400
        )
    rendezvous = pod.annotations.get(names.RENDEZVOUS)
    if rendezvous not in {None, "true", "false"}:
        return Denial(f"annotation {names.RENDEZVOUS} is {rendezvous[:40]!r}; write true or false", 400)
    pod_set = pod.annotations.get(names.POD_SET)
    if pod_set is not None and not POD_SET_NAME.match(pod_set):
        return Denial(
            f"annotation {names.POD_SET} is {pod_set[:80]!r}, which is no name of a pod set; write one of those in "
            "spec.podSets of the GpuGang",
            400,
        )
    return None


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 6 and 1 <= int(text) <= MEMBERS_MAX
