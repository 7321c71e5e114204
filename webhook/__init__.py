"""The admission webhook: shapes a pod that asks for GPUs at its creation, so that its containers see exactly those."""
