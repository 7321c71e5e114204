"""The job service: records jobs, submits them to the cluster, and tracks their state."""
