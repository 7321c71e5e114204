"""deploy/monitoring: promtool accepts the rules, alerts fire or stay quiet as tested, and the docs explain each."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import Metric

from devcluster.build import report_to_stderr
from devcluster.paths import cache_root
from devcluster.system_programs import find_prometheus

REPOSITORY = Path(__file__).parents[2]
MONITORING = REPOSITORY / "deploy" / "monitoring"
CASES = Path(__file__).parent / "alerts"
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((MONITORING / "rules.yaml").read_text())["groups"] for rule in group["rules"]
]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
DASHBOARD = json.loads((MONITORING / "dashboard.json").read_text())
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
OPERATIONS = (REPOSITORY / "docs" / "operations.md").read_text(encoding="utf-8")


def promtool(*arguments: str | Path) -> str:
    """Run promtool; fail with what it says."""
    tool = find_prometheus(cache_root(), report=report_to_stderr).promtool
    done = subprocess.run([tool, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_rules_are_accepted() -> None:
    """promtool reads every rule."""
    assert f"{len(RULES)} rules found" in promtool("check", "rules", MONITORING / "rules.yaml")


def test_every_alert_fires_when_it_should_and_clears() -> None:
    """Each alert has a file with a story in which it fires, word for word, and later clears, and one in which it stays
    quiet."""
    files = sorted(CASES.glob("*.yaml"))
    assert {file.stem for file in files} == set(ALERTS)
    for file in files:
        stories = [test["alert_rule_test"] for test in yaml.safe_load(file.read_text())["tests"]]
        asked = [case for story in stories for case in story]
        assert {case["alertname"] for case in asked} == {file.stem}
        assert [bool(case.get("exp_alerts")) for case in stories[0]] == [True, False]
        assert [bool(case.get("exp_alerts")) for case in stories[-1]] == [False]

    assert promtool("test", "rules", *files).count("SUCCESS") == len(files)


FORM = r"\*\*Means\.\*\* \w.*\n\n\*\*Check\.\*\*\n\n(<!-- .* -->\n)?```sh\n\w.*```\n\n\*\*Cure\.\*\* \S"


def test_every_alert_is_explained() -> None:
    """Operations has a section per alert with meaning, check and cure, and none for an alert that is gone."""
    section = OPERATIONS.partition("## Alerts\n")[2].partition("\n## ")[0]
    told = dict(re.findall(r"^### (\w+)\n(.*?)(?=^### |\Z)", section, re.MULTILINE | re.DOTALL))

    assert set(told) == set(ALERTS)
    for name, text in told.items():
        assert re.search(FORM, text, re.DOTALL), name


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_says_how_bad_it_is_and_where_to_read_on(name: str) -> None:
    """Severity, a summary for a pager, and the section of the page."""
    alert = ALERTS[name]

    assert alert["labels"]["severity"] in {"critical", "warning", "info"}
    assert 20 < len(alert["annotations"]["summary"]) < 140
    assert alert["annotations"]["runbook"] == f"docs/operations.md#{name.lower()}"


@pytest.mark.parametrize("query", [*QUERIES, *(rule["expr"] for rule in RULES)])
def test_queries_ask_for_what_exists(query: str, families: dict[str, Metric]) -> None:
    """Every metric that a rule or a panel names is told by a part or recorded by a rule."""
    known = set(families) | RECORDED
    for name, family in families.items():
        if family.type == "histogram":
            known |= {f"{name}{suffix}" for suffix in ("_bucket", "_sum", "_count")}
    patterns = re.findall(r'__name__=~"([^"]+)"', query)
    plain = re.sub(r'"[^"]*"', "", query)

    assert set(re.findall(r"\batoll[_:][a-z_:0-9]+", plain)) <= known
    assert all(any(re.fullmatch(pattern, name) for name in known) for pattern in patterns)


def test_dashboard_can_be_imported() -> None:
    """Panels have ids and places of their own, a title and queries; the data source is chosen at the import."""
    panels = DASHBOARD["panels"]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]

    assert len({panel["id"] for panel in panels}) == len(set(places)) == len(panels)
    assert all(panel["title"] and panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)
    assert all(panel["type"] == "row" or panel["targets"] for panel in panels)
    assert {target["datasource"]["uid"] for p in panels for target in p.get("targets", ())} == {"${datasource}"}


def test_dashboard_speaks_promql(tmp_path: Path) -> None:
    """promtool reads every query; that each has data on a running cluster is shown in tests/e2e/test_monitoring.py."""
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(QUERIES)]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))

    assert f"{len(QUERIES)} rules found" in promtool("check", "rules", file)


def test_monitors_choose_the_parts_and_name_them() -> None:
    """The monitor selects the label and the port that the pods of every part have."""
    monitor = yaml.safe_load((MONITORING / "pod-monitors.yaml").read_text())["spec"]
    deployed = [
        document
        for file in ("agent.yaml", "controllers.yaml", "webhook-deployment.yaml", "scheduler/deployment.yaml")
        for document in yaml.safe_load_all((REPOSITORY / "deploy" / file).read_text())
        if document["kind"] in {"DaemonSet", "Deployment"}
    ]
    (endpoint,) = monitor["podMetricsEndpoints"]

    assert len(deployed) == 4
    for owner in deployed:
        template = owner["spec"]["template"]
        assert monitor["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        assert owner["metadata"]["namespace"] in monitor["namespaceSelector"]["matchNames"]
        ports = [port["name"] for container in template["spec"]["containers"] for port in container.get("ports", ())]
        assert ports.count(endpoint["port"]) == 1
