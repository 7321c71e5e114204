"""Pure Kubernetes domain: views of pods and nodes, the ledger of GPUs, verdicts and decisions. No I/O, no clock."""
