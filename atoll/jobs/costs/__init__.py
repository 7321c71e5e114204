"""Cost of jobs and use of GPUs: prices, estimates, budgets, and a ledger of GPU time. Pure."""
