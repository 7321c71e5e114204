"""`atoll job`: output and exit status."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from atoll.api import names
from atoll.api.reservations import GpuReservation
from atoll.api.topologies import Topology
from atoll.cluster.objects import Metadata, Node, NodeStatus
from atoll.explain.changes import with_nodes
from atoll.explain.codec import decode_snapshot, encode_snapshot
from atoll.explain.shapes import known_machine
from atoll.explain.snapshot import ClusterSnapshot
from atoll.jobs.notes import Note
from atoll.jobs.settings import RenderSettings
from atoll.jobs.text import manifest_text
from atoll.ml.tables import TPU_TOPOLOGY_LABEL, TPU_TYPE_LABEL
from atollctl.__main__ import app
from tests.jobs.render import rendered
from tests.jobs.test_job_examples import EXAMPLES

SLICE_LEVEL = RenderSettings().slice_level
JOB = "name: work\njob_type: batch\ncontainer: {image: a:1}\n"
GPUS = JOB + "ext_ml_gpu_count: 8\next_ml_gpu_type: nvidia-h100\n"
EMPTY = ClusterSnapshot("2030-01-01T00:00:00Z")


def run(*words: str | Path) -> tuple[int, str, str]:
    """Run the command; return its status, what it printed, and what it complained of."""
    done = CliRunner().invoke(app, ["job", *map(str, words)])
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file for a job."""
    return tmp_path / "job.yaml"


@pytest.fixture
def two_machines(tmp_path: Path) -> Path:
    """A saved cluster of two machines with eight H100 each, all of them free."""
    nodes = [known_machine("dgx-h100", EMPTY, name=f"hopper-{number}") for number in (1, 2)]
    path = tmp_path / "cluster.json"
    path.write_bytes(encode_snapshot(with_nodes(EMPTY, nodes)))
    return path


def test_validate_says_what_a_valid_job_is(file: Path) -> None:
    """One line tells type, pods, GPUs and priority."""
    file.write_text(GPUS + "ext_ml_memory_gb: 512\next_ml_cpu_cores: 64\n")

    assert run("validate", "-f", file) == (0, f"{file}: batch work: 1 pod with 8 GPUs; priority normal\n", "")


def test_validate_says_what_pods_have_where_the_job_says_nothing(file: Path) -> None:
    """Eight GPUs with the memory and the cores of any small job are hardly meant; the rendering says it too."""
    file.write_text(GPUS)
    status, told, _ = run("validate", "-f", file)

    assert status == 0
    assert "ext_ml_memory_gb -> note that the job does not set the memory of each pod, so it is 8Gi" in told
    assert "ext_ml_cpu_cores -> note that the job does not set the cores of each pod, so it has 2" in told
    assert "# ext_ml_memory_gb -> note that" in run("render", "-f", file)[1]

    file.write_text(GPUS + "resources: {memory_limit: 64Gi, cpu_request: 8}\n")
    assert "note that" not in run("validate", "-f", file)[1]


@pytest.mark.parametrize(("name", "word"), [("training.yaml", "a job"), ("chain.yaml", "each of its steps")])
def test_validate_knows_an_envelope_of_attributes(name: str, word: str) -> None:
    """It is no job with ten mistakes: one answer says what it is, and what to write."""
    status, _, told = run("validate", "-f", EXAMPLES.parent / name)

    assert status == 1
    assert told.count("\n") == 1
    assert f"write {word}" in told


def test_validate_names_attribute_value_limit_and_line(file: Path) -> None:
    """Status 1, and everything that is wrong, each where it stands."""
    file.write_text(JOB + "ext_ml_gpu_count: 1000\n")
    status, _, told = run("validate", "-f", file)

    assert status == 1
    assert told == (
        f"{file}: line 4: ext_ml_gpu_count is 1000: may be at most 512; ask for less, or have the bound raised\n"
    )


def test_validate_finds_what_no_object_can_hold(file: Path) -> None:
    """A job that cannot be rendered is not valid, and its field has a line too."""
    file.write_text(JOB + "ext_ml_gpu_count: 16\n")
    status, _, told = run("validate", "-f", file)

    assert status == 1
    assert "line 4: ext_ml_gpu_count is 16: a machine has 8 GPUs at most" in told


def test_a_rule_that_needs_a_cluster_is_valid_and_says_so(file: Path, two_machines: Path) -> None:
    """Nobody has to have a cluster to check a file; to render it, one is asked."""
    file.write_text(
        JOB + "ext_ml_affinity:\n  required:\n  - {key: compute_capability, operator: Gte, values: ['8.0']}\n"
    )

    status, told, _ = run("validate", "-f", file)
    assert status == 0
    assert "valid" in told
    assert run("render", "-f", file)[0] == 1
    status, told, _ = run("render", "-f", file, "--snapshot", two_machines)
    assert status == 0
    assert "hopper-1" in told


def test_what_cannot_be_read_has_status_2(tmp_path: Path) -> None:
    """A missing file is no invalid job."""
    status, _, told = run("validate", "-f", tmp_path / "nothing.yaml")

    assert status == 2
    assert "No such file" in told


def test_render_prints_what_kubectl_applies_and_why(file: Path) -> None:
    """Objects as YAML, with comments that name the attribute; a namespace for those that name none."""
    file.write_text(GPUS)
    status, printed, _ = run("render", "-f", file, "-n", "team")

    assert status == 0
    assert "# ext_ml_gpu_count: 8 -> spec.devices.count 8\n" in printed
    objects = [one for one in yaml.safe_load_all(printed) if one]
    assert [(one["kind"], one["metadata"]["namespace"]) for one in objects] == [("GpuClaim", "team"), ("Job", "team")]
    status, printed, _ = run("render", "-f", file, "-n", "team", "--json")
    assert json.loads(printed)["items"] == objects


def test_no_value_escapes_from_its_comment() -> None:
    """What a user wrote stays on its line of comment, whatever it holds."""
    result = rendered(ext_ml_gpu_count=1)
    notes = tuple(Note("a\nkind: b", "c\u2028d\x1b[0m", one, "e\r\n---\u0085f") for one in ("", "GpuClaim/work"))
    printed = manifest_text(replace(result, notes=notes))

    assert printed.isascii()
    assert "\x1b" not in printed
    assert [one for one in yaml.safe_load_all(printed) if one] == list(result.objects)


def test_settings_of_the_administrator_count(file: Path, tmp_path: Path) -> None:
    """A cluster of larger machines takes what the default refuses; settings that mean nothing are refused."""
    file.write_text(JOB + "ext_ml_gpu_count: 16\n")
    settings = tmp_path / "settings.yaml"
    settings.write_text("gpus_per_pod_max: 16\n")

    assert run("validate", "-f", file, "--settings", settings)[0] == 0
    settings.write_text("gpus_per_pod_max: 16\npriority_classes: {high: urgent}\n")
    assert run("validate", "-f", file, "--settings", settings)[0] == 0
    for text, words in (("- a\n", "must be a mapping"), ("gpus_per_pod_max: 0\n", "line 1: gpus_per_pod_max is 0")):
        settings.write_text(text)
        status, _, told = run("validate", "-f", file, "--settings", settings)
        assert status == 2
        assert words in told
    settings.write_text("gpus_per_pod: 16\n")
    status, _, told = run("validate", "-f", file, "--settings", settings)
    assert status == 2
    assert "gpus_per_pod" in told


def test_explain_says_where_a_job_would_go(file: Path, two_machines: Path) -> None:
    """The answer is that of the placement; a missing PriorityClass is told, and does not hide the rest."""
    file.write_text(GPUS)
    status, told, _ = run("explain", "-f", file, "--snapshot", two_machines)

    assert status == 0
    assert told.startswith(
        "batch work: 1 pod with 8 GPUs; priority normal\n  profile gpu-intensive, flavors gpu-h100\n"
    )
    assert "there is no PriorityClass normal" in told
    assert "hopper-1 GPUs 0,1,2,3,4,5,6,7" in told


@pytest.mark.parametrize("namespaces", [["default"], ["default", "other"]], ids=["one-user", "two-users"])
def test_explain_says_whose_reservation_no_job_releases(file: Path, two_machines: Path, namespaces: list[str]) -> None:
    """A job shortens the reservation of its own team alone; of another one it is told."""
    body = {
        "metadata": {"name": "nightly", "uid": "uid-of-nightly"},
        "spec": {"shape": {"count": 8}, "namespaces": namespaces},
    }
    held = replace(decode_snapshot(two_machines.read_bytes()), reservations=(GpuReservation.model_validate(body),))
    two_machines.write_bytes(encode_snapshot(held))
    file.write_text(GPUS + "ext_ml_reservation_id: nightly\next_ml_reservation_timeout_s: 60\n")

    _, told, _ = run("explain", "-f", file, "--snapshot", two_machines)
    assert ("ext_ml_reservation_timeout_s 60 has no effect" in told) == (len(namespaces) > 1)


def test_explain_places_a_gang_whole_or_says_why_not(two_machines: Path) -> None:
    """Pods that work as one all have places, or the gang is told as a gang."""
    status, told, _ = run("explain", "-f", EXAMPLES / "many-nodes.yaml", "--snapshot", two_machines)

    assert status == 0
    assert "2 of 2 pods fit" in told


def test_explain_says_what_a_job_waits_for(file: Path, two_machines: Path) -> None:
    """Status 1; single pods and gangs are explained in the words of `atoll explain`."""
    file.write_text(GPUS.replace("nvidia-h100", "nvidia-b200"))
    status, told, _ = run("explain", "-f", file, "--snapshot", two_machines)
    assert status == 1
    assert "no GPU of a claimed model" in told

    file.write_text(GPUS.replace("batch", "training").replace(": 8", ": 24") + "workers: 3\n")
    status, told, _ = run("explain", "-f", file, "--snapshot", two_machines)
    assert status == 1
    assert "gang default/work: never" in told
    assert "can start" not in told


def test_explain_leaves_jobs_without_gpus_to_kube_scheduler(two_machines: Path) -> None:
    """Nothing of Atoll's holds them up."""
    status, told, _ = run("explain", "-f", EXAMPLES / "cpu.yaml", "--snapshot", two_machines, "-o", "json")

    assert status == 0
    assert json.loads(told)[0]["fits"] is True


def test_explain_of_a_chart_says_who_knows_its_pods(file: Path, two_machines: Path) -> None:
    """What a chart becomes is Helm's to tell."""
    file.write_text("name: a\njob_type: service\ndeployment_type: helm\nhelm: {chart: b/c}\next_ml_gpu_count: 1\n")
    status, told, _ = run("explain", "-f", file, "--snapshot", two_machines)

    assert status == 0
    assert "helm template" in told
    assert "helm install a b/c" in run("render", "-f", file)[1]


def test_checkpoints_go_where_the_administrator_allows(file: Path, tmp_path: Path) -> None:
    """A place outside of the allowed ones is refused by its name."""
    uri = "ext_ml_checkpoint_enabled: true\next_ml_checkpoint_storage_uri: s3://other/a/\n"
    file.write_text(GPUS.replace("batch", "training") + uri)
    settings = tmp_path / "settings.yaml"
    settings.write_text("checkpoint_prefixes: ['s3://ours/']\n")
    status, _, told = run("validate", "-f", file, "--settings", settings)

    assert run("validate", "-f", file)[0] == 0
    assert status == 1
    assert "ext_ml_checkpoint_storage_uri" in told


@pytest.fixture
def tpu_hosts(tmp_path: Path) -> Path:
    """A saved cluster of four hosts of a v5e slice 4x4, one of which has a model."""
    labels = {TPU_TYPE_LABEL: "tpu-v5-lite-podslice", TPU_TOPOLOGY_LABEL: "4x4", SLICE_LEVEL: "pool"}
    allocatable = {"cpu": "32", "memory": "512Gi", "pods": "110", "google.com/tpu": "4"}
    model = {names.MODELS_LOADED: json.dumps([{"model_id": "t5-xxl", "model_version": "v1.0"}])}
    nodes = [
        Node(Metadata(f"host-{number}", labels=labels | {"kubernetes.io/hostname": f"host-{number}"},
                      annotations=model if number == 2 else {}),
             status=NodeStatus(allocatable=allocatable))
        for number in range(4)
    ]  # fmt: skip
    path = tmp_path / "slice.json"
    levels = {"levels": [{"nodeLabel": SLICE_LEVEL}, {"nodeLabel": "kubernetes.io/hostname"}]}
    slices = Topology.model_validate({"metadata": {"name": "slices"}, "spec": levels})
    path.write_bytes(encode_snapshot(replace(EMPTY, nodes=tuple(nodes), topologies=(slices,))))
    return path


@pytest.mark.parametrize(
    ("text", "settings", "told"),
    [
        ("ext_ml_gpu_count: 8\n", "attribute_bounds: {gpu_count: 4}", "ext_ml_gpu_count is 8: may be at most 4"),
        ("resources: {gpu_count: 8}\n", "attribute_bounds: {gpu_count: 4}", "ext_ml_gpu_count is 8: may be at most 4"),
        ("ext_ml_model_id: ours/a\n", "model_ids: [theirs/*]", "ext_ml_model_id is 'ours/a': must be one of theirs/*"),
        ("model_id: ours/a\n", "model_ids: [theirs/*]", "ext_ml_model_id is 'ours/a': must be one of theirs/*"),
        ("ext_ml_node_selector: {zone: a}\n", "selector_keys: [rack]", "ext_ml_node_selector.zone is 'zone': must be"),
        ("policy: {node_selector: {zone: a}}\n", "selector_keys: [rack]", "policy.node_selector.zone must be"),
        (
            "policy: {node_selector: {zone: a}}\n",
            "forbidden_selector_keys: [zone]",
            "policy.node_selector.zone must be",
        ),
        ("policy: {node_selector: {security_zone: a}}\n", "{}", "policy.node_selector.security_zone must be a label"),
    ],
)
def test_limits_of_the_administrator_hold_wherever_a_job_says_it(
    file: Path, tmp_path: Path, text: str, settings: str, told: str
) -> None:
    """Bounds, models and labels of nodes, in an attribute or in a field of the same meaning."""
    file.write_text(JOB + text)
    (tmp_path / "settings.yaml").write_text(settings)
    status, _, complaint = run("validate", "-f", file, "--settings", tmp_path / "settings.yaml")

    assert status == 1
    assert told in complaint


def test_a_registry_in_the_cluster_is_allowed_by_the_administrator(file: Path, tmp_path: Path) -> None:
    """Otherwise only public hosts are."""
    file.write_text(GPUS + "ext_ml_model_registry_uri: mlflow://registry.svc/model/1\n")
    (tmp_path / "settings.yaml").write_text("registry_hosts: [registry.svc]\n")

    assert run("validate", "-f", file)[0] == 1
    assert run("validate", "-f", file, "--settings", tmp_path / "settings.yaml")[0] == 0


def test_a_bound_of_no_attribute_is_refused(file: Path, tmp_path: Path) -> None:
    """It would bound nothing."""
    file.write_text(JOB)
    (tmp_path / "settings.yaml").write_text("attribute_bounds: {gpus: 4}\n")
    status, _, told = run("validate", "-f", file, "--settings", tmp_path / "settings.yaml")

    assert status != 0
    assert "bounds names gpus" in told


def test_explain_refuses_a_slice_that_no_node_has(file: Path, tpu_hosts: Path) -> None:
    """A shape that no machine has comes by no waiting; a shape that exists may be busy."""
    text = (EXAMPLES / "tpu.yaml").read_text()
    status, told, _ = run("explain", "-f", EXAMPLES / "tpu.yaml", "--snapshot", tpu_hosts)
    assert status == 0
    assert "the nearest to its model first: host-2 (100 points), host-0, host-1, host-3" in told

    file.write_text(text.replace("4x4", "4x8").replace("ext_ml_tpu_chip_count: 16", "ext_ml_tpu_chip_count: 32"))
    status, told, _ = run("explain", "-f", file, "--snapshot", tpu_hosts)
    assert status == 1
    assert "no worker has v5e 4x8; there is v5e 4x4" in told


def test_explain_says_why_no_node_serves_a_job_without_gpus(file: Path, tpu_hosts: Path) -> None:
    """The conditions that Atoll does not place by are told too."""
    file.write_text(JOB + "ext_ml_accelerator: cpu\next_ml_cpu_cores: 64\next_ml_memory_gb: 8\n")
    _, told, _ = run("explain", "-f", file, "--snapshot", tpu_hosts)
    assert "no node serves it: has 32 cores, not 64 (4 nodes)" in told


def test_a_namespace_that_cannot_be_is_refused(file: Path) -> None:
    """As the same value in the document is."""
    file.write_text(JOB)

    status, told, complaint = run("render", "-f", file, "-n", "A b")

    assert (status, told) == (1, "")
    assert complaint.startswith("--namespace 'A b' is no name of a namespace: ")


def test_what_replaces_a_part_of_atoll_is_noted(file: Path) -> None:
    """A variable of the rendezvous, and the command of a model's server."""
    file.write_text(
        "name: work\njob_type: batch\nworkers: 2\ncontainer: {image: a:1, env: [{name: MASTER_PORT, value: '1'}]}\n"
    )
    assert "note that it replaces the value that Atoll would set" in run("render", "-f", file)[1]

    model = "name: work\njob_type: service\ndeployment_type: model\nmodel_id: a/b\next_ml_runtime: vllm\n"
    file.write_text(model + "container: {command: [serve]}\n")
    assert "note that it gets none of the server's arguments" in run("render", "-f", file)[1]
