"""Gang search: hosts for all members at once, close together, or nothing. See topology.gangs.search for the entry."""
