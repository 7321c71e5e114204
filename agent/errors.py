"""Errors of the agent.

AgentError
├── ReadingFailed      the machine as a whole could not be read (no driver, broken state file); the last report stays
├── SettingsMistake    the command line asks for something impossible
└── TooManyDevices     no device id is left; a bound, not an expectation
"""


class AgentError(Exception):
    """Base of this package's exceptions."""


class ReadingFailed(AgentError):
    """Nothing could be read from `source`. is_refused: the driver library as a whole fails; a new container may cure
    that, because only a new container sees a driver that was loaded since."""

    def __init__(self, source: str, problem: str, *, is_refused: bool = False) -> None:
        self.source = source
        self.problem = problem
        self.is_refused = is_refused
        super().__init__(f"cannot read {source}: {problem}")


class SettingsMistake(AgentError):
    """Two settings contradict each other, or one names something that does not exist."""


class TooManyDevices(AgentError):
    """Every device id of the node is used or held by a Lease."""

    def __init__(self, uuid: str, *, ids_max: int) -> None:
        self.uuid = uuid
        super().__init__(
            f"no id below {ids_max} is left for device {uuid}; delete Leases of GPUs that left the machine"
        )
