"""The environment variables that show a container its GPUs: which, what they refer to, what a user may not set.

They refer to the annotations that bind writes; the kubelet resolves them at every container start.

The references come before the user's variables, whose order stays as it is, so that `$(CUDA_VISIBLE_DEVICES)` in one of
them resolves. What an `envFrom` source or the image holds is not visible here; a variable in `env` wins over both. So
the variables that give devices of the whole machine are set as well: empty, the only value that every one of them takes
for off (NVIDIA's hook stops a container where one of the MIG variables holds a word).
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from atoll.api import names
from atoll.api.claims import Vendor
from atoll.kube.patches import add_op, pointer
from webhook.pods import AdmittedContainer, AdmittedPod, PlacedContainer, Variable
from webhook.requests import ResolvedRequest
from webhook.review import Denial

PCI_ORDER: Final = "PCI_BUS_ID"


def variables_for(container: str, *, demand: ResolvedRequest) -> dict[str, dict[str, Any]]:
    """Return the variables of the container of that name, in the order in which they are injected."""
    uuids = _reference(f"{names.CONTAINER_UUIDS_PREFIX}{container}")
    if demand.vendor is Vendor.AMD:
        return {names.ROCR_VISIBLE_DEVICES: uuids}
    variables = {
        names.NVIDIA_VISIBLE_DEVICES: uuids,
        names.CUDA_VISIBLE_DEVICES: _reference(f"{names.CONTAINER_DEVICES_PREFIX}{container}"),
    }
    return variables | ({names.CUDA_DEVICE_ORDER: {"value": PCI_ORDER}} if demand.by_index else {})


def variables_off(demand: ResolvedRequest) -> dict[str, dict[str, Any]]:
    """Return the variables that give devices of the whole machine, each turned off; none for AMD's GPUs."""
    return {name: {"value": ""} for name in names.DRIVER_DEVICE_VARIABLES if demand.vendor is Vendor.NVIDIA}


def rendezvous_variables(pod: AdmittedPod) -> dict[str, dict[str, Any]]:
    """Return the variables of every container of a member of a gang that asks for its rank; one of the user's own with
    such a name stays."""
    if pod.annotations.get(names.RENDEZVOUS) != "true":
        return {}
    return {variable: _reference(annotation) for variable, annotation in names.GANG_VARIABLES.items()}


def inject_variables(placed: PlacedContainer, wanted: Mapping[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the operations that put what is missing before the container's own variables."""
    present = {variable.name for variable in placed.container.env or ()}
    missing = [{"name": name, **source} for name, source in wanted.items() if name not in present]
    if missing and not placed.container.env:
        yield add_op(pointer(*placed.where, "env"), missing)
        return
    for index, variable in enumerate(missing):
        yield add_op(pointer(*placed.where, "env", index), variable)


def refuse_variables(container: AdmittedContainer, *, demand: ResolvedRequest) -> Denial | None:
    """Refuse a container that chooses its GPUs itself; Atoll's own references, left by an earlier round, are fine."""
    own = variables_for(container.name, demand=demand)
    for variable in container.env or ():
        is_off = variable.value_from is None and variable.value in names.VARIABLES_OFF
        if variable.name in names.DRIVER_DEVICE_VARIABLES and not is_off:
            return Denial(
                f"container {container.name!r} sets {variable.name}, which gives it devices of the whole machine "
                "and not of its GPUs alone: remove it from env"
            )
        is_chooser = variable.name in names.VISIBLE_DEVICES_VARIABLES or variable.name in own
        if is_chooser and not _equals(variable, own.get(variable.name)):
            return Denial(
                f"container {container.name!r} sets {variable.name} itself, "
                "but Atoll sets it to the GPUs that the pod is given: remove it from env"
            )
    return None


def is_shaped(container: AdmittedContainer, *, demand: ResolvedRequest) -> bool:
    """Tell whether an earlier round of the webhook has been at the container."""
    own = variables_for(container.name, demand=demand)
    return any(variable.name in own and _equals(variable, own[variable.name]) for variable in container.env or ())


def _reference(annotation: str) -> dict[str, Any]:
    return {"valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{annotation}']"}}}


def _equals(variable: Variable, own: dict[str, Any] | None) -> bool:
    if own is None:
        return False
    if "value" in own:
        return variable.value == own["value"] and variable.value_from is None
    reference = variable.value_from.field_ref if variable.value_from else None
    wanted: str = own["valueFrom"]["fieldRef"]["fieldPath"]
    return reference is not None and reference.field_path == wanted and not variable.value
