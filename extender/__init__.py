"""The HTTP extender beside kube-scheduler: filter, prioritize, bind, preempt."""
