"""`atoll gangs`: every gang with its members, what it waits for, and where it runs.

Prints a table or JSON. Read-only; the states are those of `atoll explain`.
"""

from math import inf, isfinite
from typing import Annotated, Any

import typer

from atollctl.cluster_source import SnapshotFile, read_cluster
from atollctl.options import ContextName, Kubeconfig
from atollctl.output import Output, OutputOption, age_text, show_json, show_table

TEXT_LENGTH_MAX = 100


def list_gangs(
    namespace: Annotated[str, typer.Option("-n", "--namespace", help="Only gangs of this namespace.")] = "",
    kubeconfig: Kubeconfig = None,
    context: ContextName = None,
    snapshot: SnapshotFile = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """List gangs: members, state, what they wait for."""
    found = read_cluster(kubeconfig, context, snapshot=snapshot, purpose="list gangs")
    rows = gang_rows(found, namespace)
    if output is Output.JSON:
        show_json(rows)
        return
    if not rows:
        typer.echo(f"no gangs{f' in namespace {namespace}' if namespace else ''}")
        return
    length = None if output is Output.WIDE else TEXT_LENGTH_MAX
    columns = ("GANG", "STATE", "MEMBERS", "READY", "NEEDED", "AGE", "WHERE", "WHY")
    table = [
        (
            row["gang"], row["state"], str(row["members"]), str(row["ready"]), str(row["needed"]),
            age_text(row["ageSeconds"] if row["ageSeconds"] is not None else inf), row["where"][:length],
            row["message"][:length],
        )
        for row in rows
    ]  # fmt: skip
    show_table(columns, table)


def gang_rows(found: Any, namespace: str) -> list[dict[str, Any]]:  # noqa: ANN401 - a ClusterSnapshot
    """Return a row of plain values per gang, sorted by namespace and name."""
    from atoll.api.gangs import GpuGangStatus
    from atoll.cluster.gangs.membership import key_of
    from atoll.explain.decision import index_snapshot
    from atoll.explain.gang_decision import decide_gang, index_gangs
    from atoll.explain.gang_explanation import state_of

    gangs = index_gangs(index_snapshot(found))
    rows = []
    for gang in sorted(found.gangs, key=key_of):
        if namespace and gang.metadata.namespace != namespace:
            continue
        decision, status = decide_gang(gangs, gang), gang.status or GpuGangStatus()
        age = found.age_seconds(gang.metadata.creation_timestamp)
        where = [
            f"{'/'.join(share.values)}: {share.count}"
            for one in (status.assignment.pod_sets if status.assignment is not None else ())
            for share in one.domains
        ]
        rows.append(
            {
                "gang": "/".join(key_of(gang)),
                "state": str(state_of(decision)),
                "reason": decision.reason,
                "message": decision.message,
                "members": len(decision.view.members),
                "ready": status.ready,
                "needed": gang.spec.quorum,
                "admissions": status.admissions,
                "ageSeconds": round(age) if isfinite(age) else None,
                "where": ", ".join(where),
            }
        )
    return rows
