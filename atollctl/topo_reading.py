"""Reading the machine that the options of `atoll topo` and `atoll choose` name.

In: paths, names and a kubeconfig. Out: a Source, or an InputError. Separate, because this is all the I/O that both
commands do before they print.
"""

import codecs
import sys
from pathlib import Path
from typing import BinaryIO, TextIO

import pydantic

from atoll.api.node_status import GpuNodeStatus
from atoll.kube import paths
from atoll.kube.client import ApiClient
from atoll.kube.errors import KubeError, NotFound
from atollctl.sentences import sentence
from atollctl.topo_source import (
    HOW_TO_SAVE,
    InputError,
    MachineSource,
    printable,
    source_of_profile,
    source_of_report,
    source_of_text,
)
from topology.topo_text import TEXT_MAX

UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
"""How a text begins that was saved by PowerShell."""


def read_text(path: Path) -> str:
    """Read a saved matrix; `-` is standard input. Raises InputError when it cannot be read or is too large."""
    try:
        if str(path) == "-":
            data = _standard_input().read(TEXT_MAX + 1)
        else:
            with path.open("rb") as file:
                data = file.read(TEXT_MAX + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"cannot read {printable(str(path))}: {reason}") from error
    if len(data) > TEXT_MAX:
        raise InputError(f"{printable(str(path))} is larger than {TEXT_MAX} bytes, as no link matrix is; {HOW_TO_SAVE}")
    return data.decode("utf-16" if data[:2] in UTF_16 else "utf-8", errors="replace")


def _standard_input() -> BinaryIO:
    stream: TextIO | None = sys.stdin
    if stream is None:
        raise InputError("standard input is closed; give a file to --from")
    return stream.buffer


def read_offline(from_file: Path | None, profile_name: str | None, model: str, *, or_this: str = "") -> MachineSource:
    """The machine that exactly one of file and profile names. Raises InputError, which tells `or_this` as a way too."""
    if profile_name is not None and (from_file is not None or model):
        raise InputError("a known machine tells its own GPUs; leave out --from and --model")
    if profile_name is not None:
        return source_of_profile(profile_name)
    if from_file is None:
        files = "--from FILE with a saved `nvidia-smi topo -m`, or --profile NAME"
        raise InputError(f"no machine is named; give {or_this}{files}")
    name = "standard input" if str(from_file) == "-" else from_file.name
    return source_of_text(read_text(from_file), name=name, model=model)


def refuse_options_of_files(from_file: Path | None, profile_name: str | None, model: str) -> None:
    """Raise InputError when a node is named and something else as well."""
    if from_file is not None or profile_name is not None or model:
        raise InputError("a node tells its own GPUs; leave out --from, --profile and --model")


async def read_node(node: str, kubeconfig: Path | None, context: str | None) -> MachineSource:
    """The machine that the node's agent reports. Raises InputError."""
    name = printable(node)
    if node in {"", ".", ".."}:
        raise InputError(f"{name!r} is no name of a node")
    try:
        async with await ApiClient.connect(kubeconfig, context, user_agent="atoll-topo") as client:
            status = GpuNodeStatus.model_validate_json(await client.get(paths.gpunodestatuses(node)))
    except NotFound as error:
        raise InputError(f"there is no GPU report of node {name}; does its agent run?") from error
    except KubeError as error:
        raise InputError(f"the report of node {name} could not be read: {sentence(error)}") from error
    except pydantic.ValidationError as error:
        raise InputError(
            f"the report of node {name} is not what an agent writes: {error.error_count()} faults"
        ) from error
    return source_of_report(status)
