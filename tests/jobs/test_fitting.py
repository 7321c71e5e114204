"""Whether a job fits a cluster, when it would, and what a cluster offers by type and island."""

import json
from typing import Any

import pytest

from atoll.api.claims import GpuClaim
from atoll.cluster.objects import Pod
from atoll.explain import simulation
from atoll.explain.decision import IndexedSnapshot, PodDecision, decide
from atoll.jobs import fitting
from atoll.jobs.documents import parse_job
from atoll.jobs.fitting import ExpectedEnd, GpuCapacity, JobFit, capacity_of, fit_of
from atoll.jobs.model import Job
from atoll.jobs.rendering import Rendered, render
from tests.explain.situations import holder, situation


def job(gpus: int, **fields: Any) -> Rendered:
    """Return a rendered training."""
    document = {
        "name": "tune",
        "job_type": "training",
        "namespace": "team",
        "ext_ml_gpu_count": gpus,
        "ext_ml_distributed_strategy": "fsdp",
        "container": {"image": "busybox:1"},
    }
    parsed = parse_job(json.dumps(document | fields).encode())
    assert parsed.job is not None, parsed.problems
    return render(parsed.job)


def lone_pods(count: int) -> Rendered:
    """Return a rendered batch of so many pods on their own, four GPUs each."""
    many = {"name": "many", "job_type": "batch", "ext_ml_gpu_count": 4, "parallelism": count, "completions": count}
    return render(Job.model_validate(many | {"container": {"image": "busybox:1"}}))


HALF = situation({"n1": {}, "n2": {}}, [holder("a", "n1", *range(4)), holder("b", "n2", *range(4))]).snapshot
HALF_OF_ONE = situation({"n1": {}}, [holder("a", "n1", *range(4))]).snapshot
FULL = situation({"n1": {}}, [holder("a", "n1", *range(4)), holder("b", "n1", *range(4, 8))]).snapshot


def test_a_set_fits_or_says_why_not() -> None:
    """Four GPUs fit beside four taken ones; eight on one machine do not, though eight are free in all."""
    assert fit_of(HALF, job(4), namespace="team") == JobFit(fits=True, wait_seconds=0.0)
    refused = fit_of(HALF, job(8), namespace="team")

    assert (refused.fits, refused.wait_seconds) == (False, None)
    assert refused.reason


def test_a_gang_fits_whole_or_not_at_all() -> None:
    """Two pods of eight need two empty machines; with one they wait."""
    empty = situation({"n1": {}, "n2": {}}).snapshot
    one = situation({"n1": {}, "n2": {}}, [holder("a", "n2", 0)]).snapshot

    assert fit_of(empty, job(16), namespace="team").fits
    assert not fit_of(one, job(16), namespace="team").fits


def test_it_fits_when_enough_others_have_ended() -> None:
    """Of two jobs on a full machine the second end makes room for eight, the first for four."""
    uids = {pod.metadata.name: pod.metadata.uid for pod in FULL.pods}
    ends = [ExpectedEnd(600, frozenset({uids["b"]})), ExpectedEnd(60, frozenset({uids["a"]}))]

    assert fit_of(FULL, job(4), namespace="team", ends=ends).wait_seconds == 60
    assert fit_of(FULL, job(8), namespace="team", ends=ends).wait_seconds == 600
    assert fit_of(FULL, job(8), namespace="team", ends=ends[1:]).wait_seconds is None


def test_the_search_ends_at_the_first_pod_without_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a thousand pods on a machine with room for one, two are tried."""
    tried: list[Pod] = []

    def watched(scene: IndexedSnapshot, pod: Pod, claim: GpuClaim | None) -> PodDecision:
        tried.append(pod)
        return decide(scene, pod, claim)

    monkeypatch.setattr(simulation, "decide", watched)

    assert not fit_of(HALF_OF_ONE, lone_pods(1000), namespace="team").fits
    assert len(tried) == 2


def test_a_chart_is_not_placed() -> None:
    """Its pods are not known, so nothing says that it does not fit."""
    fields = {"name": "app", "job_type": "service", "deployment_type": "helm", "ext_ml_gpu_count": 8}
    chart = Job.model_validate(fields | {"helm": {"chart": "oci://charts.example.com/app"}})

    assert fit_of(FULL, render(chart), namespace="team") == JobFit(True, "the pods of its chart are not known", 0.0)


def test_a_job_without_gpus_always_fits() -> None:
    """kube-scheduler places it; the choice of a cluster goes by price and latency."""
    fields = {"name": "cpu", "job_type": "batch", "container": {"image": "busybox:1"}}

    assert fit_of(FULL, render(Job.model_validate(fields)), namespace="team").fits


def test_capacity_by_type_and_island() -> None:
    """Free GPUs by type, and how many islands have so many of them, as the machines' reports say."""
    found = situation({"n1": {}, "n2": {"profile": "l40s-4"}}, [holder("a", "n1", 0, 1)]).snapshot
    by_type = {one.gpu_type: one for one in capacity_of(found)}

    assert len(by_type) == 2
    assert sum(one.total for one in by_type.values()) == 12
    assert sum(one.free for one in by_type.values()) == 10
    assert isinstance(by_type["nvidia-l40s"], GpuCapacity)
    assert sum(size * count for size, count in by_type["nvidia-l40s"].islands.items()) >= 4


def test_a_search_looks_at_a_bounded_number_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many pods on their own the first are placed, and of many expected ends few are tried; a cluster that is larger
    than the bound is not searched at all. Each says so, or finds nothing."""
    two = situation({"n1": {}, "n2": {}}).snapshot
    monkeypatch.setattr(fitting, "LOOKS_MAX", 6)
    some = fit_of(two, lone_pods(4), namespace="team")
    all_of_them = fit_of(two, lone_pods(3), namespace="team")
    uids = [pod.metadata.uid for pod in FULL.pods]
    late = [ExpectedEnd(60 * number, frozenset()) for number in range(1, 64)] + [ExpectedEnd(9999, frozenset(uids))]
    missed = fit_of(FULL, job(8), namespace="team", ends=late)
    monkeypatch.setattr(fitting, "LOOKS_MAX", 7)
    found = fit_of(FULL, job(8), namespace="team", ends=late)
    monkeypatch.setattr(fitting, "LOOKS_MAX", 1)
    too_large = fit_of(two, lone_pods(4), namespace="team")

    assert some == JobFit(True, "only the first 3 of its 4 pods were placed", 0.0)
    assert all_of_them == JobFit(True, "", 0.0)
    assert (missed.wait_seconds, found.wait_seconds) == (None, 9999)
    assert too_large == JobFit(True, "the cluster is too large to place the job's pods ahead", 0.0)
