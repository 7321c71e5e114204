"""Where pods may run: rules in Kubernetes' format, and rules that it cannot express."""

from collections.abc import Mapping
from typing import Any

import pytest

from atoll.jobs.errors import JobMistake, NodesUnknown
from atoll.jobs.labels import label_value
from atoll.jobs.selection import KnownNode
from tests.jobs.render import look, rendered

HOSTNAME = "kubernetes.io/hostname"
NODES = [
    KnownNode("old", {HOSTNAME: "old", "cuda": "9.0", "compute_capability": "8.0", "gpu_type": "nvidia-a100"}),
    KnownNode("new", {HOSTNAME: "new", "cuda": "10.1", "compute_capability": "10.0"}),
    KnownNode("bare", {HOSTNAME: "bare"}),
]
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
NODE_RULE = f"POD.spec.affinity.nodeAffinity.{REQUIRED}.nodeSelectorTerms[0].matchExpressions[0]"
POD_RULE = f"POD.spec.affinity.podAntiAffinity.{REQUIRED}[0].labelSelector.matchExpressions[0]"


def rule(key: str, operator: str, *values: str) -> dict[str, Any]:
    """Return one rule as a job says it."""
    return {"key": key, "operator": operator, "values": list(values)}


NATIVE = {
    "in": (rule("disk", "In", "ssd", "nvme"), {"key": "disk", "operator": "In", "values": ["ssd", "nvme"]}),
    "not-in": (rule("disk", "NotIn", "hdd"), {"key": "disk", "operator": "NotIn", "values": ["hdd"]}),
    "exists": (rule("disk", "Exists"), {"key": "disk", "operator": "Exists"}),
    "does-not-exist": (rule("disk", "DoesNotExist"), {"key": "disk", "operator": "DoesNotExist"}),
    "above": (rule("cores", "Gt", "8"), {"key": "cores", "operator": "Gt", "values": ["8"]}),
    "at-least": (rule("cores", "Gte", "8"), {"key": "cores", "operator": "Gt", "values": ["7"]}),
    "below": (rule("cores", "Lt", "8"), {"key": "cores", "operator": "Lt", "values": ["8"]}),
    "at-most": (rule("cores", "Lte", "8"), {"key": "cores", "operator": "Lt", "values": ["9"]}),
    "short-labels-are-those-of-kubernetes": (
        rule("zone", "In", "a"),
        {"key": "topology.kubernetes.io/zone", "operator": "In", "values": ["a"]},
    ),
}


@pytest.mark.parametrize(("said", "want"), NATIVE.values(), ids=NATIVE)
def test_rules_that_kubernetes_knows_are_written_as_it_has_them(said: dict[str, Any], want: Mapping[str, Any]) -> None:
    """No cluster has to be asked for them, and asking changes nothing."""
    for nodes in (None, NODES):
        assert look(rendered(ext_ml_affinity={"required": [said]}, nodes=nodes), NODE_RULE) == want


RESOLVED = {
    "dotted-numbers-by-their-values": (
        rule("cuda", "Gt", "9.5"),
        {"key": "cuda", "operator": "In", "values": ["10.1"]},
    ),
    "at-least-takes-both": (rule("cuda", "Gte", "9.0"), {"key": "cuda", "operator": "In", "values": ["10.1", "9.0"]}),
    "what-no-label-says-by-the-nodes": (
        rule("compute_capability", "Gte", "9.0"),
        {"key": HOSTNAME, "operator": "In", "values": ["new"]},
    ),
    "a-type-of-gpu-by-the-nodes": (
        rule("gpu_type", "In", "nvidia-a100"),
        {"key": HOSTNAME, "operator": "In", "values": ["old"]},
    ),
}


@pytest.mark.parametrize(("said", "want"), RESOLVED.values(), ids=RESOLVED)
def test_rules_that_kubernetes_cannot_express_are_resolved_against_known_nodes(
    said: dict[str, Any], want: Mapping[str, Any]
) -> None:
    """Ten is above nine: numbers are compared part by part, on the nodes that there are."""
    assert look(rendered(ext_ml_affinity={"required": [said]}, nodes=NODES), NODE_RULE) == want
    with pytest.raises(NodesUnknown) as caught:
        rendered(ext_ml_affinity={"required": [said]})

    assert caught.value.problem.attribute == "ext_ml_affinity.required"
    assert "--snapshot" in caught.value.problem.hint


def test_a_rule_that_no_node_meets_is_refused() -> None:
    """Nobody waits for a node that the rule, once resolved, could never name."""
    with pytest.raises(JobMistake, match="none of the 3 known nodes"):
        rendered(ext_ml_affinity={"required": [rule("cuda", "Gt", "11.5")]}, nodes=NODES)


def test_preferences_add_their_weight_and_refuse_nobody() -> None:
    """A preference of no weight means nothing, and Kubernetes takes none."""
    wishes = [rule("disk", "In", "ssd") | {"weight": 50}, rule("disk", "In", "hdd") | {"weight": 0}]
    result = rendered(ext_ml_affinity={"preferred": wishes})
    entries = look(result, f"POD.spec.affinity.nodeAffinity.{PREFERRED}")

    assert [entry["weight"] for entry in entries] == [50]
    assert look(result, f"POD.spec.affinity.nodeAffinity.{REQUIRED}") is None


def test_anti_affinity_keeps_away_from_pods_of_jobs() -> None:
    """Memory-heavy trainings lie apart: a property of jobs is compared as the label that their pods bear."""
    result = rendered(ext_ml_anti_affinity={"required": [rule("job_type", "In", "training")]})

    assert look(result, POD_RULE) == {"key": "job.gpu.scheduling/job-type", "operator": "In", "values": ["training"]}
    assert look(result, f"POD.spec.affinity.podAntiAffinity.{REQUIRED}[0].topologyKey") == HOSTNAME


def test_anti_affinity_to_what_lacks_something_means_jobs_alone() -> None:
    """Pods that are no jobs lack every label of jobs; nobody has to keep away from all of them."""
    result = rendered(ext_ml_anti_affinity={"required": [rule("job_type", "NotIn", "training")]})
    expressions = look(result, POD_RULE.removesuffix("[0]"))

    assert {"key": "job.gpu.scheduling/job-type", "operator": "Exists"} in expressions


def test_anti_affinity_to_nodes_is_the_opposite_rule() -> None:
    """To keep away from a zone is to be in none of its nodes."""
    result = rendered(ext_ml_anti_affinity={"required": [rule("zone", "In", "a")]})

    assert look(result, NODE_RULE) == {"key": "topology.kubernetes.io/zone", "operator": "NotIn", "values": ["a"]}


def test_what_else_runs_is_not_compared_by_order() -> None:
    """Kubernetes has no such rule for pods, and labels of jobs are no numbers."""
    with pytest.raises(JobMistake, match="not compared by order"):
        rendered(ext_ml_anti_affinity={"required": [rule("size", "Gt", "3")]})


def test_selectors_are_labels_of_nodes() -> None:
    """Short labels are translated, others stay; what no label says is looked up among the nodes, or refused."""
    says = {"ext_ml_node_selector": {"region": "eu", "cluster": "a"}, "policy": {"node_selector": {"disk": "ssd"}}}

    assert look(rendered(**says), "POD.spec.nodeSelector") == {
        "disk": "ssd",
        "cluster": "a",
        "topology.kubernetes.io/region": "eu",
    }
    picked = rendered(ext_ml_node_selector={"gpu_type": "nvidia-a100"}, nodes=NODES)
    assert look(picked, NODE_RULE) == {"key": HOSTNAME, "operator": "In", "values": ["old"]}
    with pytest.raises(NodesUnknown):
        rendered(ext_ml_node_selector={"gpu_type": "nvidia-a100"})


@pytest.mark.parametrize(
    ("text", "want"),
    [
        pytest.param("llama-3.1-70b", "llama-3.1-70b", id="as-it-is"),
        pytest.param("", "", id="empty"),
        pytest.param("org/model", "org-model-", id="with-a-slash"),
        pytest.param("x" * 100, "x" * 54 + "-", id="too-long"),
        pytest.param("///", "", id="nothing-that-can-stay"),
    ],
)
def test_any_text_can_be_the_value_of_a_label(text: str, want: str) -> None:
    """What is changed carries a digest, so that two texts never share one value."""
    value = label_value(text)

    assert len(value) <= 63
    assert value.startswith(want)
    assert label_value(text + "/") != value
