"""Node agent: reports one node's GPUs, links, health and evidence. It decides nothing."""
