"""Changes to the shipped manifests and configuration of operators whose manager runs outside any pod."""

from pathlib import Path
from types import SimpleNamespace

import yaml

from devcluster import operators
from devcluster.kueue import Kueue

SHIPPED = [
    {"kind": "Namespace", "metadata": {"name": "kueue-system"}},
    {"kind": "Deployment", "metadata": {"name": "kueue-controller-manager"}},
    {"kind": "ConfigMap", "metadata": {"name": "kueue-manager-config"}},
    {"kind": "APIService", "metadata": {"name": "v1beta2.visibility.kueue.x-k8s.io"}},
    {"kind": "Service", "metadata": {"name": "kueue-webhook-service"}, "spec": {"selector": {"a": "b"}, "ports": []}},
    None,
]


def test_everything_is_applied_but_what_the_process_stands_in_for() -> None:
    """Services lose their selector, so that an endpoint of ours can serve them."""
    applied = list(operators.fit_for_a_process(yaml.safe_dump_all(SHIPPED)))

    assert [body["kind"] for body in applied] == ["Namespace", "Service"]
    assert applied[1]["spec"] == {"ports": []}


def test_settings_replace_parts_of_the_configuration(tmp_path: Path) -> None:
    """A test that wants another Kueue says only what differs."""
    layout = SimpleNamespace(folder=tmp_path, network=SimpleNamespace(bridge="10.255.0.1"))
    operator = Kueue(SimpleNamespace(layout=layout))  # type: ignore[arg-type]
    made = operator.configuration({"waitForPodsReady": {"timeout": "5s"}})

    assert made["waitForPodsReady"] == {"timeout": "5s"}
    assert made["webhook"]["certDir"] == str(tmp_path / "kueue")
    assert made["leaderElection"] == {"leaderElect": False}
