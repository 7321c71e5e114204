"""Jobs, and the Kubernetes objects that they become. Pure."""
