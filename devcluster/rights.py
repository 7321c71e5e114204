"""Writes docs/rights.md: every verb that a role grants to a part of Atoll, and the function that needs it.

`python -m devcluster.rights` writes the page from the roles in deploy/rbac/ and from the source code; `--check` fails
if it is stale. A verb that no function needs is an error, so that no right outlives its use.

A function needs a verb on a resource if it builds the resource's path (`atoll.kube.paths`), itself or through a helper
of its module, and passes it to the client's method of that verb, at once or by a variable. Tables of kinds count too.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import yaml

from atoll.api import names
from atoll.kube import paths

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = ROOT / "docs" / "rights.md"
PACKAGES: Final = {
    "atoll-agent": ("agent",),
    "atoll-controllers": ("controllers", "atoll/kube"),
    "atoll-jobs": ("jobs", "atoll/kube"),
    "atoll-scheduler": ("extender", "atoll/kube"),
    "atoll-webhook": ("webhook", "atoll/kube"),
}
"""Where the code of each account is, by the beginning of its roles' names; first those whose code is meant first."""
ELSEWHERE: Final = {
    ("nodes/pods", "get"): ("agent/kubelet.py", "fetch"),
    ("leases.coordination.k8s.io", "update"): ("deploy/scheduler/config.yaml", "leaderElection"),
    ("atoll-jobs in atoll-system", "get"): ("atoll/kube/election.py", "LeaderElector._try_acquire"),
    ("atoll-jobs in atoll-system", "patch"): ("atoll/kube/election.py", "LeaderElector._write"),
    ("jobs.batch", "watch"): ("jobs/following.py", "JobFollower.__init__"),
    ("deployments.apps", "watch"): ("jobs/following.py", "JobFollower.__init__"),
    ("workloads.kueue.x-k8s.io", "list"): ("jobs/cluster.py", "JobCluster._quota"),
    ("pods/exec", "get"): ("jobs/pod_exec.py", "PodExec._connected"),
    ("pods/exec", "create"): ("jobs/pod_exec.py", "PodExec._connected"),
    ("pods/log", "get"): ("jobs/pod_logs.py", "PodLogs.read"),
}
"""By resource or role, and verb: what the API server checks for others, the kubelet for its own door and
kube-scheduler's leader election; and calls that show no path or no method, such as streams."""
TABLES: Final = {
    "jobs/cluster.py": ("JobCluster", ("get", "list", "create", "delete")),
    "jobs/queue_cluster.py": ("QueueCluster", ("list", "create", "patch", "delete")),
}
"""Classes that do all of that to each kind of their module's table of kinds."""
JOBS: Final = ROOT / "deploy" / "chart" / "templates" / "jobs-rights.yaml"
"""The roles of the job service, which only the chart has."""
METHODS: Final = {name: {name} for name in ("get", "list", "create", "patch", "delete")}
"""Verbs by the method of a client."""
FUNCTIONS: Final = {"read_live": {"get"}, "watch": {"list", "watch"}, "Reflector": {"list", "watch"}}
TEXTS: Final = {"POST": {"create"}, "PATCH": {"patch"}, "DELETE": {"delete"}, "GET": {"get"}}
TEXT: Final = """# Rights

Every verb that a role grants to a part of Atoll, and a function that needs it. `python -m devcluster.rights` generates
the table from the roles in `deploy/rbac/`, that of the job service in the chart, and the source code. It fails for a
verb that no function needs, so that no right outlives its use. Not listed: Kubernetes' own roles of a scheduler, which
kube-scheduler needs, and the roles for [people](security.md#identities).

| Role | Resource | Verbs | File | Function |
|---|---|---|---|---|
"""
_PATH: Final = re.compile(r"/(?:api/v1|apis/([^/]+)/[^/]+)(?:/namespaces/[^/]+)?/([^/]+)(?:/[^/]+(?:/([^/]+))?)?")


Function = ast.FunctionDef | ast.AsyncFunctionDef


class UnneededRight(Exception):
    """A role grants what no function needs."""


@dataclass(frozen=True, slots=True, order=True)
class Grant:
    """One verb of a role. resource: as in NAME.GROUP/SUBRESOURCE."""

    role: str
    resource: str
    verb: str


@dataclass(frozen=True, slots=True)
class Use:
    """A function that needs a verb."""

    file: str
    function: str
    resource: str
    verb: str


def grants(roles: Path = ROOT / "deploy" / "rbac") -> list[Grant]:
    """Return what the roles grant to parts of Atoll, in the order of the files."""
    texts = [*(path.read_text() for path in sorted(roles.glob("*.yaml"))), _with_all_values(JOBS.read_text())]
    objects = [body for text in texts for body in yaml.safe_load_all(text)]

    def identity(body: dict[str, Any], name: str, kind: str) -> tuple[str, str, str]:
        return kind, name, body["metadata"].get("namespace", "")

    bound = {
        identity(body, body["roleRef"]["name"], body["roleRef"]["kind"])
        for body in objects
        if body["kind"].endswith("Binding")
    }
    found = []
    for body in objects:
        kind, name, namespace = identity(body, body["metadata"]["name"], body["kind"])
        if (kind, name, namespace) not in bound:
            continue
        role = f"{name} in {namespace}" if namespace else name
        found += [
            Grant(role, _named(group, *resource.partition("/")[::2]), verb)
            for rule in body["rules"]
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        ]
    return found


def _with_all_values(template: str) -> str:
    """Return a template of the chart with every part that a value turns on, and without the values."""
    return "".join(line for line in template.splitlines(keepends=True) if "{{" not in line)


def uses(folder: Path, *, root: Path = ROOT) -> Iterator[Use]:
    """Yield what the functions of a package need."""
    for file in sorted(folder.rglob("*.py")):
        module = _Module(ast.parse(file.read_text(encoding="utf-8")))
        for function, resource, verb in module.uses():
            yield Use(str(file.relative_to(root)), function, resource, verb)
    for name, (function, verbs) in TABLES.items():
        if folder == root / Path(name).parent:
            for resource in _listed((root / name).read_text(encoding="utf-8")):
                yield from (Use(name, function, resource, verb) for verb in verbs)


def _listed(module: str) -> Iterator[str]:
    """Yield the resources of a module's table {kind: (version of the API, plural)}."""
    known = {"names.API_VERSION": names.API_VERSION, "KUEUE_API": "kueue.x-k8s.io/v1beta2"}
    for version, plural in re.findall(r'"\w+": \(("?[\w./-]+"?), "(\w+)"\)', module):
        group, _, rest = known.get(version, version.strip('"')).partition("/")
        yield _named(group if rest else "", plural, "")


class _Module:
    """One parsed module: who calls what."""

    def __init__(self, tree: ast.Module) -> None:
        self._nodes = list(ast.walk(tree))
        self._parents = {child: node for node in self._nodes for child in ast.iter_child_nodes(node)}
        self._helpers = dict(self._found_helpers())
        self._wrappers: dict[str, set[str]] = {}
        self._wrappers = dict(self._found_wrappers())

    def uses(self) -> Iterator[tuple[str, str, str]]:
        """Yield function, resource and verb."""
        for node in self._nodes:
            if isinstance(node, ast.Dict):
                yield from _kinds(node)
            resource = self._resource(node)
            for verb in self._verbs(node) if resource else ():
                yield self._name(node), resource, verb

    def _found_helpers(self) -> Iterator[tuple[str, str]]:
        """Yield the names of functions that return a path, and of constants that are one, with its resource."""
        for node in self._nodes:
            resource = _built(node)
            above = self._parents.get(node)
            function = self._function(node)
            if resource and isinstance(above, ast.Return) and function is not None:
                yield function.name, resource
            elif resource and isinstance(above, ast.Assign | ast.AnnAssign) and function is None:
                target = above.targets[0] if isinstance(above, ast.Assign) else above.target
                yield ast.unparse(target), resource

    def _found_wrappers(self) -> Iterator[tuple[str, set[str]]]:
        """Yield the names of functions that call a verb with a path that they are given, with the verbs."""
        for node in self._nodes:
            if isinstance(node, Function):
                calls = [one for one in ast.walk(node) if isinstance(one, ast.Call)]
                given = {argument.arg for argument in node.args.args}
                if verbs := {verb for one in calls if given & _names(one.args) for verb in self._verbs_of(one)}:
                    yield node.name, verbs

    def _resource(self, node: ast.AST) -> str:
        """Return the resource whose path an expression is; empty for anything else."""
        above = self._parents.get(node)
        if isinstance(node, ast.Name) and not (isinstance(above, ast.Call) and above.func is node):
            return self._helpers.get(node.id, "")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return self._helpers.get(node.func.id, "")
        return _built(node)

    def _above(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield what a node stands in, the nearest first."""
        while (above := self._parents.get(node)) is not None:
            yield above
            node = above

    def _function(self, node: ast.AST) -> Function | None:
        return next((one for one in self._above(node) if isinstance(one, Function)), None)

    def _name(self, node: ast.AST) -> str:
        """Return the name of the function around a node, with its class."""
        around = [one.name for one in self._above(node) if isinstance(one, Function | ast.ClassDef)]
        return ".".join(reversed(around))

    def _verbs(self, node: ast.AST) -> set[str]:
        """Return the verbs of the calls that take this path: directly, or by the name of a variable."""
        above = self._parents[node]
        direct = self._verbs_of(above) if isinstance(above, ast.Call) else set()
        function = self._function(node)
        if direct or function is None:
            return direct
        variables: set[str] = set()
        for statement in ast.walk(function):  # from the outside in, and in order
            if isinstance(statement, ast.Assign | ast.For):
                value = statement.value if isinstance(statement, ast.Assign) else statement.iter
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                if any(one is node or (isinstance(one, ast.Name) and one.id in variables) for one in ast.walk(value)):
                    variables |= _names(one for target in targets for one in ast.walk(target))
        calls = [one for one in ast.walk(function) if isinstance(one, ast.Call)]
        return {verb for one in calls if variables & _names(one.args) for verb in self._verbs_of(one)}

    def _verbs_of(self, call: ast.Call) -> set[str]:
        """Return the verbs that a call sends."""
        function = call.func
        name = function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)
        known = METHODS if isinstance(function, ast.Attribute) else FUNCTIONS
        texts = [one.value for one in call.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        found = [known.get(name, set()), self._wrappers.get(name, set()), *(TEXTS.get(text, set()) for text in texts)]
        return set().union(*found)


def _names(arguments: Iterable[ast.AST]) -> set[str]:
    return {one.id for one in arguments if isinstance(one, ast.Name)}


def _built(node: ast.AST) -> str:
    """Return the resource of a call `paths.NAME(...)`; empty for anything else."""
    function = node.func if isinstance(node, ast.Call) else None
    if (
        not isinstance(node, ast.Call)
        or not isinstance(function, ast.Attribute)
        or ast.unparse(function.value) != "paths"
    ):
        return ""
    arguments: list[str] = []
    for one in node.args:
        words = ["x", "x"] if isinstance(one, ast.Starred) else ["x"]
        arguments += [one.value] if isinstance(one, ast.Constant) and isinstance(one.value, str) else words
    match = _PATH.fullmatch(getattr(paths, function.attr)(*arguments))
    if match is None:
        return ""
    group, plural, sub = match.groups(default="")
    return _named(group, plural, sub)


def _named(group: str, plural: str, sub: str) -> str:
    return "/".join(filter(None, (".".join(filter(None, (plural, group))), sub)))


def _kinds(table: ast.Dict) -> Iterator[tuple[str, str, str]]:
    """Yield the entries of a table {(group, kind): plural}: kinds to get; to list and patch too, by a call."""
    for key, value in zip(table.keys, table.values, strict=True):
        plural = value.args[0] if isinstance(value, ast.Call) and value.args else value
        if isinstance(key, ast.Tuple) and isinstance(key.elts[0], ast.Constant) and isinstance(plural, ast.Constant):
            name, group = str(plural.value), str(key.elts[0].value)
            words = f"{ast.unparse(value.func)}({name})" if isinstance(value, ast.Call) else name
            for verb in ("get", "list", "patch") if isinstance(value, ast.Call) else ("get",):
                yield words, f"{name}.{group}", verb


def rendered(granted: list[Grant]) -> str:
    """Return the page. Raises UnneededRight."""
    known = {package: list(uses(ROOT / package)) for packages in PACKAGES.values() for package in packages}
    rows = []
    for grant in granted:
        packages = next(found for begin, found in PACKAGES.items() if grant.role.startswith(begin))
        found = (
            (use.file, use.function)
            for package in packages
            for use in known[package]
            if (use.resource, use.verb) == (grant.resource, grant.verb)
        )
        elsewhere = ELSEWHERE.get((grant.resource, grant.verb)) or ELSEWHERE.get((grant.role, grant.verb))
        place = next(found, None) or elsewhere
        if place is None:
            raise UnneededRight(f"{grant.role} may {grant.verb} {grant.resource}, and no function needs it: remove it")
        rows.append((grant.role, grant.resource, place, grant.verb))
    lines = [
        f"| `{role}` | `{resource}` | {', '.join(row[3] for row in group)} | `{file}` | `{function}` |\n"
        for (role, resource, (file, function)), group in groupby(rows, lambda row: row[:3])
    ]
    return TEXT + "".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Write the page, or with --check report a stale one and return 1."""
    parser = argparse.ArgumentParser(prog="python -m devcluster.rights", description="Generate the table of rights.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the page is stale")
    options = parser.parse_args(arguments)
    try:
        wanted = rendered(grants())
    except UnneededRight as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if options.check:
        is_stale = PAGE.read_text(encoding="utf-8") != wanted
        if is_stale:
            sys.stderr.write(f"stale: {PAGE}; run python -m devcluster.rights\n")
        return int(is_stale)
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
