"""The web page of pipelines: the runs, each with its graph, time line and logs, and a form that deploys use cases."""
