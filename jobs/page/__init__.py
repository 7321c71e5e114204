"""The web page of the job service: queue, time line, and each job with history, logs, GPUs and cost. It only reads."""
