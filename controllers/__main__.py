"""Start the controllers: `python -m controllers --help`."""

import sys

from atoll.service import logs, settings
from atoll.service.errors import SettingsError
from atoll.service.runtime import run
from controllers.runner import serve_controllers
from controllers.settings import ControllersSettings


def main() -> int:
    """Run until a signal; return the exit status."""
    try:
        values = settings.load(ControllersSettings, sys.argv[1:], "ATOLL_CONTROLLERS")
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    logs.configure(values.log_level, "controllers")
    settings.log_effective(values)
    return run(lambda: serve_controllers(values))


if __name__ == "__main__":
    sys.exit(main())
