"""Renders Atoll's Helm chart and the plain manifests with the real Helm.

Files in deploy/ that depend on values are rendered from the chart, for `kubectl apply -k deploy`. The chart links to
all other files in deploy/.

`python -m devcluster.chart` writes the files; `--check` lists stale ones; `--package FOLDER` creates an archive for
`helm install`.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from devcluster.build import Report, ensure_helm, report_to_stderr
from devcluster.errors import BuildError
from devcluster.paths import cache_root
from devcluster.programs import DEFAULT_KUBERNETES

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
CHART = DEPLOY / "chart"
RELEASE = "atoll"
NAMESPACE = "atoll-system"
RENDERED = (
    "agent.yaml",
    "controllers.yaml",
    "network-policies.yaml",
    "runtimeclass.yaml",
    "scheduler/deployment.yaml",
    "webhook-deployment.yaml",
    "webhook.yaml",
)
"""Templates that are rendered into deploy/ under the same name."""
CONFIGURATIONS: Mapping[str, Sequence[str]] = {
    "scheduler/config.yaml": (),
    "scheduler/config-tainted-nodes.yaml": ("scheduler.servesDefaultProfile=false",),
}
"""Files of kube-scheduler's configuration, with the values for each."""

_PLAIN = CHART / "values-plain.yaml"
_SOURCE = re.compile(r"\A# Source: atoll/templates/(\S+)\n")
_NOTE = "# Rendered from deploy/chart by `make manifests`: change it there.\n"


def helm(
    *arguments: str | Path, kubeconfig: Path | None = None, report: Report = report_to_stderr
) -> subprocess.CompletedProcess[str]:
    """Run Helm without the user's own settings; build it if missing. Raises BuildError."""
    program = ensure_helm(report=report)
    home = cache_root() / "helm-home"
    folders = {f"HELM_{kind}_HOME": str(home / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")}
    foreign = {name for name in os.environ if name.startswith("HELM_")}
    environment = {name: value for name, value in os.environ.items() if name not in foreign} | folders
    environment["KUBECONFIG"] = str(kubeconfig or os.devnull)
    return subprocess.run(
        [program, *arguments], env=environment, capture_output=True, text=True, check=False
    )  # fmt: skip


def render(*arguments: str | Path, kubernetes: str = DEFAULT_KUBERNETES, report: Report = report_to_stderr) -> str:
    """Render the chart for a version of Kubernetes. Raises BuildError with Helm's message."""
    done = helm(
        "template", RELEASE, CHART, "--namespace", NAMESPACE, "--kube-version", kubernetes, *arguments, report=report
    )
    if done.returncode != 0:
        raise BuildError(f"cannot render {CHART.name}: {done.stderr.strip()[-1500:]}")
    return done.stdout


def documents(rendered: str) -> list[str]:
    """Split Helm's output into documents, each starting with its `# Source:` line."""
    return [text.strip("\n") + "\n" for text in re.split(r"^---\n", rendered, flags=re.MULTILINE) if text.strip()]


def plain_manifests(*, report: Report = report_to_stderr) -> dict[str, str]:
    """Wanted content of the rendered files, by path below deploy/. Raises BuildError."""
    everything = documents(render("--values", _PLAIN, report=report))
    files = {name: _file(name, everything) for name in RENDERED}
    for name, values in CONFIGURATIONS.items():
        words = [word for value in values for word in ("--set", value)]
        shown = ("--show-only", "templates/scheduler/configuration.yaml")
        config_map = yaml.safe_load(render("--values", _PLAIN, *words, *shown, report=report))
        files[name] = _NOTE + config_map["data"]["config.yaml"]
    return files


def _file(name: str, everything: Sequence[str]) -> str:
    """Join the documents of one template with the PodDisruptionBudget last; Helm sorts by kind."""
    bodies = [_SOURCE.sub("", text) for text in everything if (found := _SOURCE.match(text)) and found.group(1) == name]
    if not bodies:
        raise BuildError(f"{CHART.name} renders nothing from templates/{name}")
    bodies.sort(key=lambda body: "\nkind: PodDisruptionBudget\n" in body)
    return _NOTE + "---\n".join(bodies)


def package(folder: Path, *words: str, report: Report = report_to_stderr) -> Path:
    """Package the chart, for example with `--version 0.2.0`. Raises BuildError with Helm's message."""
    done = helm("package", CHART, "--destination", folder, *words, report=report)
    found = re.search(r"saved it to: (.+)", done.stdout)
    if done.returncode != 0 or found is None:
        raise BuildError(f"cannot package {CHART.name}: {(done.stderr or done.stdout).strip()[-1500:]}")
    return Path(found.group(1))


def main(arguments: Sequence[str]) -> int:
    """Write the rendered files, list stale ones, or package the chart; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m devcluster.chart", description="Atoll's Helm chart.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a plain manifest is stale")
    parser.add_argument("--package", type=Path, metavar="FOLDER", help="write only the chart's archive")
    options = parser.parse_args(arguments)
    try:
        if options.package:
            sys.stdout.write(f"{package(options.package)}\n")
            return 0
        wanted = plain_manifests()
    except BuildError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    stale = [name for name, text in wanted.items() if _text_of(DEPLOY / name) != text]
    for name in stale:
        if options.check:
            sys.stderr.write(f"deploy/{name} differs from what deploy/chart renders: run make manifests\n")
        else:
            (DEPLOY / name).write_text(wanted[name], encoding="utf-8")
    return 1 if stale and options.check else 0


def _text_of(file: Path) -> str | None:
    return file.read_text(encoding="utf-8") if file.exists() else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
