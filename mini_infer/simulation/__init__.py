"""The engine's own loop, scheduler, KV manager and router against a clock that nobody waits for (docs/simulator.md).

costs.py     what a step takes, as a function of what is in it
executor.py  an executor that computes nothing, and lets a virtual clock pass instead
replica.py   an engine without text on it
ahead.py     steps that are all alike, taken at once
apart.py     prompts that one engine computes for another
cluster.py   replicas behind the router, on one time line

Without torch: a cluster is simulated where no model could run. Who reads files of costs, and where none fits asks the
roofline, is experiments/lab/measure/simulated.py.
"""
