"""deploy/monitoring on a running cluster: Prometheus scrapes every part and answers every query."""

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from atoll.api import names
from devcluster.build import report_to_stderr
from devcluster.installation import HEALTH_PORTS
from devcluster.paths import cache_root
from devcluster.system_programs import find_prometheus
from tests.deploy.api_server import DEPLOY
from tests.e2e.world import RealCluster

pytestmark = pytest.mark.e2e

PORT = 19090
MAY_BE_EMPTY: dict[str, str] = {}
"""Queries of the dashboard that may give nothing on a healthy cluster, and why. None does."""
ASK = """\
import sys, urllib.request, urllib.parse
url = sys.argv[1] + "?" + urllib.parse.urlencode({"query": sys.argv[2]})
print(urllib.request.urlopen(url, timeout=10).read().decode())
"""


@dataclass(frozen=True)
class Prometheus:
    """A Prometheus inside the cluster's network."""

    world: RealCluster

    def ask(self, path: str, query: str = "") -> Any:
        """Return the data of one answer of its API; None while it does not answer."""
        url = f"http://127.0.0.1:{PORT}/api/v1/{path}"
        done = self.world.cluster.run(sys.executable, "-c", ASK, url, query)
        return json.loads(done.stdout)["data"] if done.returncode == 0 else None

    def firing(self) -> set[str]:
        """Return the names of the alerts that fire."""
        alerts = (self.ask("alerts") or {"alerts": []})["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    def values(self, query: str) -> list[float]:
        """Return the numbers that a query gives now; none is left out but those that are no number."""
        answer = self.ask("query", query) or {"result": []}
        return [float(row["value"][1]) for row in answer["result"] if row["value"][1] != "NaN"]


def targets(world: RealCluster) -> list[dict[str, Any]]:
    """Return where every part tells its metrics, with the labels that the rules expect."""
    here = ("extender", "webhook", "controllers")
    found = [{"targets": [f"127.0.0.1:{HEALTH_PORTS[part]}"], "labels": {"component": part}} for part in here]
    agents = [f"{node.ip}:{HEALTH_PORTS['agent']}" for node in world.cluster.nodes]
    return [*found, {"targets": agents, "labels": {"component": "agent"}}]


@pytest.fixture
def prometheus(world: RealCluster, tmp_path: Path) -> Iterator[Prometheus]:
    """A Prometheus with the shipped rules that scrapes every part each second."""
    with serving(world, tmp_path, DEPLOY / "monitoring" / "rules.yaml") as found:
        yield found


@pytest.fixture
def impatient(world: RealCluster, tmp_path: Path) -> Iterator[Prometheus]:
    """The same with alerts that fire at once instead of after minutes."""
    shipped = yaml.safe_load((DEPLOY / "monitoring" / "rules.yaml").read_text())
    for group in shipped["groups"]:
        for rule in group["rules"]:
            rule.pop("for", None)
    rules = tmp_path / "rules.yaml"
    rules.write_text(yaml.safe_dump(shipped))
    with serving(world, tmp_path, rules) as found:
        yield found


@contextmanager
def serving(world: RealCluster, folder: Path, rules: Path) -> Iterator[Prometheus]:
    """A Prometheus with these rules that scrapes every part each second."""
    programs = find_prometheus(cache_root(), report=report_to_stderr)
    configuration = folder / "prometheus.yaml"
    scrape = {"job_name": "atoll", "static_configs": targets(world)}
    every = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    configuration.write_text(yaml.safe_dump({"global": every, "rule_files": [str(rules)], "scrape_configs": [scrape]}))
    flags = (f"--config.file={configuration}", f"--storage.tsdb.path={folder / 'data'}")
    world.cluster.spawn("prometheus", [programs.prometheus, *flags, f"--web.listen-address=127.0.0.1:{PORT}"])
    try:
        yield Prometheus(world)
    finally:
        world.cluster.signal("prometheus", "KILL")
        world.cluster.wait_exit("prometheus")


def dashboard_queries() -> list[str]:
    """Return every query of the shipped dashboard."""
    panels = json.loads((DEPLOY / "monitoring" / "dashboard.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def metric_names(text: str) -> set[str]:
    """Return the names of Atoll's own metrics in an expression; those given by patterns are asked for as queries."""
    return set(re.findall(r'(?<![\w:"])atoll_[a-z_]+', text))


def live(world: RealCluster) -> None:
    """Let things happen: pods that are bound, refused, waiting, released."""
    world.claim("pair", 2)
    world.claim("endless", 64)
    world.claim("unknown", 1, models=["nvidia-unknown"])
    world.pod("unlucky", "unknown")
    world.pod("bound", "pair")
    world.pod("brief", "pair", script="true", restartPolicy="Never")
    world.pod("waiting", "endless")
    refused = world.kubectl("create", "-f", "-", text=json.dumps(world.pod_body("refused", "missing")))
    assert refused.returncode != 0
    world.wait_running("bound")
    world.wait_phase("brief", "Succeeded")
    world.wait_rejected("waiting")
    world.wait_rejected("unlucky")


def test_dashboard_and_rules_find_what_they_ask_for(world: RealCluster, prometheus: Prometheus) -> None:
    """Every part is scraped, every rule evaluates, every query of the dashboard gives data, every name exists."""
    count = len(HEALTH_PORTS) - 1 + len(world.cluster.nodes)
    world.wait(lambda: sum(prometheus.values('up{job="atoll"}')) == count, "every part to be scraped")
    live(world)

    for query in dashboard_queries():
        if query not in MAY_BE_EMPTY:
            world.wait(lambda query=query: prometheus.values(query), f"data of {query}")

    known = set(prometheus.ask("label/__name__/values"))
    groups = world.wait(lambda: (prometheus.ask("rules") or {}).get("groups"), "the rules")
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) > 30
    assert {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"} == {}
    wanted = {
        name for text in [*dashboard_queries(), *(rule["query"] for rule in rules)] for name in metric_names(text)
    }
    # The job service is no part of this cluster; tests of its own read its metrics.
    assert {name for name in wanted - known if not name.startswith("atoll_jobs_")} == set()
    assert prometheus.firing() == set()


def test_numbers_are_those_of_the_cluster(world: RealCluster, prometheus: Prometheus) -> None:
    """GPUs held, the wait and the quality of a bound pod, and a pod that waits show as they are."""
    world.claim("pair", 2)
    world.claim("endless", 64)
    world.pod("bound", "pair")
    world.wait_running("bound")
    world.pod("waiting", "endless")
    world.wait_rejected("waiting")
    total = sum(len(world.report(node.name)["status"]["devices"]) for node in world.cluster.nodes)

    world.wait(lambda: prometheus.values('sum(atoll:gpus{state="bound"})') == [2.0], "two GPUs to be held")
    assert prometheus.values("sum(atoll:gpus)") == [float(total)]
    assert prometheus.values("max(atoll_controllers_leases)") == [2.0]
    world.wait(
        lambda: prometheus.values('max(atoll_controllers_waiting_pods{state="queued"})') == [1.0], "one waiting pod"
    )
    assert max(prometheus.values('atoll_controllers_largest_ask_gpus{policy="island"}')) == 8.0


def test_alerts_fire_and_clear_with_what_happens_to_a_machine(world: RealCluster, impatient: Prometheus) -> None:
    """Its driver is released and taken up; its agent hangs and goes on; its pod is deleted by force under a kubelet
    that hangs and goes on."""
    world.claim("one", 1)
    world.pod("train", "one")
    node = world.wait_running("train")["spec"]["nodeName"]
    agent, kubelet = f"agent@{node}", f"kubelet@{node}"
    label = ("label", "node", node)

    world.cluster.kubectl(*label, f"{names.DRIVER_HOLD}={names.DRIVER_RELEASED}", check=True)
    world.wait(lambda: "AtollDriverReleased" in impatient.firing(), "the alert about the driver")
    world.cluster.kubectl(*label, f"{names.DRIVER_HOLD}-", check=True)
    world.cluster.signal(agent, "STOP")
    world.wait(lambda: "AtollPartDown" in impatient.firing(), "the alert about the agent")
    world.cluster.signal(agent, "CONT")
    world.cluster.signal(kubelet, "STOP")
    world.delete("train", force=True)
    world.wait(lambda: "AtollGpusInDoubt" in impatient.firing(), "the alert about the GPU")
    world.cluster.signal(kubelet, "CONT")

    alerts = {"AtollDriverReleased", "AtollPartDown", "AtollGpusInDoubt"}
    world.wait(lambda: not impatient.firing() & alerts, "every alert to clear")
