"""Metrics: names follow Prometheus' conventions, labels have bounded values, and the reference lists each."""

import re
from pathlib import Path

from prometheus_client import Metric

from atoll.cluster.gpu_stats import MODELS_MAX
from atoll.kube.calls import RESOURCES
from tests.monitoring.conftest import registries

PAGE = Path(__file__).parents[2] / "docs" / "reference.md"
LABELS = {
    "answer": "five answers of the webhook",
    "code": "HTTP statuses and `none`",
    "health": "states of a GPU's health",
    "kind": "watched collections",
    "loop": "loops of the controllers",
    "mig": "MIG profiles in the cluster",
    "model": f"GPU models in the cluster, at most {MODELS_MAX} and `other`",
    "outcome": "a few outcomes of each decision",
    "phase": "phases of a machine's life",
    "policy": "four policies of claims",
    "proof": "six proofs of a pod's end",
    "reason": "constant texts and words of the reference",
    "resource": f"{len(RESOURCES)} resources, four subresources and `other`",
    "source": "three sources of a claim",
    "state": "states of a GPU, or of a waiting pod",
    "use": "seven uses of a GPU's time",
    "verb": "verbs of the API, or of kube-scheduler's calls",
}
"""Every label that a metric may have, and why its values are bounded."""
NOT_OURS = re.compile(r"atoll_[a-z]+_process_")


def label_names() -> dict[str, tuple[str, ...]]:
    """Return the labels of each metric by its name in the registry."""
    return {
        collector._name: tuple(collector._labelnames)
        for metrics in registries()
        for collector in list(metrics.registry._collector_to_names)
        if hasattr(collector, "_labelnames")
    }


def rows(families: dict[str, Metric]) -> list[str]:
    """Return the rows of the reference that the code makes; what every part tells alike has one."""
    labels, told = label_names(), {}
    for name, family in families.items():
        if NOT_OURS.match(name):
            continue
        part, _, rest = name.removeprefix("atoll_").partition("_")
        shared = sum(f"atoll_{other}_{rest}" in families for other in ("extender", "webhook", "agent", "controllers"))
        shown = f"atoll_PART_{rest}" if shared == 4 else f"atoll_{part}_{rest}"
        words = ", ".join(f"`{label}`" for label in labels.get(family.name, ()))
        told[shown] = f"| `{shown}` | {family.type} | {words} | {family.documentation} |"
    return [told[name] for name in sorted(told)]


def test_labels_are_known_to_be_bounded() -> None:
    """No metric has a label for pods, nodes, uids or texts of others; whoever adds one must say why it is bounded."""
    used = {label for labels in label_names().values() for label in labels}

    assert used == set(LABELS)


def test_names_follow_the_conventions(families: dict[str, Metric]) -> None:
    """Lower-case words with the part first and the unit last; seconds, never milliseconds; counters end with _total."""
    for name, family in families.items():
        assert re.fullmatch(r"atoll_(extender|webhook|agent|controllers|jobs)_[a-z][a-z_]*[a-z]", name)
        assert not re.search(r"_(ms|millis|milliseconds|minutes|mb|kb|percent)(_|$)", name)
        assert family.documentation
        assert (family.type == "counter") == name.endswith("_total")


def test_every_metric_is_in_the_reference(families: dict[str, Metric]) -> None:
    """The table of the page is the one that the code makes."""
    section = PAGE.read_text(encoding="utf-8").partition("## Metrics\n")[2].partition("\n## ")[0]
    told = [line for line in section.splitlines() if line.startswith("| `atoll_")]

    assert told == rows(families), "the table should read:\n" + "\n".join(rows(families))


def test_every_label_is_in_the_reference() -> None:
    """The page says of each label where its values come from."""
    section = PAGE.read_text(encoding="utf-8").partition("## Metrics\n")[2].partition("\n## ")[0]
    for label, why in LABELS.items():
        assert f"| `{label}` | {why} |" in section
