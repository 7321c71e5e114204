"""Promises of snapshots: the same decisions from a file as from the cluster, nothing private in it."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from typer.testing import CliRunner

from atoll.api.claims import GpuClaim
from atoll.cluster.allocations import OTHER_BYTES_MAX, annotations_bytes
from atoll.explain.codec import SnapshotMistake, decode_snapshot, document_of, encode_snapshot
from atoll.explain.decision import decide, scene_of
from atoll.explain.explanation import explain
from atoll.explain.pseudonyms import disguised
from atoll.explain.wording import explanation_json
from atollctl.__main__ import app
from tests.builders import make_claim, make_pod
from tests.explain.situations import Situation, holder, situation, waiting
from tests.explain.test_proposals_by_force import clusters
from tests.explain.test_situations import SITUATIONS


@pytest.mark.parametrize("found", [told.found for told in SITUATIONS.values()], ids=SITUATIONS.keys())
def test_file_gives_the_same_explanation(found: Situation) -> None:
    """Saved and read again, a snapshot is explained to the letter as before."""
    again = decode_snapshot(encode_snapshot(found.snapshot))
    pod = again.pod(found.pod.metadata.namespace, found.pod.metadata.name)
    assert pod is not None

    before, after = scene_of(found.snapshot), scene_of(again)
    assert explanation_json(explain(after, pod), after, pod) == explanation_json(
        explain(before, found.pod), before, found.pod
    )


@given(clusters())
@settings(max_examples=40, deadline=None)
def test_replaced_names_change_no_decision(found: Situation) -> None:
    """Node by node the same reasons in the same order, and the same GPUs, because numbers keep the order of names."""
    hidden = disguised(found.snapshot)
    pod = hidden.pods[-1]

    before = decide(scene_of(found.snapshot), found.pod, found.claim)
    after = decide(scene_of(hidden), pod, hidden.claim_of(pod))

    assert list(before.closed.values()) == list(after.closed.values())
    assert list(before.verdicts.rejected.values()) == list(after.verdicts.rejected.values())
    assert (before.best is None) == (after.best is None)
    if before.best is not None and after.best is not None:
        assert before.best.choice == after.best.choice


def test_conditions_are_read_again_after_names_were_replaced() -> None:
    """A claim's condition keeps its reason, which is a word of Atoll's, and loses its message, which names pods."""
    told = {"type": "Bound", "status": "True", "reason": "PodsBound", "message": "secret-pod runs"}
    claim = make_claim().model_dump(mode="json", by_alias=True)
    claim["status"] = {"conditions": [{**told, "lastTransitionTime": "2026-01-01T00:00:00Z"}]}
    found = situation({"n1": {}}, [], waiting(1, claim={}))
    snapshot = replace(found.snapshot, claims=(GpuClaim.model_validate(claim),))

    again = decode_snapshot(encode_snapshot(disguised(snapshot)))

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

    hidden = disguised(found.snapshot)
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
    scene = scene_of(hidden)
    assert decide(scene, hidden.pods[-1], hidden.claim_of(hidden.pods[-1])).fits


def test_foreign_annotations_stay_at_home() -> None:
    """What others wrote on a pod is left out; where it is so much that the pod is refused for it, its size stays."""
    small = make_pod("p", annotations={"corp.example/token": "private"})
    large = make_pod("q", annotations={"corp.example/blob": "x" * (OTHER_BYTES_MAX + 5)})
    snapshot = replace(situation({"n1": {}}).snapshot, pods=(small, large))

    read = decode_snapshot(encode_snapshot(snapshot))

    assert "corp.example" not in encode_snapshot(snapshot).decode()
    assert [annotations_bytes(pod.metadata.annotations) for pod in read.pods] == [
        0,
        annotations_bytes(large.metadata.annotations),
    ]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "no JSON"),
        (b"[]", "format is"),
        (b'{"format":"atoll-snapshot/9"}', "atoll-snapshot/9"),
        (b'{"format":"atoll-snapshot/1","pods":[{"spec":7}]}', "cannot be read"),
        (b'{"format":"atoll-snapshot/1","claims":7}', "claims is no list"),
        (b'{"format":"atoll-snapshot/1","claims":[{"spec":{}}]}', "cannot be read"),
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
        (["explain", "pod/none", "-n", "team"], "there is none in namespace team"),
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
