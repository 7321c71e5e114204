"""The file of queues: its defaults, every mistake with its line, and the objects that it becomes."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from atoll.api import job_names, names
from atoll.jobs.queue_file import QueueFile, as_stored, completed, parse_queue_file
from atoll.jobs.queue_objects import KUEUE_API, Object, objects_of_queues
from atoll.jobs.settings import RenderSettings

EXAMPLE = Path(__file__).parents[2] / "examples" / "jobs" / "queues" / "production.yaml"
NAMESPACE = "tenant-{tenant}"
HEAD = """\
flavors:
  - {name: h100}
  - {name: spot, spot: true}
cohorts:
  - {name: all}
tenants:
  - name: acme
    queues:
"""


def parsed(text: str) -> QueueFile:
    """Return the file that a text says, without mistakes."""
    found = parse_queue_file(text.encode(), namespace=NAMESPACE)
    assert isinstance(found, QueueFile), found
    return found


def made(text: str) -> dict[tuple[str, str], Object]:
    """Return the objects of a file by kind and name."""
    found = objects_of_queues(parsed(text), RenderSettings(), service_id="me")
    return {(one["kind"], one["metadata"]["name"]): one for one in found}


def queue_of(text: str, **fields: Any) -> Object:
    """Return the spec of the ClusterQueue of a file's first queue, with other fields in it."""
    file = yaml.safe_load(HEAD + text)
    file["tenants"][0]["queues"][0] |= fields.pop("queue", {})
    found = made(json.dumps(file | fields))
    spec: Object = next(one for (kind, _), one in found.items() if kind == "ClusterQueue")["spec"]
    return spec


def test_names_and_namespaces_follow_from_the_tenant() -> None:
    """What is left out is completed; stored and read again, the file is the same."""
    file = parsed(HEAD + "      - {flavors: [{flavor: h100, quota: {gpu: 8}}]}\n"
                  "      - {critical: true, flavors: [{flavor: h100, quota: {gpu: 4}}]}\n")  # fmt: skip
    tenant = file.tenants[0]

    assert tenant.namespaces == ("tenant-acme",)
    assert [queue.name for queue in tenant.queues] == ["tenant-acme-queue", "tenant-acme-critical"]
    assert tenant.queue_for(critical=True).name == "tenant-acme-critical"
    assert tenant.queue_for(critical=False).name == "tenant-acme-queue"
    assert completed(QueueFile.model_validate(as_stored(file)), namespace="other") == file


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("      - {flavors: [{flavor: a100, quota: {gpu: 8}}]}\n", "flavors[0].flavor is 'a100': is no flavor of this"),
        (
            "      - {cohort: x, flavors: [{flavor: h100, quota: {gpu: 8}}]}\n",
            "cohort is 'x': is no cohort of this file",
        ),
        (
            "      - {flavors: [{flavor: h100, quota: {gpu: {nominal: 8, borrow: 1}}}]}\n",
            "borrow is '1': needs a cohort",
        ),
        (
            "      - {weight: 2, cohort: all, flavors: [{flavor: h100, quota: {gpu: 8}}]}\n",
            "weight is 2: has no effect",
        ),
        ("      - {flavors: [{flavor: h100, quota: {gpu: -1}}]}\n", "must be a quantity such as 8"),
        ("      - {flavors: [{flavor: h100, quota: {gpu: 1, gpu.scheduling/gpu: 1}}]}\n", "names a resource twice"),
        ("      - {flavors: [{flavor: h100, quota: {gpu: 8}}], stop: now}\n", "must be one of"),
        ("      - {flavors: [{flavor: h100, quota: {gpu: 8}}], wieght: 2}\n", "wieght is 2: is not known"),
        (
            "      - {flavors: [{flavor: h100, quota: {gpu: 8}}], ml_limits: {max_gpus: 4}}\n",
            "tenants[0].queues[0].ml_limits.max_gpus is not known; did you mean",
        ),
        (
            "      - {flavors: [{flavor: h100, quota: {gpu: 8}}], ml_defaults: {cpu_cores: 0}}\n",
            "tenants[0].queues[0].ml_defaults.ext_ml_cpu_cores is 0: must be",
        ),
        ("      - {critical: true, flavors: [{flavor: h100, quota: {gpu: 8}}]}\n", "has only a critical queue"),
        (
            "      - {flavors: [{flavor: h100, quota: {gpu: 8}}]}\n" * 2,
            "queues[1].name is 'tenant-acme-queue': is the name of another queue",
        ),
        (
            "      - {flavors: [{flavor: h100, quota: {gpu: 8}}]}\n    network: {to_networks: [10.0.0.1/8]}\n",
            "network.to_networks[0] is '10.0.0.1/8': must be in another form",
        ),
        (
            "      - {flavors: [{flavor: h100, quota: {gpu: 8}}]}\n    network: {from_networks: [fe80::1%eth0/128]}\n",
            "tenants[0].network.from_networks[0] is 'fe80::1%eth0/128': has a zone",
        ),
    ],
)
def test_a_mistake_is_told_with_its_line(text: str, told: str) -> None:
    """Each mistake names the field and its line, and nothing is applied."""
    found = parse_queue_file((HEAD + text).encode(), namespace=NAMESPACE)

    assert isinstance(found, tuple)
    assert told in str(found[0])
    assert str(found[0]).startswith("line ")


def test_a_namespace_has_one_tenant() -> None:
    """Two tenants that share a namespace would share their quota."""
    queue = {"flavors": [{"flavor": "h100", "quota": {"gpu": 1}}]}
    tenants = [{"name": name, "namespaces": ["same"], "queues": [queue]} for name in ("acme", "globex")]
    text = json.dumps({"flavors": [{"name": "h100"}], "tenants": tenants})

    assert "belongs to tenant acme" in str(parse_queue_file(text.encode(), namespace=NAMESPACE))


@pytest.mark.parametrize("data", [b"", b"[]", b"a: [", b"\xff", b"tenants: 3", b"flavors: {a: b}"])
def test_nonsense_is_refused(data: bytes) -> None:
    """Whatever it is, there is a problem and no exception."""
    assert isinstance(parse_queue_file(data, namespace=NAMESPACE), tuple)


def test_the_example_becomes_every_kind_of_object() -> None:
    """KQ-1, KQ-2, KQ-3, KQ-9, KQ-10: the flavors, quotas, namespaces and priorities of the example, in v1beta2."""
    found = made(EXAMPLE.read_text())
    globex = found["ClusterQueue", "tenant-globex-queue"]["spec"]
    by_flavor = {one["name"]: one["resources"] for one in globex["resourceGroups"][0]["flavors"]}
    values = {name: one["value"] for (kind, name), one in found.items() if kind == "WorkloadPriorityClass"}

    assert {one["apiVersion"] for one in found.values()} == {
        "v1",
        "scheduling.k8s.io/v1",
        "networking.k8s.io/v1",
        KUEUE_API,
    }
    assert values == {"critical": 1000, "high": 100, "normal": 10, "low": 1}
    assert all(one["description"] for (kind, _), one in found.items() if kind == "WorkloadPriorityClass")
    assert found["ResourceFlavor", "gpu-t4"]["spec"]["nodeLabels"] == {"nvidia.com/gpu.product": "Tesla-T4"}
    assert globex["cohortName"] == "production"
    assert globex["resourceGroups"][0]["coveredResources"] == ["cpu", "memory", "ephemeral-storage", names.GPU_RESOURCE]
    assert [(name, rows[0]["nominalQuota"], rows[1]["nominalQuota"]) for name, rows in by_flavor.items()] == [
        ("gpu-h100-80gb", "256", "2Ti"),
        ("gpu-a100-80gb", "512", "4Ti"),
        ("gpu-a100-40gb", "256", "2Ti"),
        ("gpu-t4", "400", "3Ti"),
    ]
    assert [(rows[3]["nominalQuota"], rows[3]["borrowingLimit"]) for rows in by_flavor.values()] == [
        ("16", "0"),
        ("64", "32"),
        ("32", "16"),
        ("100", "50"),
    ]
    acme = found["ClusterQueue", "tenant-acme-queue"]["spec"]
    spaces = acme["namespaceSelector"]["matchExpressions"][0]["values"]
    assert spaces == ["tenant-acme", "tenant-acme-prod", "tenant-acme-dev"]
    assert found["Namespace", "tenant-acme-dev"]["metadata"]["labels"][names.COMPLETE_JOBS] == "true"
    assert job_names.SERVICE_ID not in found["Namespace", "tenant-acme-dev"]["metadata"]["labels"]


@pytest.mark.parametrize(
    ("fields", "preemption"),
    [
        ({"queue": {"cohort": "all"}}, ("Any", {"policy": "LowerPriority", "maxPriorityThreshold": 10})),
        ({"queue": {}}, ("Any", {"policy": "Never"})),
        ({"queue": {"cohort": "all", "reclaim": "never"}}, ("Never", {"policy": "Never"})),
        ({"queue": {"cohort": "all"}, "fair_sharing": True}, ("Any", {"policy": "Never"})),
    ],
)
def test_whom_a_queue_preempts(fields: dict[str, Any], preemption: tuple[str, Object]) -> None:
    """KQ-4, C-14: the threshold leaves high borrowers alone; no preemption while borrowing with fair sharing."""
    found = queue_of("      - {flavors: [{flavor: h100, quota: {gpu: 8}}]}\n", **fields)["preemption"]

    assert found["withinClusterQueue"] == "LowerPriority"
    assert (found["reclaimWithinCohort"], found["borrowWithinCohort"]) == preemption


def test_a_critical_queue_borrows_nothing() -> None:
    """C-14: only what is borrowed can be taken back, so a queue that never borrows is safe."""
    text = (
        "      - {critical: true, cohort: all, flavors: [{flavor: h100, quota: {gpu: 8}}]}\n"
        "      - {flavors: [{flavor: h100, quota: {gpu: 8}}]}\n"
    )
    spec = queue_of(text)

    assert {row["borrowingLimit"] for row in spec["resourceGroups"][0]["flavors"][0]["resources"]} == {"0"}
    assert spec["preemption"]["borrowWithinCohort"] == {"policy": "Never"}


def test_spot_comes_first_and_only_for_those_who_tolerate_it() -> None:
    """KQ-2, COST-5: a spot flavor is tried first, and its taint keeps other jobs away."""
    quotas = "[{flavor: h100, quota: {gpu: 8}}, {flavor: spot, quota: {gpu: 2}}]"
    text = HEAD + f"      - {{cohort: all, flavors: {quotas}}}\n"
    found = made(text)
    flavors = found["ClusterQueue", "tenant-acme-queue"]["spec"]["resourceGroups"][0]["flavors"]

    assert [one["name"] for one in flavors] == ["spot", "h100"]
    assert found["ResourceFlavor", "spot"]["spec"]["nodeTaints"][0]["effect"] == "NoSchedule"
    assert found["ResourceFlavor", "h100"]["spec"]["nodeTaints"] is None


def test_slices_are_counted_by_their_profile() -> None:
    """A quota of MIG slices covers Atoll's resource of that profile, and other flavors of the queue have none."""
    quotas = "[{flavor: h100, quota: {gpu: 8}}, {flavor: spot, quota: {gpu: 0, mig-3g.40gb: 6}}]"
    group = queue_of(f"      - {{flavors: {quotas}}}\n")["resourceGroups"][0]
    slices = {one["name"]: one["resources"][-1] for one in group["flavors"]}

    assert group["coveredResources"][-1] == f"{names.MIG_RESOURCE_PREFIX}3g.40gb"
    assert [(name, row["nominalQuota"]) for name, row in slices.items()] == [("spot", "6"), ("h100", "0")]


QUEUE = "      - {flavors: [{flavor: h100, quota: {gpu: 8}}]}\n"
OWN = {"namespaceSelector": {"matchExpressions": [
    {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["tenant-acme"]}]}}  # fmt: skip
DNS = {
    "to": [{"namespaceSelector": {"matchExpressions": [
        {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["kube-system"]}]}}],
    "ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("network", "sources", "egress"),
    [
        ("{}", [OWN], None),
        ("{from_networks: [10.0.0.0/8]}", [OWN, {"ipBlock": {"cidr": "10.0.0.0/8"}}], None),
        ("{to_networks: []}", [OWN], [{"to": [OWN]}, DNS]),
        ("{to_networks: ['fd00::/8']}", [OWN], [{"to": [OWN, {"ipBlock": {"cidr": "fd00::/8"}}]}, DNS]),
    ],
    ids=["its own pods alone", "a network outside", "nowhere else", "one place"],
)
def test_a_tenants_pods_talk_with_their_own(network: str, sources: list[Object], egress: list[Object] | None) -> None:
    """Nobody else gets in; where they connect to is free until the tenant's file limits it."""
    spec = made(f"{HEAD}{QUEUE}    network: {network}\n")["NetworkPolicy", "atoll-tenant"]["spec"]

    assert spec["podSelector"] == {}
    assert spec["policyTypes"] == (["Ingress"] if egress is None else ["Ingress", "Egress"])
    assert spec["ingress"] == [{"from": sources}]
    assert spec["egress"] == egress


def test_a_tenant_may_be_open() -> None:
    """Then there is no policy; named namespaces are let in otherwise."""
    opened = made(f"{HEAD}{QUEUE}    network: {{isolated: false}}\n")
    shared = made(f"{HEAD}{QUEUE}    network: {{from_namespaces: [ingress]}}\n")["NetworkPolicy", "atoll-tenant"]

    assert ("NetworkPolicy", "atoll-tenant") not in opened
    assert [one["namespaceSelector"]["matchExpressions"][0]["values"] for one in shared["spec"]["ingress"][0]["from"]] \
        == [["tenant-acme"], ["ingress"]]  # fmt: skip


SETS = "multikueue:\n  - {name: far, clusters: {east: east-config, west: west-config}}\n"


def test_a_queue_may_send_its_jobs_to_other_clusters() -> None:
    """MC-6: each cluster with its Secret, the set, and the check that the queue's jobs pass."""
    found = made(SETS + HEAD + QUEUE.replace("{flavors", "{multikueue: far, flavors"))
    spec = {kind: one["spec"] for (kind, name), one in found.items() if name in ("far", "tenant-acme-queue")}

    assert found["MultiKueueCluster", "east"]["spec"] == {
        "clusterSource": {"kubeConfig": {"location": "east-config", "locationType": "Secret"}}
    }
    assert spec["MultiKueueConfig"] == {"clusters": ["east", "west"]}
    assert spec["AdmissionCheck"]["controllerName"] == "kueue.x-k8s.io/multikueue"
    assert spec["AdmissionCheck"]["parameters"]["name"] == "far"
    assert spec["ClusterQueue"]["admissionChecksStrategy"] == {"admissionChecks": [{"name": "far"}]}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (HEAD + QUEUE.replace("{flavors", "{multikueue: far, flavors"), "multikueue is 'far': is no set of clusters"),
        (SETS + "  - {name: near, clusters: {east: other}}\n" + HEAD + QUEUE,
         "clusters.east is 'other': has the Secret east-config in another set"),
    ],
)  # fmt: skip
def test_a_mistake_about_clusters_is_told(text: str, told: str) -> None:
    """A set that is not there, and a cluster with two Secrets."""
    found = parse_queue_file(text.encode(), namespace=NAMESPACE)

    assert isinstance(found, tuple)
    assert told in str(found[0])
