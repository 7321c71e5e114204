"""Node agent: reports GPUs, links, health and evidence of one node. It decides nothing."""
