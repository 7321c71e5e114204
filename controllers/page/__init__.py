"""The web page of the controllers: the cluster as islands of GPUs, and what waits for what. It only reads."""
