"""Compiles the modules of a step that hold no tensor, beside their sources, as `make compiled` says. By hand from the
project's folder: python ops/compile.py
"""

from pathlib import Path

from mypyc.build import mypycify
from setuptools import setup

from mini_infer.core.compiled import LIST, record

# But for what mypyc takes otherwise than it is meant: a dict with attributes of its own (cache/under_way.py), cached
# properties (simulation/costs.py), a class that tests inherit from (scheduler/prefix_loads.py).
MODULES = """
    core/plan core/request
    cache/block_pool cache/kv_manager cache/prefix_tiers
    runtime/engine_core
    runtime/scheduler/scheduler runtime/scheduler/admission runtime/scheduler/planned_step
    runtime/scheduler/elsewhere runtime/scheduler/adapter_slots
    serving/router
    simulation/ahead simulation/cluster simulation/executor simulation/replica
"""

PACKAGE = Path("mini_infer")
sources = [f"{module}.py" for module in MODULES.split()]
files = [str(PACKAGE / source) for source in sources]
told = record(sources, PACKAGE)  # before minutes in which somebody may edit them
compiled = mypycify(["--follow-imports=silent", *files], group_name="mini_infer.compiled")
setup(ext_modules=compiled, script_args=["build_ext", "--inplace"])
(PACKAGE / LIST).write_text(told, encoding="utf-8")
