"""What every experiment shares, by room: measure (passes, clocks, subjects), kernels (sweeps of single operations),
judge (statistics, gates, validity, claims), store (result files, trackers), show (pages, figures), load (the client of
a server), peers, workloads. Here stands what a config says and what run.py does with it."""
