"""Real nodes of one cluster: numbers them, starts them in parallel, finds them by name.

The record on disk is written before anything else of a node, so a sweep of a killed cluster finds everything.
node_runner.py has the steps of one node.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from devcluster import state
from devcluster.api import AdminApi
from devcluster.build import Binaries, Report
from devcluster.certificates import CertificateAuthority
from devcluster.control import Control
from devcluster.control_plane import Layout
from devcluster.errors import ClusterStateError
from devcluster.images import ensure_images
from devcluster.node import NODES_MAX, DevNodeSpec
from devcluster.node_runner import NodeRunner
from devcluster.paths import cache_root
from devcluster.state import NodeRecord
from devcluster.system_programs import find_system_programs

_SIDE_BY_SIDE_MAX = 8


class RealNodes:
    """Real nodes of one cluster."""

    def __init__(self, cluster: str, layout: Layout, *, control: Control, api: AdminApi) -> None:
        """Work through the cluster's supervisor and API server."""
        self._cluster = cluster
        self._layout = layout
        self._control = control
        self._api = api

    @property
    def records(self) -> tuple[NodeRecord, ...]:
        """All nodes in the order they were added, including stopped ones."""
        return state.read_record(self._layout.folder).nodes

    def find(self, name: str) -> NodeRecord:
        """Return one node's record. Raises ClusterStateError with the names that exist."""
        for record in self.records:
            if record.name == name:
                return record
        names = ", ".join(record.name for record in self.records) or "none"
        raise ClusterStateError(f"no node {name!r} in cluster {self._cluster!r}; there are: {names}")

    def runner(self, binaries: Binaries) -> NodeRunner:
        """Return the runner of single nodes with these programs."""
        return NodeRunner(self._cluster, self._layout, control=self._control, api=self._api, binaries=binaries)

    def prepare(
        self, specs: Sequence[DevNodeSpec], *, binaries: Binaries, authority: CertificateAuthority, report: Report
    ) -> list[NodeRecord]:
        """Prepare nodes as far as possible without an API server. Raises ClusterStateError for bad or used names."""
        if not specs:
            return []
        records = self._enlist(specs)
        cache = cache_root()
        system = find_system_programs(cache, report=report)
        images = ensure_images(
            cache,
            pause=binaries["pause"],
            busybox=system.busybox,
            flock=binaries["flock"],
            cuda=any(record.nvidia for record in records),
        )
        runner = self.runner(binaries)
        with ThreadPoolExecutor(max_workers=min(_SIDE_BY_SIDE_MAX, len(records))) as pool:
            steps = [
                pool.submit(runner.prepare, record, authority=authority, system=system, images=images)
                for record in records
            ]
            for step in steps:
                step.result()
        return records

    def start_kubelets(self, records: Sequence[NodeRecord], *, binaries: Binaries) -> None:
        """Start the kubelets of prepared nodes and wait until all accept pods."""
        runner = self.runner(binaries)
        for record in records:
            runner.start_kubelet(record)
        for record in records:
            runner.wait_answering(record.name)
            runner.wait_ready(record.name)

    def _enlist(self, specs: Sequence[DevNodeSpec]) -> list[NodeRecord]:
        nodes = {record.name: record for record in self.records}
        running = self._control.status()
        for spec in specs:
            state.check_name(spec.name, what="node")
            holder = running.get(f"node@{spec.name}")
            if holder and holder.running:
                raise ClusterStateError(f"node {spec.name!r} runs already in cluster {self._cluster!r}")
            number = nodes[spec.name].number if spec.name in nodes else len(nodes)
            if number >= NODES_MAX:
                raise ClusterStateError(f"a cluster has at most {NODES_MAX} real nodes; use fake ones for more")
            nodes[spec.name] = spec.numbered(number)
        if len({spec.name for spec in specs}) < len(specs):
            raise ClusterStateError(f"two nodes share a name: {', '.join(spec.name for spec in specs)}")
        record = replace(state.read_record(self._layout.folder), nodes=tuple(nodes.values()))
        state.write_record(self._layout.folder, record)
        return [nodes[spec.name] for spec in specs]
