"""GPU Leases: released on proof, repaired, and ended where no bind stands behind them."""
