"""Leader-elected reconcilers: GPUs are freed on proof, lost Leases are written again, pods that fit are woken."""
