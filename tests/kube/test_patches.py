"""Patches and paths: fences are never omitted, names cannot escape their path."""

import pytest

from atoll.kube import patches, paths


def test_merge_patch_carries_its_fence() -> None:
    """uid and resourceVersion stand in the metadata, where the API server checks them."""
    patch = patches.merge_patch(uid="u1", resource_version="7", annotations={"a/b": None}, status={"phase": "x"})

    assert patch == {
        "metadata": {"uid": "u1", "resourceVersion": "7", "annotations": {"a/b": None}},
        "status": {"phase": "x"},
    }


def test_merge_patch_without_facts_is_empty() -> None:
    """Nothing asked, nothing sent."""
    assert patches.merge_patch() == {}


def test_delete_options_name_the_one_object() -> None:
    """A deletion is for one uid in one state, not for whoever bears the name."""
    options = patches.delete_options(uid="u1", resource_version="7", grace_period_seconds=0, propagation="Background")

    assert options["preconditions"] == {"uid": "u1", "resourceVersion": "7"}
    assert options["gracePeriodSeconds"] == 0
    assert options["propagationPolicy"] == "Background"
    assert "preconditions" not in patches.delete_options()


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (paths.pods(), "/api/v1/pods"),
        (paths.pods("a"), "/api/v1/namespaces/a/pods"),
        (paths.binding("a", "b"), "/api/v1/namespaces/a/pods/b/binding"),
        (paths.eviction("a", "b"), "/api/v1/namespaces/a/pods/b/eviction"),
        (paths.nodes("n", "status"), "/api/v1/nodes/n/status"),
        (paths.namespaces("n"), "/api/v1/namespaces/n"),
        (paths.secrets("a", "b"), "/api/v1/namespaces/a/secrets/b"),
        (paths.leases("a", "b"), "/apis/coordination.k8s.io/v1/namespaces/a/leases/b"),
        (paths.events("a"), "/apis/events.k8s.io/v1/namespaces/a/events"),
        (paths.gpuclaims("a", "b", "status"), "/apis/gpu.scheduling/v1/namespaces/a/gpuclaims/b/status"),
        (paths.gpunodestatuses("n"), "/apis/gpu.scheduling/v1/gpunodestatuses/n"),
        (
            paths.mutatingwebhookconfigurations("w"),
            "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/w",
        ),
        (paths.group("batch/v1", "jobs", namespace="a"), "/apis/batch/v1/namespaces/a/jobs"),
        (paths.pods("a/b", "c?d"), "/api/v1/namespaces/a%2Fb/pods/c%3Fd"),
    ],
)
def test_paths(path: str, expected: str) -> None:
    """Each resource has one path, and every segment is quoted."""
    assert path == expected


@pytest.mark.parametrize("name", [".", ".."])
def test_dots_are_not_names(name: str) -> None:
    """A segment of dots would be taken as a parent folder on the way."""
    with pytest.raises(ValueError, match="not an object name"):
        paths.pods("a", name)


def test_subresource_needs_a_name() -> None:
    """A collection has no subresources; a forgotten name is an error, not another URL."""
    with pytest.raises(ValueError, match="needs a name"):
        paths.pods("a", "", "binding")
