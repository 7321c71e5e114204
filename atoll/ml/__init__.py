"""What a machine-learning job may say about accelerators, models, checkpoints and priorities; pure."""
