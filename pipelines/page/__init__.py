"""The web page of pipelines: the runs, and each with its graph, time line and logs. It only reads."""
