"""The webhook and its authority on a real API server, with the shipped manifests and identities."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from atoll.api import names

pytestmark = pytest.mark.e2e

DEPLOY = Path(__file__).parents[2] / "deploy"
SERVED_TIMES = 5
ADDRESS, PORT, HEALTH_PORT = "10.255.0.1", "18443", "18081"
AUTHORITY = """
import asyncio, sys
from pathlib import Path
from atoll.kube.client import ApiClient
from atoll.service.clock import SystemClock
from controllers.webhook_certs import WebhookCertReconciler

async def main() -> None:
    async with await ApiClient.connect(Path(sys.argv[1])) as client:
        await WebhookCertReconciler(client, SystemClock(), interval_seconds=1.0).run()

asyncio.run(main())
"""
SERVICE = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": names.WEBHOOK_SERVICE, "namespace": names.SYSTEM_NAMESPACE},
    "spec": {"ports": [{"name": "https", "port": 443, "targetPort": int(PORT)}]},
}
SLICE = {
    "apiVersion": "discovery.k8s.io/v1",
    "kind": "EndpointSlice",
    "metadata": {
        "name": names.WEBHOOK_SERVICE,
        "namespace": names.SYSTEM_NAMESPACE,
        "labels": {"kubernetes.io/service-name": names.WEBHOOK_SERVICE},
    },
    "addressType": "IPv4",
    "endpoints": [{"addresses": [ADDRESS]}],
    "ports": [{"name": "https", "port": int(PORT), "protocol": "TCP"}],
}
Kubectl = Callable[..., "subprocess.CompletedProcess[str]"]


def wait_for(question: Callable[[], Any], what: str, *, seconds: float = 240.0) -> Any:
    """Return the first true answer; fail with `what` when none comes."""
    deadline = time.monotonic() + seconds
    while not (answer := question()):
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.1)
    return answer


def claim(name: str, **devices: Any) -> dict[str, Any]:
    spec: dict[str, Any] = {"devices": {"count": 2, **devices}}
    if "visibleDevices" in devices:
        spec["visibleDevices"] = spec["devices"].pop("visibleDevices")
    return {"apiVersion": names.API_VERSION, "kind": "GpuClaim", "metadata": {"name": name}, "spec": spec}


def pod(name: str, claim_name: str | None = None, *containers: dict[str, Any], **spec: Any) -> dict[str, Any]:
    annotations = {names.CLAIM: claim_name} if claim_name else {}
    made = [{"name": "main", "image": "app"}] if not containers else [{"image": "app", **one} for one in containers]
    metadata = {"name": name, "annotations": annotations}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": made, **spec}}


class Site:
    """A control plane with Atoll's manifests, an authority and one webhook process."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster

    def apply(self, *manifests: dict[str, Any]) -> None:
        text = yaml.safe_dump_all(manifests)
        self.cluster.kubectl("apply", "-f", "-", input=text, check=True)

    def install(self) -> None:
        folders = ("namespaces.yaml", "crds", "rbac", "runtimeclass.yaml", "policies")
        for _ in range(2):
            done = [self.cluster.kubectl("apply", "-f", str(DEPLOY / name)) for name in folders]
        assert not any(one.returncode for one in done), [one.stderr for one in done]
        self.apply(SERVICE, SLICE)
        self.cluster.kubectl("apply", "-f", str(DEPLOY / "webhook.yaml"), check=True)
        identity = self.cluster.service_account_kubeconfig(names.SYSTEM_NAMESPACE, "atoll-controllers")
        self.cluster.spawn("authority", [sys.executable, "-c", AUTHORITY, str(identity)])
        self.start_webhook()
        wait_for(
            lambda: self.cluster.kubectl("get", "serviceaccount", "default").returncode == 0, "the default account"
        )

    def start_webhook(self, *options: str) -> None:
        identity = self.cluster.service_account_kubeconfig(names.SYSTEM_NAMESPACE, "atoll-webhook")
        command = [sys.executable, "-m", "webhook", "--kubeconfig", str(identity), "--host", ADDRESS, "--port", PORT]
        self.cluster.spawn("webhook", [*command, "--health-port", HEALTH_PORT, *options])

    def create(self, body: dict[str, Any], *options: str) -> "subprocess.CompletedProcess[str]":
        done: subprocess.CompletedProcess[str] = self.cluster.kubectl(
            "create", "-o", "json", *options, "-f", "-", input=json.dumps(body)
        )
        return done

    def admit(self, body: dict[str, Any], *options: str) -> dict[str, Any]:
        """Create the pod and return it as stored."""
        done = self.create(body, *options)
        assert done.returncode == 0, done.stderr
        stored: dict[str, Any] = json.loads(done.stdout)
        return stored

    def wait_until_served(self) -> None:
        """Wait until the API server trusts the webhook and reaches it, time after time.

        For a moment after a change it may go by the configuration, or meet the certificate, of before.
        """
        probe = pod("probe", None, {"name": "main", "resources": {"limits": {names.GPU_RESOURCE: "1"}}})

        def is_served() -> bool:
            return self.ca_bundles() != [] and self.create(probe, "--dry-run=server").returncode == 0

        wait_for(lambda: all(is_served() for _ in range(SERVED_TIMES)), "the webhook to be served")

    def ca_bundles(self) -> list[str]:
        """Return the authorities that the stored configuration trusts; empty while one is missing."""
        done = self.cluster.kubectl("get", "mutatingwebhookconfiguration", names.WEBHOOK_CONFIGURATION, "-o", "json")
        found = [one["clientConfig"].get("caBundle", "") for one in json.loads(done.stdout)["webhooks"]]
        return found if all(found) else []

    def logs(self) -> str:
        return "\n".join(Path(self.cluster.logs(name)).read_text() for name in ("authority", "webhook"))


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """One cluster for the whole module."""
    from devcluster import DevCluster

    with DevCluster.start(f"webhook-{os.getpid()}", nodes=[], scheduler=False) as cluster:
        made = Site(cluster)
        made.install()
        made.wait_until_served()
        made.apply(
            claim("two"),
            claim("index", visibleDevices="index"),
            claim("amd", vendor="amd"),
            claim("mig", count=1, migProfile="3g.40gb"),
            {**claim("gang"), "spec": {"devices": {"count": 1}, "gangRef": "train"}},
        )
        yield made


GPU = names.GPU_RESOURCE


def asking(name: str, count: str) -> dict[str, Any]:
    return {"name": name, "resources": {"limits": {GPU: count}}}


def test_a_claimed_pod_is_shaped(site: Site) -> None:
    """What is stored has count, scheduler, claim-uid and references; the policies agree."""
    stored = site.admit(pod("shaped", "two"))

    uid = json.loads(site.cluster.kubectl("get", "gpuclaim", "two", "-o", "json").stdout)["metadata"]["uid"]
    assert stored["metadata"]["annotations"][names.CLAIM_UID] == uid
    assert stored["spec"]["schedulerName"] == names.SCHEDULER_NAME
    (main,) = stored["spec"]["containers"]
    assert main["resources"] == {"limits": {GPU: "2"}, "requests": {GPU: "2"}}
    paths = {one["name"]: one["valueFrom"]["fieldRef"]["fieldPath"] for one in main["env"] if "valueFrom" in one}
    assert paths == {
        "NVIDIA_VISIBLE_DEVICES": "metadata.annotations['uuids.gpu.scheduling/main']",
        "CUDA_VISIBLE_DEVICES": "metadata.annotations['devices.gpu.scheduling/main']",
    }
    assert [one for one in main["env"] if "valueFrom" not in one] == [
        {"name": name} for name in names.DRIVER_DEVICE_VARIABLES
    ]


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(pod("ok-bare", None, asking("main", "1")), id="bare-resource"),
        pytest.param(pod("ok-index", "index"), id="index"),
        pytest.param(pod("ok-amd", "amd"), id="amd"),
        pytest.param(pod("ok-mig", "mig"), id="mig"),
        pytest.param(pod("ok-split", "two", asking("a", "1"), asking("b", "1")), id="split"),
        pytest.param(pod("ok-one-asks", "two", {"name": "a"}, asking("b", "2")), id="one-asks"),
        pytest.param(
            pod(
                "ok-sidecar",
                "two",
                asking("a", "1"),
                initContainers=[
                    {"name": "init", "image": "app"},
                    {**asking("log", "1"), "image": "app", "restartPolicy": "Always"},
                ],
            ),
            id="sidecar",
        ),
        pytest.param(pod("ok-member", "gang"), id="member-of-a-gang"),
        pytest.param(pod("ok-gated", "gang", schedulingGates=[{"name": "example.com/quota"}]), id="gated-otherwise"),
        pytest.param(pod("ok-class", "two", runtimeClassName=names.RUNTIME_CLASS), id="class-with-claim"),
        pytest.param(pod("ok-plain"), id="asks-for-nothing"),
    ],
)
def test_every_admitted_shape_passes_the_api_server_and_the_policies(site: Site, body: dict[str, Any]) -> None:
    """What the webhook makes is valid, and what the policies demand of a shaped pod is what the webhook does."""
    stored = site.admit(body)

    is_gpu_pod = any(GPU in one.get("resources", {}).get("limits", {}) for one in stored["spec"]["containers"])
    assert is_gpu_pod == (body["metadata"]["name"] != "ok-plain")


@pytest.mark.parametrize(
    ("body", "fragment"),
    [
        pytest.param(
            pod("no", "nobody"), "GpuClaim 'nobody' does not exist in namespace 'default'", id="missing-claim"
        ),
        pytest.param(pod("no", "two", schedulingGates=[{"name": names.GANG_GATE}]), "never be removed", id="gate"),
        pytest.param(pod("no", "two", schedulerName="volcano"), "remove schedulerName", id="foreign-scheduler"),
        pytest.param(pod("no", "two", nodeName="n1"), "spec.nodeName", id="node-name"),
        pytest.param(pod("no", "two", asking("main", "3")), "make the sums equal", id="sum"),
        pytest.param(pod("no", None, asking("main", "0")), "ask for 1 to 64", id="zero"),
        pytest.param(pod("no", None, asking("main", "-1")), "whole number", id="negative"),
        pytest.param(pod("no", runtimeClassName=names.RUNTIME_CLASS), "for pods that ask", id="class-without-claim"),
        pytest.param(
            pod("no", "two", {"name": "main", "env": [{"name": "CUDA_VISIBLE_DEVICES", "value": "0"}]}),
            "remove it from env",
            id="own-variable",
        ),
    ],
)
def test_refusals_reach_the_user(site: Site, body: dict[str, Any], fragment: str) -> None:
    """kubectl prints the sentence that says what to change."""
    done = site.create(body)

    assert done.returncode != 0
    assert fragment in done.stderr
    assert 'admission webhook "pods.gpu.scheduling" denied the request' in done.stderr


DEVICES = "resource.k8s.io/v1"


def device_claim(name: str, device_class: str) -> dict[str, Any]:
    """Return a ResourceClaimTemplate of one device."""
    asked = {"requests": [{"name": "r", "exactly": {"deviceClassName": device_class}}]}
    spec = {"spec": {"devices": asked}}
    return {"apiVersion": DEVICES, "kind": "ResourceClaimTemplate", "metadata": {"name": name}, "spec": spec}


def test_gpus_by_kubernetes_own_allocation_beside_atolls_are_refused(site: Site) -> None:
    """A claim of a class of GPUs is refused, a network card's is not, and neither concerns pods without GPUs."""
    for name, driver in (("gpu", "gpu.nvidia.com"), ("nic", "dra.net")):
        selectors = [{"cel": {"expression": f"device.driver == '{driver}'"}}]
        site.apply(
            {"apiVersion": DEVICES, "kind": "DeviceClass", "metadata": {"name": name}, "spec": {"selectors": selectors}}
        )
        site.apply(device_claim(name, name))

    def using(name: str, claim_name: str | None, template: str) -> dict[str, Any]:
        return pod(name, claim_name, resourceClaims=[{"name": "d", "resourceClaimTemplateName": template}])

    refused = site.create(using("both", "two", "gpu"))
    assert refused.returncode != 0
    assert "DeviceClass 'gpu', and its devices are of the driver gpu.nvidia.com" in refused.stderr
    site.admit(using("with-nic", "two", "nic"))
    site.admit(using("without-atoll", None, "gpu"))
    missing = site.create(using("early", "two", "later"))
    assert "ResourceClaimTemplate 'later' of resource claim 'd' does not exist" in missing.stderr


def test_forged_annotations_are_stripped_with_a_warning(site: Site) -> None:
    """Also from a pod that asks for nothing: the prefix alone brings it to the webhook."""
    body = pod("forged")
    body["metadata"]["annotations"] = {names.ALLOCATED: "n1:0", "uuids.gpu.scheduling/main": "GPU-1", "mine": "1"}

    done = site.create(body)

    assert json.loads(done.stdout)["metadata"]["annotations"] == {"mine": "1"}
    assert "Warning: only Atoll writes these annotations" in done.stderr


def test_claim_and_pod_from_one_file(site: Site) -> None:
    """The pod follows its claim within milliseconds; what the watch has not brought yet is asked live."""
    for round_number in range(10):
        name = f"together-{round_number}"
        text = yaml.safe_dump_all([claim(name), pod(name, name)])
        done = site.cluster.kubectl("create", "-f", "-", input=text)
        assert done.returncode == 0, done.stderr


def test_a_dry_run_answers_alike_and_stores_nothing(site: Site) -> None:
    """The webhook has no side effects, and says so, or the API server would refuse the dry run."""
    shaped = site.admit(pod("dry", "two"), "--dry-run=server")

    assert shaped["spec"]["schedulerName"] == names.SCHEDULER_NAME
    assert site.cluster.kubectl("get", "pod", "dry").returncode != 0


def test_pods_made_by_controllers_are_shaped(site: Site) -> None:
    """A ReplicaSet's pods carry the template's annotation; its controller is nobody special."""
    template = {
        "metadata": {"labels": {"app": "rs"}, "annotations": {names.CLAIM: "two"}},
        "spec": {"containers": [{"name": "main", "image": "app"}]},
    }
    spec = {"replicas": 2, "selector": {"matchLabels": {"app": "rs"}}, "template": template}
    site.apply({"apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": {"name": "rs"}, "spec": spec})

    def schedulers() -> list[str]:
        listed = site.cluster.kubectl("get", "pods", "-l", "app=rs", "-o", "json")
        return [one["spec"]["schedulerName"] for one in json.loads(listed.stdout)["items"]]

    wait_for(lambda: schedulers() == [names.SCHEDULER_NAME] * 2, "the pods of the ReplicaSet")


QUEUED = "queued"
"""A namespace whose templates are completed."""


def job(name: str, claim_name: str | None = None, **spec: Any) -> dict[str, Any]:
    annotations = {names.CLAIM: claim_name} if claim_name else {}
    containers = [{"name": "main", "image": "app"}]
    template = {"metadata": {"annotations": annotations}, "spec": {"restartPolicy": "Never", "containers": containers}}
    body = {"suspend": True, "template": template, **spec}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": body}


@pytest.fixture(scope="module")
def queued(site: Site) -> Site:
    """The site with a namespace whose Jobs are sent to the webhook."""
    labels = {names.COMPLETE_JOBS: "true"}
    site.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": QUEUED, "labels": labels}})
    site.cluster.kubectl("create", "-n", QUEUED, "-f", "-", input=json.dumps(claim("two")), check=True)
    wait_for(
        lambda: site.create(job("probe", "nobody"), "-n", QUEUED, "--dry-run=server").returncode != 0,
        "the label to be seen",
    )
    return site


def test_the_template_of_a_claimed_job_shows_its_gpus_where_the_namespace_says_so(queued: Site) -> None:
    """What is stored requests the claim's count; the same Job elsewhere stays as its user wrote it."""
    stored = queued.admit(job("counted", "two"), "-n", QUEUED)
    elsewhere = queued.admit(job("counted", "two"))

    spec = stored["spec"]["template"]["spec"]
    assert spec["containers"][0]["resources"] == {"limits": {GPU: "2"}, "requests": {GPU: "2"}}
    assert spec["schedulerName"] == names.SCHEDULER_NAME
    assert not elsewhere["spec"]["template"]["spec"]["containers"][0].get("resources")


def test_pods_of_a_completed_template_are_admitted(queued: Site) -> None:
    """The webhook for pods and the policies find them as they want them."""
    queued.admit(job("running", "two", suspend=False), "-n", QUEUED)

    def resources() -> Any:
        listed = queued.cluster.kubectl("get", "pods", "-n", QUEUED, "-l", "job-name=running", "-o", "json")
        return [one["spec"]["containers"][0]["resources"]["limits"] for one in json.loads(listed.stdout)["items"]]

    wait_for(lambda: resources() == [{GPU: "2"}], "the pod of the Job")


def test_a_claim_that_comes_after_the_job_is_refused(queued: Site) -> None:
    """A suspended Job's annotations may change; its containers may not, so that its GPUs could not be counted."""
    queued.admit(job("later"), "-n", QUEUED)
    patch = {"spec": {"template": {"metadata": {"annotations": {names.CLAIM: "two"}}}}}
    done = queued.cluster.kubectl("patch", "job", "later", "-n", QUEUED, "--type=merge", "-p", json.dumps(patch))

    assert done.returncode != 0
    assert "create the Job anew" in done.stderr


def test_a_namespace_outside_of_the_webhook_is_no_way_around_it(site: Site) -> None:
    """kube-system is never sent to the webhook, so the policy refuses there what nobody shaped."""
    refused = site.create(pod("sneaky", None, asking("main", "1")), "-n", "kube-system")

    assert refused.returncode != 0
    assert "did not see the pod" in refused.stderr


def test_an_applied_configuration_is_trusted_again(site: Site) -> None:
    """`kubectl replace` drops the caBundle; the authority puts it back within its next round."""
    site.cluster.kubectl("replace", "-f", str(DEPLOY / "webhook.yaml"), check=True)

    wait_for(site.ca_bundles, "the authority in the configuration")
    site.wait_until_served()


def test_a_new_authority_is_followed_without_a_restart(site: Site) -> None:
    """Deleting the authority's Secret is the way out of a leaked key: all follow in seconds, no process restarts."""
    before = site.cluster.kubectl("get", "secret", "-n", "atoll-system", names.WEBHOOK_SECRET, "-o", "json").stdout
    pid = site.cluster.processes()["webhook"].pid
    trusted = site.ca_bundles()
    site.cluster.kubectl("delete", "secret", "-n", "atoll-system", names.AUTHORITY_SECRET, check=True)

    def is_replaced() -> bool:
        done = site.cluster.kubectl("get", "secret", "-n", "atoll-system", names.WEBHOOK_SECRET, "-o", "json")
        return done.returncode == 0 and json.loads(done.stdout)["data"] != json.loads(before)["data"]

    wait_for(is_replaced, "a new serving certificate")
    wait_for(lambda: site.ca_bundles() not in ([], trusted), "the new authority in the configuration")
    site.wait_until_served()
    assert site.cluster.processes()["webhook"].pid == pid


def check_jobs_without_the_webhook(queued: Site) -> None:
    """Only new Jobs that name a claim, in a namespace that asked for it, wait; every other write goes on."""
    refused = queued.create(job("closed", "two"), "-n", QUEUED)
    assert refused.returncode != 0
    assert "failed calling webhook" in refused.stderr
    assert queued.create(job("plain"), "-n", QUEUED).returncode == 0
    assert queued.create(job("claimed-elsewhere", "two")).returncode == 0
    for change in ({"suspend": False}, {"suspend": True}):
        patch = json.dumps({"spec": change, "metadata": {"labels": {"queue": "x"}}})
        done = queued.cluster.kubectl("patch", "job", "made-before", "-n", QUEUED, "--type=merge", "-p", patch)
        assert done.returncode == 0, done.stderr
    assert queued.cluster.kubectl("delete", "job", "made-before", "-n", QUEUED).returncode == 0


def test_with_the_webhook_dead_only_gpu_pods_wait(site: Site, queued: Site) -> None:
    """Fail closed for GPUs, open for the rest: plain pods and kube-system never notice."""
    queued.admit(job("made-before", "two"), "-n", QUEUED)
    site.cluster.signal("webhook", "KILL")
    site.cluster.wait_exit("webhook")
    try:
        assert site.create(pod("plain")).returncode == 0
        refused = site.create(pod("closed", "two"))
        assert refused.returncode != 0
        assert "failed calling webhook" in refused.stderr
        assert site.create(pod("network"), "-n", "kube-system").returncode == 0
        check_jobs_without_the_webhook(queued)
    finally:
        site.start_webhook()
    site.wait_until_served()
    assert site.create(pod("closed", "two")).returncode == 0


def test_no_secret_is_logged(site: Site) -> None:
    """Neither key stands in any line of either process."""
    text = site.logs()

    assert "Stored the webhook's serving certificate" in text
    assert "PRIVATE KEY" not in text
    assert "LS0tLS1CRUdJTiB" not in text
