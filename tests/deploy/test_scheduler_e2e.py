"""The stock kube-scheduler with the shipped configuration, flags and identity."""

import json
import os

import pytest

from devcluster import DevCluster
from tests.deploy.api_server import DEPLOY, RealApi, manifests, wait_for
from tests.deploy.requests import LEASES, pod

pytestmark = pytest.mark.e2e

NEEDED_AT_ONCE = (
    {"verb": "list", "resource": "nodes"},
    {"verb": "list", "resource": "pods"},
    {"verb": "list", "group": "storage.k8s.io", "resource": "csinodes"},
    {"verb": "create", "group": "coordination.k8s.io", "resource": "leases", "namespace": "atoll-system"},
    {"verb": "get", "resource": "configmaps", "namespace": "kube-system", "name": "extension-apiserver-authentication"},
)
PLAIN = "/api/v1/namespaces/default/pods"


def shipped_flags() -> list[str]:
    """Return kube-scheduler's flags of the Deployment, but for the configuration file."""
    (deployment,) = (m for m in manifests("scheduler/deployment.yaml") if m["kind"] == "Deployment")
    (container,) = (c for c in deployment["spec"]["template"]["spec"]["containers"] if c["name"] == "kube-scheduler")
    return [flag for flag in container["command"][1:] if not flag.startswith("--config=")]


@pytest.mark.parametrize("configuration", ["config.yaml", "config-tainted-nodes.yaml"])
def test_kube_scheduler_leads_with_what_is_shipped_and_lacks_no_right(configuration: str) -> None:
    """It takes configuration and flags, leads through Atoll's namespace, sees its pods, and is forbidden nothing."""
    name = f"scheduler-{configuration.partition('.')[0][-4:]}-{os.getpid()}"
    with DevCluster.start(name, nodes=[], scheduler=False) as cluster:
        for file in ("namespaces.yaml", "crds", "rbac", "policies"):
            cluster.kubectl("apply", "-f", str(DEPLOY / file), check=True)
        api = RealApi(cluster.kubeconfig)
        for attributes in NEEDED_AT_ONCE:
            wait_for(lambda row=attributes: api.allows("scheduler", row), "the roles that were just applied hold")
        identity = cluster.service_account_kubeconfig("atoll-system", "atoll-scheduler")
        cluster.start_scheduler(DEPLOY / "scheduler" / configuration, identity, flags=shipped_flags())
        lease = f"{LEASES}/atoll-system/leases/atoll-scheduler"
        wait_for(lambda: "holderIdentity" in api.send("GET", lease).message, "kube-scheduler leads")
        assert api.send("POST", PLAIN, pod("waits", schedulerName="gpu-scheduler")).status == 201

        def is_judged() -> bool:
            status = json.loads(api.send("GET", f"{PLAIN}/waits").message)["status"]
            return any(condition["type"] == "PodScheduled" for condition in status.get("conditions", ()))

        wait_for(is_judged, "the pod is told why it waits")
        log = cluster.logs("kube-scheduler").read_text()
        assert "forbidden" not in log.lower()
