"""Topology: levels of a cluster's machines, by node labels and NVLink fabric cliques.

Cluster-scoped, written by administrators. `atoll.cluster.gangs` applies the levels to nodes.
"""

from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator

from atoll.api.base import Conditions, Model, ObjectMeta, ShortText, list_map, rules

LEVELS_MAX = 8
LABEL_KEY = (
    "^(([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)(\\.[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)*/)?"
    "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
)
"""A qualified name: an optional DNS subdomain and a slash, then up to 63 characters."""

NodeLabel = Annotated[str, Field(min_length=1, max_length=316, pattern=LABEL_KEY)]


class TopologyLevel(Model):
    """One level. Nodes with one value of the label, below one domain of the level above, are one domain."""

    node_label: Annotated[
        NodeLabel,
        Field(
            description="key of a node label; gpu.scheduling/fabric-clique means the NVLink fabric clique that the "
            "nodes' agents report, without a label"
        ),
    ]


HOSTNAME = "kubernetes.io/hostname"
TOPOLOGY_RULES = (
    (
        (
            f"!self.levels.exists(l, l.nodeLabel == '{HOSTNAME}') || "
            f"self.levels[self.levels.size() - 1].nodeLabel == '{HOSTNAME}'"
        ),
        f"{HOSTNAME} can only be the last level: no domain lies inside a host",
    ),
    (
        "!has(self.spares) || self.levels.exists(l, l.nodeLabel == self.spares.level)",
        "spares names a level that stands in levels",
    ),
)


class Spares(Model):
    """Spare whole machines for failures, in every domain of a level."""

    level: Annotated[NodeLabel, Field(description="a nodeLabel of levels, for example that of the fabric clique")]
    count: Annotated[int, Field(ge=1, le=1024, description="machines per domain")]


class TopologySpec(Model):
    """Nodes that the topology covers, and its levels from the widest to the narrowest."""

    model_config = ConfigDict(json_schema_extra=rules(*TOPOLOGY_RULES))

    node_selector: Annotated[
        dict[str, Annotated[str, Field(max_length=63)]],
        Field(
            default_factory=dict,
            max_length=16,
            description="labels of the nodes that the topology covers; empty covers all",
        ),
    ]
    levels: Annotated[
        tuple[TopologyLevel, ...],
        Field(
            min_length=1,
            max_length=LEVELS_MAX,
            description="widest first, for example block, rack, kubernetes.io/hostname",
            json_schema_extra=list_map("nodeLabel"),
        ),
    ]

    spares: Annotated[
        Spares | None,
        Field(description="gangs use these last: only if they could not be placed as near otherwise, and for repairs"),
    ] = None

    @model_validator(mode="after")
    def check(self) -> Self:
        """Refuse a repeated level, and spares of an unknown one, as the API server does."""
        labels = [level.node_label for level in self.levels]
        if len(set(labels)) < len(labels):
            msg = "levels names one node label twice; each may stand once"
            raise ValueError(msg)
        if HOSTNAME in labels[:-1]:
            raise ValueError(TOPOLOGY_RULES[0][1])
        if self.spares is not None and self.spares.level not in labels:
            raise ValueError(TOPOLOGY_RULES[1][1])
        return self

    @property
    def labels(self) -> tuple[str, ...]:
        """The node labels, widest level first."""
        return tuple(level.node_label for level in self.levels)


class TopologyStatus(Model):
    """Result of the levels on the existing nodes."""

    nodes: Annotated[int, Field(ge=0, description="nodes that the selector covers")] = 0
    outside: Annotated[int, Field(ge=0, description="covered nodes that lack a level and are in no domain")] = 0
    conditions: Conditions = ()


class Topology(Model):
    """A Topology as the API server stores it."""

    api_version: ShortText = "gpu.scheduling/v1"
    kind: ShortText = "Topology"
    metadata: ObjectMeta
    spec: TopologySpec
    status: TopologyStatus | None = None
