"""A pod that requests GPUs from Atoll cannot also get GPUs through Kubernetes' dynamic resource allocation."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from atoll.api import names
from atoll.kube.client import Listing
from atoll.kube.errors import KubeError, NotFound, Unanswered
from webhook.device_lookup import DeviceFinder
from webhook.pods import decode_pod

T = TypeVar("T")
GROUP = "/apis/resource.k8s.io/v1"
NAMESPACE = f"{GROUP}/namespaces/team"


def device_class(name: str, *expressions: str, resource: str = "") -> dict[str, Any]:
    """Return a DeviceClass."""
    selectors = [{"cel": {"expression": expression}} for expression in expressions]
    return {
        "metadata": {"name": name},
        "spec": {"selectors": selectors, **({"extendedResourceName": resource} if resource else {})},
    }


CLASSES = [
    device_class("gpu.nvidia.com", "device.attributes['gpu.nvidia.com'].type == 'gpu'"),
    device_class("mig", 'device.driver == "gpu.nvidia.com"', resource="example.com/slice"),
    device_class("amd", "device.driver == 'gpu.amd.com'"),
    device_class("channel", "device.driver == 'compute-domain.nvidia.com'"),
    device_class("nic", "device.driver == 'dra.net'", resource="example.com/nic"),
    device_class("alias", "device.attributes['x'].big", resource="nvidia.com/gpu-large"),
    device_class("anything"),
]  # fmt: skip


class DeviceApi:
    """Serves classes, claims and templates; or fails."""

    def __init__(self, objects: dict[str, dict[str, Any]], error: KubeError | None = None) -> None:
        self._objects = objects
        self._error = error
        self.asked: list[str] = []

    async def get(self, path: str, **_options: Any) -> bytes:
        self.asked.append(path)
        if path not in self._objects:
            raise NotFound("no", status=404, reason="NotFound", path=path)
        return json.dumps(self._objects[path]).encode()

    async def list(self, path: str, decode: Callable[[bytes], T], **_options: Any) -> Listing[T]:
        self.asked.append(path)
        if self._error is not None:
            raise self._error
        return Listing([decode(json.dumps(one).encode()) for one in CLASSES], "1")


def asks(*requests: dict[str, Any]) -> dict[str, Any]:
    """Return a ResourceClaim."""
    return {"spec": {"devices": {"requests": list(requests)}}}


def exactly(name: str, *expressions: str) -> dict[str, Any]:
    """Return a request of one class, narrowed by selectors of its own."""
    selectors = [{"cel": {"expression": expression}} for expression in expressions]
    return {"name": "r", "exactly": {"deviceClassName": name, "selectors": selectors}}


def first_of(*classes: str) -> dict[str, Any]:
    """Return a request of the first class that is there."""
    return {"name": "r", "firstAvailable": [{"name": one, "deviceClassName": one} for one in classes]}


async def refusal(
    api: DeviceApi, *, claims: list[dict[str, Any]] | None = None, resources: dict[str, str] | None = None
) -> str:
    """Return why a pod is refused, empty where it is not."""
    container = {"name": "main", "resources": {"limits": resources or {}}}
    body = {"metadata": {}, "spec": {"containers": [container], "resourceClaims": claims or []}}
    denial = await DeviceFinder(api).refusal("team", decode_pod(json.dumps(body).encode()))
    return denial.message if denial is not None else ""


BY_NAME = [{"name": "d", "resourceClaimName": "c"}]
BY_TEMPLATE = [{"name": "d", "resourceClaimTemplateName": "t"}]
REFUSED = {
    "a class of NVIDIA's driver": (asks(exactly("gpu.nvidia.com")), "its devices are of the driver gpu.nvidia.com"),
    "MIG": (asks(exactly("mig")), "its devices are of the driver gpu.nvidia.com"),
    "a class of AMD's driver": (asks(exactly("amd")), "its devices are of the driver gpu.amd.com"),
    "behind a network card": (asks(exactly("nic"), exactly("amd")), "its devices are of the driver gpu.amd.com"),
    "as the last resort": (asks(first_of("nic", "mig")), "its devices are of the driver gpu.nvidia.com"),
    "a class that stands for a vendor's resource": (asks(exactly("alias")), "it stands for nvidia.com/gpu-large"),
    "a class of any device": (asks(exactly("anything")), "it selects any device"),
    "any device, narrowed to GPUs": (asks(exactly("anything", "device.driver == 'gpu.intel.com'")), "gpu.intel.com"),
    "a class that is not there": (asks(exactly("later")), "'later', which does not exist"),
}


@pytest.mark.parametrize("claims", [BY_NAME, BY_TEMPLATE], ids=["claim", "template"])
@pytest.mark.parametrize("case", REFUSED)
async def test_claims_of_gpus_are_refused(case: str, claims: list[dict[str, Any]]) -> None:
    """Whatever the class is called, and whether the pod brings a claim or a template of one."""
    claim, words = REFUSED[case]
    api = DeviceApi({f"{NAMESPACE}/resourceclaims/c": claim, f"{NAMESPACE}/resourceclaimtemplates/t": {"spec": claim}})

    assert words in await refusal(api, claims=claims)


@pytest.mark.parametrize(
    "claim",
    [
        asks(exactly("nic")),
        asks(exactly("channel")),
        asks(first_of("nic", "channel")),
        asks(exactly("anything", "device.driver == 'dra.net'")),
        asks(),
    ],
    ids=["network card", "channel of a fabric", "either", "narrowed to network cards", "nothing"],
)
async def test_claims_of_other_devices_are_let_pass(claim: dict[str, Any]) -> None:
    """A network card or a channel of an NVLink fabric beside Atoll's GPUs is what training wants."""
    assert await refusal(DeviceApi({f"{NAMESPACE}/resourceclaims/c": claim}), claims=BY_NAME) == ""


@pytest.mark.parametrize(
    ("resource", "words"),
    [
        ("example.com/slice", "stands for DeviceClass 'mig'"),
        ("deviceclass.resource.kubernetes.io/amd", "stands for DeviceClass 'amd'"),
        ("deviceclass.resource.kubernetes.io/anything", "stands for DeviceClass 'anything'"),
        ("example.com/nic", ""),
        ("deviceclass.resource.kubernetes.io/nic", ""),
        ("rdma/hca", ""),
    ],
)
async def test_extended_resources_that_stand_for_a_class_of_gpus_are_refused(resource: str, words: str) -> None:
    """By the name that the class gives, or by the one that every class has."""
    found = await refusal(DeviceApi({}), resources={resource: "1"})

    assert words in found
    assert bool(found) is bool(words)


async def test_a_claim_that_is_not_there_yet_is_refused() -> None:
    """What nobody can see is not let pass: the claim could be made for GPUs a moment later."""
    for claims in (BY_NAME, BY_TEMPLATE, [{"name": "d"}]):
        assert "does not exist; create it before the pod" in await refusal(DeviceApi({}), claims=claims)


async def test_what_cannot_be_looked_up_is_not_let_pass() -> None:
    """The API server does not answer, or too many claims are named: refused in words."""
    silent = DeviceApi({}, Unanswered("cut", path=GROUP, sent=True))
    assert "whether the pod's other devices are GPUs; try again" in await refusal(silent, claims=BY_NAME)
    assert "33 resourceClaims" in await refusal(DeviceApi({}), claims=BY_NAME * 33)


async def test_pods_that_ask_for_nothing_else_cost_no_lookup() -> None:
    """The usual pod with GPUs asks the API server nothing more."""
    api = DeviceApi({})

    assert await refusal(api, resources={names.GPU_RESOURCE: "1", "cpu": "1", "memory": "1Gi"}) == ""
    assert api.asked == []
