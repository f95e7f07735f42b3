"""Scripts about what Triton compiles, which tests cannot ask for themselves: they have its interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def output_of(script: str, **more: str) -> str:
    """What it prints. It finds h200.py and variants_met.py; `more` stands in its environment."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    folders = [str(Path(__file__).parents[1] / "runtime"), *filter(None, [environment.get("PYTHONPATH")])]
    environment |= {"PYTHONPATH": os.pathsep.join(folders), **more}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
