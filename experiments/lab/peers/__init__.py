"""Other systems that serve the same workload, timed with the same definitions.

On a GPU every peer has a process of its own, in which nothing that it keeps is in another's way.
"""
