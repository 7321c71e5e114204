"""Fixtures: a control plane with Atoll's manifests, without policies at first.

`ATOLL_E2E_KUBECONFIG` selects an existing cluster, which the tests may change; by default they start a development
cluster without nodes.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.deploy.api_server import RealApi, collection, manifests, wait_for


@pytest.fixture(scope="session")
def kubeconfig() -> Iterator[Path]:
    """Yield the path of an administrator's kubeconfig."""
    if given := os.environ.get("ATOLL_E2E_KUBECONFIG"):
        yield Path(given)
        return
    from devcluster import DevCluster

    with DevCluster.start(f"doors-{os.getpid()}", nodes=[], scheduler=False) as cluster:
        yield Path(cluster.kubeconfig)


@pytest.fixture(scope="session")
def api(kubeconfig: Path) -> RealApi:
    """Return the API server with CRDs, namespaces, roles and RuntimeClass applied, but no policies."""
    client = RealApi(kubeconfig)
    files = ("namespaces.yaml", "crds/*.yaml", "rbac/*.yaml", "runtimeclass.yaml")
    for manifest in manifests(*files):
        answer = client.apply(manifest, path=collection(manifest))
        assert answer.is_accepted, answer
    wait_for(
        lambda: all(
            client.send("GET", f"/apis/gpu.scheduling/v1/{plural}").status == 200
            for plural in ("gpuclaims", "gpunodestatuses")
        ),
        "the custom resources are served",
    )
    return client


@pytest.fixture(scope="session")
def apply_policies(api: RealApi) -> Callable[[], None]:
    """Return a function that applies all policies; the optional one exempts the namespace `doors` by its parameter."""

    def apply() -> None:
        for manifest in manifests("policies/*.yaml", "policies/optional/*.yaml"):
            answer = api.apply(manifest, path=collection(manifest))
            assert answer.is_accepted, answer
        parameter = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "atoll-unclaimed-pods"},
            "data": {"allowedNamespaces": "kube-system atoll-system atoll-nodes doors"},
        }
        assert api.apply(parameter, path="/api/v1/namespaces/atoll-system/configmaps").is_accepted

    return apply


@pytest.fixture(scope="session")
def remove_policies(api: RealApi) -> Callable[[], None]:
    """Return a function that removes the bindings of all policies, which disables them."""

    def remove() -> None:
        for manifest in manifests("policies/*.yaml", "policies/optional/*.yaml"):
            if manifest["kind"] == "ValidatingAdmissionPolicyBinding":
                api.send("DELETE", f"{collection(manifest)}/{manifest['metadata']['name']}")

    return remove
