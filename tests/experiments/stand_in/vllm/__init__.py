"""What the lab uses of vLLM beside its engine, made up: on a PYTHONPATH it is found in vLLM's place."""

__version__ = "made up"
