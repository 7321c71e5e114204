"""The command line, `atoll`, also usable as `kubectl atoll`."""
