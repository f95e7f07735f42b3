"""What `make compiled` has made is tested as its sources are, but for tests that replace a method."""

from pathlib import Path

import pytest

from mini_infer.cache import kv_manager

COMPILED = Path(kv_manager.__file__).suffix != ".py"
replaces_methods = pytest.mark.skipif(COMPILED, reason="a compiled class keeps its methods: make interpreted")
