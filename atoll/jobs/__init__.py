"""Jobs: what somebody wants to run, and the Kubernetes objects that it becomes. Pure."""
