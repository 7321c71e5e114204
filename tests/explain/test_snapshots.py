"""Snapshots: the same decisions from a file as from the cluster, and no private data in the file."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Any, get_args

import msgspec
import orjson
import pytest
from hypothesis import given, settings
from typer.testing import CliRunner

from atoll.api import names
from atoll.api.base import Model
from atoll.api.claims import GpuClaim
from atoll.api.gangs import GpuGang, GpuGangSpec
from atoll.api.node_status import GpuNodeStatus
from atoll.api.topologies import Topology
from atoll.cluster import pods
from atoll.cluster.allocations import OTHER_BYTES_MAX, pod_annotations_bytes
from atoll.cluster.gangs.membership import members_of
from atoll.cluster.objects import Pod, decode_pod
from atoll.explain.anonymize import PLAIN_FIELDS, anonymize
from atoll.explain.codec import SnapshotMistake, decode_snapshot, document_of, encode_snapshot
from atoll.explain.decision import decide, index_snapshot
from atoll.explain.explanation import explain
from atoll.explain.snapshot import NOW_SECONDS, ClusterSnapshot
from atoll.explain.wording import explanation_json
from atollctl.__main__ import app
from tests.builders import make_claim, make_lease, make_pod, pod_json
from tests.explain.situations import Situation, holder, situation, waiting
from tests.explain.test_proposals_by_force import clusters
from tests.explain.test_situations import SITUATIONS


@pytest.mark.parametrize("found", [told.found for told in SITUATIONS.values()], ids=SITUATIONS.keys())
def test_file_gives_the_same_explanation(found: Situation) -> None:
    """Saved and read again, a snapshot is explained to the letter as before."""
    again = decode_snapshot(encode_snapshot(found.snapshot))
    pod = again.pod(found.pod.metadata.namespace, found.pod.metadata.name)
    assert pod is not None

    before, after = index_snapshot(found.snapshot), index_snapshot(again)
    assert explanation_json(explain(after, pod), after, pod) == explanation_json(
        explain(before, found.pod), before, found.pod
    )


@given(clusters())
@settings(max_examples=40, deadline=None)
def test_replaced_names_change_no_decision(found: Situation) -> None:
    """Node by node the same reasons in the same order, and the same GPUs, because numbers keep the order of names."""
    hidden = anonymize(found.snapshot)
    pod = hidden.pods[-1]

    before = decide(index_snapshot(found.snapshot), found.pod, found.claim)
    after = decide(index_snapshot(hidden), pod, hidden.claim_of(pod))

    assert list(before.closed.values()) == list(after.closed.values())
    assert list(before.verdicts.rejected.values()) == list(after.verdicts.rejected.values())
    assert (before.best is None) == (after.best is None)
    if before.best is not None and after.best is not None:
        assert before.best.choice == after.best.choice


def words_of(model: type[Model]) -> Iterator[tuple[str, str]]:
    """Yield (field, word) for every closed set of words in a custom resource."""
    for name, field in model.model_fields.items():
        open_types: list[Any] = [field.annotation]
        while open_types:
            kind = open_types.pop()
            open_types.extend(get_args(kind))
            if isinstance(kind, type) and issubclass(kind, StrEnum):
                yield from ((field.alias or name, word) for word in kind)
            elif isinstance(kind, type) and issubclass(kind, Model):
                yield from words_of(kind)


RESOURCES: tuple[type[Model], ...] = (GpuClaim, GpuGang, GpuNodeStatus, Topology)
OWN_WORDS = sorted({word for kind in RESOURCES for _, word in words_of(kind)})
KUBERNETES_WORDS = ("True", "False", "Ready", "NoSchedule", "Exists", "In", "Running", "Succeeded", "Never", "TCP")
VALUES = ("0", "1", "4", "8", "-1", "64", "512Gi", "nvidia-v100", "nvidia-v100-sxm2-32gb", "9.0", "3g.20gb", "NV2")


def explained(snapshot: ClusterSnapshot) -> list[object]:
    """Return what is said of the last pod, less the names in it."""
    scene, pod = index_snapshot(snapshot), snapshot.pods[-1]
    told = explain(scene, pod)
    groups = [(group.standing, group.reason, len(group.nodes)) for group in told.groups]
    return [told.state, groups, [(one.kind, one.device_ids) for one in told.help.proposals], told.help.helpless]


@pytest.mark.parametrize("name", sorted(SITUATIONS)[::4])
def test_names_that_are_words_of_others_change_no_decision(name: str) -> None:
    """A pod called island, a label that says 8 or True: words and numbers that mean something elsewhere stay there."""
    found = SITUATIONS[name].found
    words = (*OWN_WORDS, *KUBERNETES_WORDS, *VALUES)
    labels = {f"corp.example/label-{number}": word for number, word in enumerate(words)}
    nodes = tuple(
        msgspec.structs.replace(
            node, metadata=msgspec.structs.replace(node.metadata, labels={**labels, **node.metadata.labels})
        )
        for node in found.snapshot.nodes
    )
    others = tuple(make_pod(word, namespace="policy", phase="Succeeded", gpus=None) for word in words)
    snapshot = replace(found.snapshot, nodes=nodes, pods=(*others, *found.snapshot.pods))

    hidden = anonymize(snapshot)

    assert explained(hidden) == explained(snapshot)
    assert "corp.example" not in encode_snapshot(hidden).decode()


def test_every_closed_set_of_words_is_kept() -> None:
    """No field of a custom resource that takes one of a few words is forgotten."""
    assert {name for kind in RESOURCES for name, _ in words_of(kind)} <= PLAIN_FIELDS


def test_nodes_keep_their_order_whether_a_pod_is_on_them_or_not() -> None:
    """Of nodes that serve alike the first by name is chosen, so idle ones and busy ones are numbered together."""
    found = situation({"a": {}, "b": {}, "c": {}}, [holder("x", "a", 0)])

    hidden = anonymize(found.snapshot)

    assert [node.metadata.name for node in hidden.nodes] == [f"node-{number:06d}" for number in range(3)]
    assert [one.metadata.name for one in hidden.reports] == [node.metadata.name for node in hidden.nodes]


def test_gate_of_atoll_is_still_one() -> None:
    """A member of a gang waits behind the same gate; a gate of others is named by nobody."""
    gates = ({"name": names.GANG_GATE}, {"name": "corp.example/quota"})
    found = situation({"n1": {}}, [], waiting(1, claim={}, schedulingGates=list(gates)))

    hidden = anonymize(found.snapshot)

    first, second = (gate.name for gate in hidden.pods[-1].spec.scheduling_gates)
    assert first == names.GANG_GATE
    assert "corp" not in second


def test_conditions_are_read_again_after_names_were_replaced() -> None:
    """A claim's condition keeps its reason, which is a word of Atoll's, and loses its message, which names pods."""
    told = {"type": "Bound", "status": "True", "reason": "PodsBound", "message": "secret-pod runs"}
    claim = make_claim().model_dump(mode="json", by_alias=True)
    claim["status"] = {"conditions": [{**told, "lastTransitionTime": "2026-01-01T00:00:00Z"}]}
    found = situation({"n1": {}}, [], waiting(1, claim={}))
    snapshot = replace(found.snapshot, claims=(GpuClaim.model_validate(claim),))

    again = decode_snapshot(encode_snapshot(anonymize(snapshot)))

    assert again.claims[0].status is not None
    (condition,) = again.claims[0].status.conditions
    assert (condition.reason, condition.message) == ("PodsBound", "")


def test_no_name_is_left() -> None:
    """Names of nodes, pods, namespaces, claims, labels, uids and uuids are all gone; models and sizes stay."""
    nodes = {
        "secret-node": {
            "cordoned": (1,),
            "node": {
                "labels": {"corp.example/pool": "blue-team"},
                "taints": [{"key": "hush", "value": "quiet", "effect": "NoSchedule"}],
            },
        }
    }
    asking = waiting(
        2,
        claim={},
        uid="uid-private",
        nodeSelector={"corp.example/pool": "blue-team"},
        tolerations=[{"key": "hush", "operator": "Equal", "value": "quiet"}],
        labels={"app": "llama"},
        annotations={"corp.example/note": "private text"},
    )
    found = situation(nodes, [holder("payroll", "secret-node", 0)], asking)

    hidden = anonymize(found.snapshot)
    text = encode_snapshot(hidden).decode()

    for word in (
        "secret",
        "payroll",
        "team",
        "blue",
        "hush",
        "quiet",
        "llama",
        "private",
        "corp",
        "uid-of",
        "GPU-secret",
    ):
        assert word not in text
    assert "nvidia-v100" in text
    scene = index_snapshot(hidden)
    assert decide(scene, hidden.pods[-1], hidden.claim_of(hidden.pods[-1])).fits


WORDS = {
    "containers": ("gpu", "node"),
    "labels": {"batch.kubernetes.io/job-completion-index": "0", "tier": "2", "pool": "cpu", "kind": "healthy"},
}
"""What people call things by, and what means something elsewhere in a snapshot: numbers, fields, resources."""


def test_common_words_as_names_change_no_decision() -> None:
    """A label `2` is no count, a container `gpu` no kind of Lease, a claim `nvlink` no interconnect, a node `7` no GPU:
    the same nodes fit, and the same GPUs are chosen."""
    asked = make_claim("island", count=2, policy="island", interconnect="nvlink")
    pod = make_pod("nvlink", gpus={"gpu": 2}, claim=asked, **WORDS)
    others = [make_pod(name, gpus=1, **WORDS) for name in ("claim", "allocated", "amd", "nvidia", "0", "free")]
    found = situation({"7": {}, "gpu-7": {"profile": "l40s-4"}}, [holder("uuid", "7", 0, 3), holder("1", "gpu-7", 2)])
    snapshot = replace(found.snapshot, pods=(*found.snapshot.pods, *others, pod), claims=(asked,))

    hidden = anonymize(snapshot)

    before = decide(index_snapshot(snapshot), pod, asked)
    after = decide(index_snapshot(hidden), hidden.pods[-1], hidden.claim_of(hidden.pods[-1]))
    assert before.best is not None
    assert after.best is not None
    assert before.best.choice == after.best.choice
    assert list(before.verdicts.rejected.values()) == list(after.verdicts.rejected.values())
    assert [pods.device_count(one) for one in hidden.pods] == [pods.device_count(one) for one in snapshot.pods]
    for old, new in zip(snapshot.pods, hidden.pods, strict=True):
        ours, theirs = index_snapshot(snapshot).ledger, index_snapshot(hidden).ledger
        ids = [ledger.allocation_of(one.metadata.uid) for ledger, one in ((ours, old), (theirs, new))]
        assert ids[0] is None or (ids[1] is not None and ids[0].device_ids == ids[1].device_ids)


def test_members_of_a_gang_keep_their_ranks() -> None:
    """Index labels, and the annotations that rank like them, survive a file and the loss of all names."""
    labels = [{"leaderworkerset.sigs.k8s.io/worker-index": str(3 - number)} for number in range(4)]
    size = {"leaderworkerset.sigs.k8s.io/size": "4", "leaderworkerset.sigs.k8s.io/group-index": "0"}
    members = [
        make_pod(f"m{n}", gpus=1, labels=labels[n], annotations={names.GANG: "g", **size}) for n in range(4)
    ]  # fmt: skip
    snapshot = replace(situation({"n1": {}}).snapshot, pods=tuple(members))
    spec = GpuGangSpec.model_validate({"podSets": [{"name": "all", "count": 4}]})

    def ranks(pods_of: Sequence[Pod]) -> list[int]:
        found = {member.uid: member.rank for member in members_of(pods_of, spec, {})}
        return [found[pod.metadata.uid] for pod in pods_of]

    again = decode_snapshot(encode_snapshot(snapshot))

    assert ranks(members) == ranks(again.pods) == ranks(anonymize(again).pods) == [3, 2, 1, 0]


APPLIED = {"kubectl.kubernetes.io/last-applied-configuration": '{"metadata":{"name":"secret"},"note":"private"}'}


def test_what_kubectl_writes_stays_at_home() -> None:
    """The manifest that `kubectl apply` leaves on every object is a foreign annotation, whatever the kind."""
    found = situation({"n1": {}}, [holder("a", "n1", 0)], waiting(1, claim={}))
    kinds: list[Any] = [*found.snapshot.nodes, *found.snapshot.heartbeats, *found.snapshot.leases]
    nodes, heartbeats, leases = (
        tuple(msgspec.structs.replace(one, metadata=msgspec.structs.replace(
            one.metadata, annotations={**one.metadata.annotations, **APPLIED})) for one in kinds if one in group)
        for group in (found.snapshot.nodes, found.snapshot.heartbeats, found.snapshot.leases)
    )  # fmt: skip
    models = {
        key: tuple(
            one.model_copy(update={"metadata": one.metadata.model_copy(update={"annotations": APPLIED})})
            for one in getattr(found.snapshot, key)
        )
        for key in ("claims", "reports")
    }
    snapshot = replace(found.snapshot, nodes=nodes, heartbeats=heartbeats, leases=leases, **models)

    text = encode_snapshot(snapshot).decode()

    assert "private" not in text
    assert "last-applied" not in text


def test_nothing_that_can_be_called_somehow_is_left() -> None:
    """Resources, schedulers, classes, owners, gangs with odd names, holders and Leases that cannot be read, doubts."""
    owner = {"apiVersion": "secret.example/v1", "kind": "SecretJob", "name": "secret-job", "uid": "u-secret"}
    body = pod_json("secret-pod", gpus=1, annotations={names.GANG: "secret:gang@x/y"}, namespace="secret-space")
    body["metadata"]["ownerReferences"] = [owner]
    body["spec"] |= {"schedulerName": "secret-scheduler", "runtimeClassName": "secret-class"}
    body["spec"]["containers"][0]["resources"]["limits"] |= {"secret.example/fpga": "1"}
    lease = make_lease("secret-node", 1)
    unreadable = msgspec.structs.replace(
        lease,
        metadata=msgspec.structs.replace(lease.metadata, annotations={}),
        spec=msgspec.structs.replace(lease.spec, holder_identity="secret"),
    )
    doubted = make_lease("secret-node", 2)
    marks = {**doubted.metadata.annotations, names.LEASE_IN_DOUBT: "2026-01-31T12:00:00Z secret-pod is gone"}
    doubted = msgspec.structs.replace(doubted, metadata=msgspec.structs.replace(doubted.metadata, annotations=marks))
    found = situation({"secret-node": {"node": {"labels": {"secret.example/rack": "secret-rack"}}}})
    snapshot = replace(found.snapshot, pods=(decode_pod(orjson.dumps(body)),), leases=(unreadable, doubted))

    hidden = anonymize(snapshot)

    assert "secret" not in encode_snapshot(hidden).decode().lower()
    before, after = index_snapshot(snapshot).ledger, index_snapshot(hidden).ledger
    (node,) = after.nodes
    assert before.free("secret-node", now_seconds=NOW_SECONDS) == after.free(node, now_seconds=NOW_SECONDS)


def test_foreign_annotations_stay_at_home() -> None:
    """What others wrote on a pod is left out; where it is so much that the pod is refused for it, its size stays."""
    small = make_pod("p", annotations={"corp.example/token": "private"})
    large = make_pod("q", annotations={"corp.example/blob": "x" * (OTHER_BYTES_MAX + 5)})
    snapshot = replace(situation({"n1": {}}).snapshot, pods=(small, large))

    read = decode_snapshot(encode_snapshot(snapshot))

    assert "corp.example" not in encode_snapshot(snapshot).decode()
    assert [pod_annotations_bytes(pod) for pod in read.pods] == [0, pod_annotations_bytes(large)]
    assert pod_annotations_bytes(large) > OTHER_BYTES_MAX


def test_copies_of_manifests_stay_at_home() -> None:
    """kubectl keeps the whole manifest in an annotation of a claim; neither that nor a node's annotations are saved."""
    note = {"kubectl.kubernetes.io/last-applied-configuration": '{"metadata":{"namespace":"payroll"}}'}
    found = situation({"n1": {}}, [], waiting(1, claim={}))
    claim = make_claim().model_dump(mode="json", by_alias=True)
    claim["metadata"]["annotations"] = note
    (node,) = found.snapshot.nodes
    node = msgspec.structs.replace(node, metadata=msgspec.structs.replace(node.metadata, annotations=note))
    snapshot = replace(found.snapshot, nodes=(node,), claims=(GpuClaim.model_validate(claim),))

    assert b"payroll" not in encode_snapshot(snapshot)
    assert b"payroll" not in encode_snapshot(anonymize(snapshot))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "no JSON"),
        (b"[]", "format is"),
        (b'{"format":"atoll-snapshot/9"}', "atoll-snapshot/9"),
        (b'{"format":"atoll-snapshot/1","pods":[{"spec":7}]}', "cannot be read"),
        (b'{"format":"atoll-snapshot/1","claims":7}', "claims is no list"),
        (b'{"format":"atoll-snapshot/1","claims":[{"spec":{}}]}', "cannot be read"),
        (b'{"format":"atoll-snapshot/1","pastAsks":{"sizes":[[0,1]]}}', "cannot be read"),
        (b'{"format":' + b"[" * 100_000, "no JSON"),
    ],
)
def test_nonsense_is_told(data: bytes, words: str) -> None:
    """A file that is no snapshot is refused with what is wrong."""
    with pytest.raises(SnapshotMistake, match=words.replace("[", r"\[")):
        decode_snapshot(data)


def saved(found: Situation, folder: Path) -> Path:
    """Write the situation's snapshot."""
    path = folder / "cluster.json"
    path.write_bytes(encode_snapshot(found.snapshot))
    return path


def test_command_explains_a_file(tmp_path: Path) -> None:
    """The command answers offline: text by default, JSON for programs, and its status tells whether anything waits."""
    found = situation({"n1": {}}, [holder("a", "n1", *range(8))], waiting(1, claim={}))
    path = str(saved(found, tmp_path))

    text = CliRunner().invoke(app, ["explain", "pod/p", "-n", "team", "--snapshot", path])
    by_claim = CliRunner().invoke(app, ["explain", "claim/c", "-n", "team", "--snapshot", path, "-o", "json"])
    running = CliRunner().invoke(app, ["explain", "pod/a", "-n", "team", "--snapshot", path])

    assert (text.exit_code, by_claim.exit_code, running.exit_code) == (1, 1, 0)
    assert "when team/a ends: then it fits on n1" in " ".join(text.output.split())
    answer = msgspec.json.decode(by_claim.output)[0]
    assert (answer["state"], answer["groups"][0]["nodes"][0]["islands"][0]["held"]) == ("busy", list(range(8)))
    assert "runs on n1 with GPUs 0,1,2" in running.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["explain", "pod/none", "-n", "team"], "there is none in namespace team, and in no other"),
        (["explain", "pod/p"], "there is none in namespace default; there is one in team: choose it by -n"),
        (["explain", "gang/none"], "there is no GpuGang 'none' in namespace default, and in no other"),
        (["explain", "pod/"], "write pod/NAME, gang/NAME or claim/NAME"),
        (["explain", "thing/p"], "write pod/NAME, gang/NAME or claim/NAME"),
    ],
)
def test_command_says_what_it_cannot_answer(arguments: list[str], words: str, tmp_path: Path) -> None:
    """A question about nothing ends with one sentence and status 2."""
    result = CliRunner().invoke(app, [*arguments, "--snapshot", str(saved(situation({"n1": {}}), tmp_path))])

    assert result.exit_code == 2
    assert words in result.output


def test_command_replaces_names_of_a_file(tmp_path: Path) -> None:
    """A snapshot that was taken with names can be given away without."""
    source = saved(situation({"n1": {}}, [holder("payroll", "n1", 0)]), tmp_path)

    result = CliRunner().invoke(app, ["snapshot", str(tmp_path / "b"), "--snapshot", str(source), "--replace-names"])

    assert result.exit_code == 0, result.output
    assert b"payroll" not in (tmp_path / "b").read_bytes()
    assert document_of(decode_snapshot((tmp_path / "b").read_bytes()))["format"] == "atoll-snapshot/1"
