"""The job service: keeps jobs, gives them to the cluster, and follows what becomes of them."""
