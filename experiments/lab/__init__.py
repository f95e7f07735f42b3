"""What every experiment shares: workloads, clocks, statistics, gates, the result store, plots, reports, peers."""
