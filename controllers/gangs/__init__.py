"""Gangs: created, admitted whole or not at all, evicted, resumed."""
