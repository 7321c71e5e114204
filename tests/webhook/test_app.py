"""The endpoint over HTTP: answers, faults, limits."""

import base64
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from atoll.api import names
from atoll.api.claims import GpuClaim
from atoll.service.http import listening
from atoll.service.metrics import Metrics
from webhook.app import Lookups, webhook_application
from webhook.metrics import WebhookMetrics, webhook_metrics
from webhook.pods import AdmittedPod
from webhook.requests import ClaimLookup, ClaimMissing, Defaults
from webhook.review import BODY_BYTES_MAX, Denial
from webhook.serving import ServingCertificate

CLAIM = GpuClaim.model_validate({"metadata": {"name": "two", "uid": "u"}, "spec": {"devices": {"count": 2}}})


class FakeFinder:
    """Knows one claim and remembers what was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    async def find(self, namespace: str, name: str) -> ClaimLookup:
        self.asked.append((namespace, name))
        return CLAIM if name == "two" else ClaimMissing()


class NoDevices:
    """A cluster in which nothing but Atoll hands out devices."""

    async def refusal(self, namespace: str, pod: AdmittedPod) -> Denial | None:
        return Denial(f"{namespace} knows better") if pod.spec.resource_claims else None


class NoGroups:
    """A cluster without PodGroups of policy gang."""

    async def gang_of(self, namespace: str, pod: AdmittedPod) -> str | Denial:
        return Denial(f"{namespace} has no such PodGroup") if pod.spec.scheduling_group else ""


def review(claim: str | None = "two", **request: Any) -> dict[str, Any]:
    """Build a review of a pod that names `claim`."""
    annotations = {} if claim is None else {names.CLAIM: claim}
    pod = {"metadata": {"name": "p", "annotations": annotations}, "spec": {"containers": [{"name": "main"}]}}
    asked = {
        "uid": "u-1",
        "operation": "CREATE",
        "resource": {"group": "", "version": "v1", "resource": "pods"},
        "namespace": "team",
        "userInfo": {"username": "alice", "groups": []},
        "object": pod,
        **request,
    }
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": asked}


@pytest.fixture
def finder() -> FakeFinder:
    return FakeFinder()


@pytest.fixture
def metrics() -> WebhookMetrics:
    return webhook_metrics(Metrics("webhook"), ServingCertificate())


@pytest.fixture
async def url(finder: FakeFinder, metrics: WebhookMetrics) -> AsyncIterator[str]:
    app = webhook_application(lookups=Lookups(finder, NoDevices(), NoGroups()), defaults=Defaults(), metrics=metrics)
    async with listening(app, "127.0.0.1", 0) as port:
        yield f"http://127.0.0.1:{port}/mutate"


async def post(url: str, body: bytes) -> tuple[int, bytes]:
    async with aiohttp.ClientSession() as session, session.post(url, data=io.BytesIO(body)) as answer:
        return answer.status, await answer.read()


async def ask(url: str, **how: Any) -> dict[str, Any]:
    """Send a review and return the response part of the answer."""
    status, body = await post(url, json.dumps(review(**how)).encode())
    assert status == 200
    response: dict[str, Any] = json.loads(body)["response"]
    return response


async def test_a_claimed_pod_is_patched(url: str, finder: FakeFinder) -> None:
    """The claim is looked up in the namespace of the request, because a new pod may not carry one yet."""
    response = await ask(url)

    assert response["allowed"]
    assert {"op": "add", "path": "/spec/schedulerName", "value": "gpu-scheduler"} in json.loads(
        base64.b64decode(response["patch"])
    )
    assert finder.asked == [("team", "two")]


def job_review(claim: str | None = "two", **request: Any) -> dict[str, Any]:
    """Ask about a Job whose template names `claim`."""
    annotations = {} if claim is None else {names.CLAIM: claim}
    template = {"metadata": {"annotations": annotations}, "spec": {"containers": [{"name": "main"}]}}
    resource = {"group": "batch", "version": "v1", "resource": "jobs"}
    return {"resource": resource, "object": {"spec": {"template": template}}, **request}


async def test_the_template_of_a_claimed_job_is_patched(url: str, finder: FakeFinder) -> None:
    """The claim is looked up where the Job is."""
    response = await ask(url, **job_review())

    assert response["allowed"]
    assert {"op": "add", "path": "/spec/template/spec/schedulerName", "value": "gpu-scheduler"} in json.loads(
        base64.b64decode(response["patch"])
    )
    assert finder.asked == [("team", "two")]


async def test_other_devices_are_looked_up_for_pods_and_templates_with_gpus_alone(url: str) -> None:
    """What a pod asks for beside Atoll's GPUs is somebody else's to know; without GPUs it is nobody's business here."""
    spec = {"containers": [{"name": "main"}], "resourceClaims": [{"name": "d", "resourceClaimName": "c"}]}
    template = {"metadata": {"annotations": {names.CLAIM: "two"}}, "spec": spec}
    job = job_review()

    claimed = await ask(url, object={"metadata": {"name": "p", **template["metadata"]}, "spec": spec})
    unclaimed = await ask(url, object={"metadata": {"name": "p"}, "spec": spec})
    written = await ask(url, **{**job, "object": {"spec": {"template": template}}})

    assert (claimed["allowed"], unclaimed["allowed"], written["allowed"]) == (False, True, False)
    assert "team knows better" in claimed["status"]["message"]


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(job_review("nobody"), id="missing-claim"),
        pytest.param(job_review("../../secrets/x"), id="impossible-name"),
        pytest.param(job_review(operation="UPDATE"), id="claim-that-comes-later"),
    ],
)
async def test_a_job_whose_gpus_could_not_be_counted_is_denied(url: str, how: dict[str, Any]) -> None:
    """A quota would let it pass for nothing."""
    response = await ask(url, **how)

    assert not response["allowed"]
    assert "patch" not in response


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(job_review(None), id="no-claim"),
        pytest.param(job_review(operation="DELETE", object=None), id="delete"),
        pytest.param(job_review(subResource="status"), id="status"),
    ],
)
async def test_a_job_that_asks_for_nothing_is_let_pass(url: str, finder: FakeFinder, how: dict[str, Any]) -> None:
    """Without a look-up and without a change."""
    response = await ask(url, **how)

    assert response["allowed"]
    assert "patch" not in response
    assert finder.asked == []


async def test_a_missing_claim_is_denied(url: str) -> None:
    """The pod's owner reads what to do."""
    response = await ask(url, claim="three")

    assert not response["allowed"]
    assert "create it before the pod" in response["status"]["message"]


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"claim": "../../secrets/x"}, id="impossible-name"),
        pytest.param({"claim": None}, id="no-claim"),
        pytest.param({"operation": "UPDATE"}, id="update"),
        pytest.param({"operation": "DELETE", "object": None}, id="delete-has-no-object"),
    ],
)
async def test_no_lookup_without_need(url: str, finder: FakeFinder, how: dict[str, Any]) -> None:
    """Only a possible name on a new pod costs a lookup."""
    await ask(url, **how)

    assert finder.asked == []


async def test_a_mirror_pod_is_admitted_without_a_lookup(url: str, finder: FakeFinder) -> None:
    """A static pod runs whatever its claim may be."""
    pod = {
        "metadata": {"name": "p", "annotations": {names.CLAIM: "none", "kubernetes.io/config.mirror": "h"}},
        "spec": {"containers": [{"name": "main"}], "nodeName": "n1"},
    }

    response = await ask(url, object=pod, userInfo={"username": "system:node:n1", "groups": ["system:nodes"]})

    assert response == {"uid": "u-1", "allowed": True}
    assert finder.asked == []


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"{}", id="no-review"),
        pytest.param(json.dumps(review(object={"spec": 7})).encode(), id="no-pod"),
    ],
)
async def test_nonsense_is_answered_with_400(url: str, metrics: WebhookMetrics, body: bytes) -> None:
    """The caller is told; the server lives on and counts it."""
    status, text = await post(url, body)

    assert status == 400
    assert text.startswith(b"malformed")
    assert (await ask(url))["allowed"]
    assert metrics.reviews.labels("malformed")._value.get() == 1


async def test_a_body_beyond_the_limit_is_refused(url: str) -> None:
    """Nobody can fill the memory through this door."""
    status, _ = await post(url, b" " * (BODY_BYTES_MAX + 1))

    assert status == 413


async def test_a_dry_run_is_answered_like_any_other(url: str) -> None:
    """There is nothing to leave out: a hundred dry runs get the same patch and change nothing."""
    real = await ask(url)

    assert all([await ask(url, dryRun=True) == real for _ in range(100)])


@pytest.mark.parametrize("how", [{}, job_review()], ids=["pod", "Job"])
async def test_a_new_object_too_large_to_be_meant_is_denied_unread(
    url: str, finder: FakeFinder, how: dict[str, Any]
) -> None:
    """Its parts are neither decoded nor compared with anything; only the sender waits."""
    made = review(**how)["request"]["object"]
    made["spec"]["padding"] = [{"name": f"e{number}", "value": "v"} for number in range(20_000)]

    response = await ask(url, **{**how, "object": made})

    assert not response["allowed"]
    assert "has at most 524288 bytes" in response["status"]["message"]
    assert finder.asked == []


async def test_large_objects_that_ask_for_nothing_or_exist_already_are_answered(url: str) -> None:
    """A pod that has nothing to do with Atoll may be of any size, and a Job that exists must stay changeable."""
    made = review(claim=None)["request"]["object"]
    made["spec"]["padding"] = "x" * 700_000
    job = job_review(claim=None, operation="UPDATE")
    job["object"]["spec"]["padding"] = "gpu.scheduling" * 50_000

    assert (await ask(url, object=made))["allowed"]
    assert (await ask(url, **job))["allowed"]
