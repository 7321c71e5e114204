"""Gangs: who belongs together, when they may start, whether they are ready, when they give way. Pure."""
