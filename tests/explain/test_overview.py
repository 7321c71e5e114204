"""`atoll top`, `atoll gangs`, `atoll history`: the output matches the cluster."""

from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from atoll.api import names
from atoll.api.node_status import GpuNodeStatus
from atoll.cluster.objects import Metadata
from atoll.explain.codec import encode_snapshot
from atoll.explain.decision import index_snapshot
from atoll.explain.explanation import explain
from atoll.explain.history import NoSuchGpu, RecordedEvent, Regarding, timeline_of
from atoll.explain.overview import QUESTIONS_MAX, overview
from atoll.explain.snapshot import ClusterSnapshot
from atollctl import top
from atollctl.__main__ import app
from atollctl.top import LOAD_PARTS, pause_seconds
from tests.builders import make_pod, report_json
from tests.explain.gang_situations import gang_situation, rack
from tests.explain.situations import Situation, holder, situation, waiting
from tests.explain.test_gangs import SITUATIONS as GANGS


def busy() -> Situation:
    """Two machines: one with holders, a cordoned and a sick card, the other silent; a pod that waits."""
    nodes = {"n1": {"cordoned": (6,), "sick": (7,)}, "n2": {"heard": "2026-01-31T10:00:00Z"}}
    return situation(nodes, [holder("a", "n1", 0, 1), holder("b", "n1", 2)], waiting(4, claim={"policy": "island"}))


def saved(snapshot: ClusterSnapshot, folder: Path) -> str:
    """Write a snapshot; return where."""
    path = folder / "cluster.json"
    path.write_bytes(encode_snapshot(snapshot))
    return str(path)


def test_every_gpu_stands_where_the_ledger_says() -> None:
    """Free are those that a pod could have now; held ones name their holder; the others say why they are not given."""
    found = busy()
    scene = index_snapshot(found.snapshot)

    seen = overview(scene)

    first, second = seen.nodes
    assert {gpu.id: gpu.state for gpu in first.gpus} == {
        0: "held", 1: "held", 2: "held", 3: "free", 4: "free", 5: "free", 6: "cordoned", 7: "quarantined"
    }  # fmt: skip
    assert first.gpus[0].holders == ("team/a",)
    assert (first.is_silent, second.is_silent) == (False, True)
    assert [row.reason for row in seen.waiting] == [explain(scene, found.pod).headline]


def test_a_node_says_why_nothing_is_given_out_there() -> None:
    """The extender's own words: a report of an earlier Node is not an agent that was not heard; and a node that kubelet
    does not call ready is none that kube-scheduler uses."""
    nodes = {
        "n1": {"node_uid": "uid-of-another"},
        "n2": {"heard": "2026-01-31T10:00:00Z", "node": {"ready": "False"}},
        "n3": {"node": {"unschedulable": True}},
    }

    seen = overview(index_snapshot(situation(nodes).snapshot))

    assert [(node.silence, node.closed) for node in seen.nodes] == [
        (names.REJECT_PAST_NODE, ""),
        (names.REJECT_STALE_REPORT, "not ready"),
        ("", "cordoned"),
    ]
    assert [node.is_silent for node in seen.nodes] == [True, True, False]


def test_other_namespaces_stay_unnamed() -> None:
    """With a namespace, who holds a GPU in another one is not told, and neither is what waits there."""
    seen = overview(index_snapshot(busy().snapshot), namespace="other")

    assert {name for node in seen.nodes for gpu in node.gpus for name in gpu.holders} == {"another namespace"}
    assert not seen.waiting


def test_pods_that_ask_the_same_are_decided_once() -> None:
    """A thousand replicas cost one decision, and more questions than the limit are counted but not answered."""
    found = busy()
    alike = [make_pod(f"r{i}", gpus=4) for i in range(50)]
    unlike = [make_pod(f"u{i}", gpus=4, priority=i + 1) for i in range(QUESTIONS_MAX + 5)]
    seen = overview(index_snapshot(replace(found.snapshot, pods=(*alike, *unlike))))

    assert len(seen.waiting) == 50 + QUESTIONS_MAX + 5
    assert sum("not looked at here" in row.reason for row in seen.waiting) == 6
    assert len({row.reason for row in seen.waiting if row.pod.startswith("team/r")}) == 1


def test_top_shows_it_once_and_as_json(tmp_path: Path) -> None:
    """The picture names holders, ill cards and the reason of each waiting pod; JSON has the same for programs."""
    path = saved(busy().snapshot, tmp_path)

    text = CliRunner().invoke(app, ["top", "--once", "--snapshot", path], env={"NO_COLOR": "1"})
    data = CliRunner().invoke(app, ["top", "--snapshot", path, "-o", "json"])

    assert (text.exit_code, data.exit_code) == (0, 0), text.output
    assert "\x1b" not in text.output
    flat = " ".join(text.output.split())
    for word in ("16 GPUs on 2 nodes", "team/a: 0,1", "6! 7!", "n2", "silent", "team/p 4 GPUs", "waits for GPUs"):
        assert word in flat, flat
    answer = msgspec.json.decode(data.output)
    assert (answer["free"], answer["held"], len(answer["waiting"])) == (3, 3, 1)


def test_watching_takes_less_than_a_twentieth_of_a_core() -> None:
    """However long a look takes, the view rests so long that it takes less than 5 % of a core, `refresh` at least."""
    for spent in (0.001, 0.1, 3.0):
        rest = pause_seconds(2.0, spent)
        assert rest >= 2.0
        assert spent / (rest + spent) < 0.05
    assert LOAD_PARTS > 20


def test_live_view_follows_and_outlives_a_cluster_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look after look is drawn; one that fails leaves the last picture and says so, until the next one; Ctrl-C ends."""
    found = busy()
    full = overview(index_snapshot(found.snapshot))
    calm = overview(
        index_snapshot(replace(found.snapshot, pods=found.snapshot.pods[:1], taken_at="2026-01-31T12:05:00Z"))
    )
    looks = iter([calm, OSError("nobody listens"), full])
    rests: list[float] = []

    def look() -> Any:
        told = next(looks, None)
        if told is None:
            raise KeyboardInterrupt
        if isinstance(told, OSError):
            raise told
        return told

    monkeypatch.setattr(top.time, "sleep", rests.append)
    console = Console(file=StringIO(), force_terminal=True, width=200, height=80, color_system=None)
    with pytest.raises(typer.Exit) as ended:
        top.watch(console, full, look, 2.0, is_wide=False)

    pictures = console.file.getvalue().split("16 GPUs on 2 nodes")  # type: ignore[attr-defined]
    waits = ["1 pod waits" in one for one in pictures[1:]]
    assert waits == [True, False, False, True]
    assert "The cluster does not answer: nobody listens. This is how it was at 2026-01-31T12:05:00Z." in pictures[2]
    assert ended.value.exit_code == 0
    assert len(rests) == 4
    assert min(rests) >= 2.0


def test_gangs_are_listed_with_their_state(tmp_path: Path) -> None:
    """Members, state and the reason of each gang; the same words as explain."""
    path = saved(GANGS["others hold half of every rack"].found.snapshot, tmp_path)

    text = CliRunner().invoke(app, ["gangs", "--snapshot", path, "-o", "wide"])
    data = CliRunner().invoke(app, ["gangs", "--snapshot", path, "-n", "team", "-o", "json"])
    none = CliRunner().invoke(app, ["gangs", "--snapshot", path, "-n", "other"])

    assert (text.exit_code, data.exit_code, none.exit_code) == (0, 0, 0), text.output
    assert "fits 1 of 2 pods" in text.output
    (row,) = msgspec.json.decode(data.output)
    assert (row["gang"], row["state"], row["members"], row["needed"]) == ("team/g", "busy", 2, 2)
    assert "no gangs in namespace other" in none.output


ILL = {
    2: {
        "health": {"state": "unhealthy", "reason": "XID 79", "since": "2026-01-31T11:00:00Z"},
        "incidents": [
            {"kind": "xid", "code": 79, "firstTime": "2026-01-31T11:00:00Z", "lastTime": "2026-01-31T11:00:00Z"},
            {"kind": "xid", "code": 63, "firstTime": "2026-01-30T11:00:00Z", "endedTime": "2026-01-30T12:00:00Z",
             "endedBy": "reset"},
        ],
    }
}  # fmt: skip


def told(events: tuple[RecordedEvent, ...] = ()) -> Any:
    """Tell the story of a card that was held, ill, cordoned and declared well."""
    found = situation({"n1": {}}, [holder("a", "n1", 2), holder("done", "n1", 2, phase="Succeeded")])
    report = report_json("n1", devices=ILL, cordoned=(2,))
    words = {"uuid": "GPU-n1-0002", "reason": "tested"}
    report["spec"]["releases"] = [{**words, "time": "2026-01-31T11:30:00Z", "by": "bob"}]
    report["spec"]["cordons"] = [{**words, "by": "alice"}]
    snapshot = replace(found.snapshot, reports=(GpuNodeStatus.model_validate(report),))
    return timeline_of(snapshot, events, "n1", 2)


def test_story_tells_holders_health_and_what_was_said() -> None:
    """In the order of time: incidents and their end, holders, cordons, releases, events of its pods and of the card."""
    ours = RecordedEvent(
        Metadata("e1"), Regarding("Pod", "a", "team", "uid-of-a"), "GpusInDoubt", "no proof", "2026-01-31T12:30Z"
    )
    card = RecordedEvent(
        Metadata("e2"), Regarding("Node", "n1"), "GpuUnhealthy", "GPU n1/2 is ill", "2026-01-31T11:00:01Z"
    )
    other = RecordedEvent(
        Metadata("e3"), Regarding("Pod", "b", "team", "uid-of-b"), "Pulled", "image", "2026-01-31T11:00:01Z"
    )
    story = told((ours, card, other))
    kinds = [entry.kind for entry in story.entries]

    assert {"incident", "incident over", "given", "reserved", "cordoned", "declared well", "health"} <= set(kinds)
    assert {"GpusInDoubt", "GpuUnhealthy"} <= set(kinds)
    assert "Pulled" not in kinds
    said = {entry.kind: (entry.time, entry.text) for entry in story.entries}
    assert said["cordoned"] == ("", "tested (by alice)")
    assert said["declared well"] == ("2026-01-31T11:30:00Z", "tested (by bob)")
    times = [entry.time for entry in story.entries]
    assert times == sorted(times)
    assert (story.holder, story.state) == ("team/a", "cordoned")
    assert any("team/done (Succeeded)" in entry.text for entry in story.entries)


def test_a_card_of_another_number_has_another_story() -> None:
    """Who held the card is told by uuid: a pod with that number on another node, or another card, is not in it."""
    found = situation({"n1": {}, "n2": {}}, [holder("a", "n2", 2), holder("b", "n1", 3)])

    story = timeline_of(found.snapshot, (), "n1", 2)

    assert not story.entries
    with pytest.raises(NoSuchGpu, match="the node has 0, 1"):
        timeline_of(found.snapshot, (), "n1", 99)


def test_a_card_that_left_still_has_its_story() -> None:
    """Taken out of the machine: what was wrong with it, who had it, and that it is gone."""
    found = situation({"n1": {}}, [holder("done", "n1", 2, phase="Succeeded")])
    report = report_json("n1", devices=ILL)
    card = next(one for one in report["status"]["devices"] if one["id"] == 2)
    report["status"]["devices"].remove(card)
    kept = {key: card[key] for key in ("id", "uuid", "model", "incidents")}
    gone = {**kept, "leftTime": "2026-02-01T08:00:00Z", "reason": "the machine was booted without it"}
    report["status"]["departed"] = [gone]
    snapshot = replace(found.snapshot, reports=(GpuNodeStatus.model_validate(report),))

    story = timeline_of(snapshot, (), "n1", 2)

    assert (story.uuid, story.state, story.reason) == ("GPU-n1-0002", "gone", "the machine was booted without it")
    assert {"incident", "given", "left"} <= {entry.kind for entry in story.entries}
    assert story.entries[-1].text == "the machine was booted without it"


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["history", "n1/0"], 0, "given"),
        (["history", "n1/0", "-o", "json"], 0, '"holder": "team/a"'),
        (["history", "n1/77"], 2, "there is no GPU n1/77"),
        (["history", "nonsense"], 2, "write NODE/ID"),
        (["history", "n9/0"], 2, "no agent reports that node"),
    ],
)
def test_history_command(arguments: list[str], status: int, words: str, tmp_path: Path) -> None:
    """Status 0 with a story, 2 with one sentence where there is no such GPU."""
    result = CliRunner().invoke(app, [*arguments, "--snapshot", saved(busy().snapshot, tmp_path)])

    assert result.exit_code == status, result.output
    assert words in result.output


def test_members_of_a_gang_wait_for_what_their_gang_waits_for() -> None:
    """A gated member is told with its gang's condition, not as a pod by itself."""
    status = {
        "conditions": [
            {"type": names.CONDITION_ADMITTED, "status": "False", "reason": "WaitForRoom", "message": "fits 1 of 2",
             "lastTransitionTime": "2026-01-31T11:00:00Z"}
        ]
    }  # fmt: skip
    found = gang_situation({"a1": rack("a")}, status=status)

    reasons = {row.reason for row in overview(index_snapshot(found.snapshot)).waiting}

    assert reasons == {"gang g: WaitForRoom: fits 1 of 2"}
