"""What `make compiled` has made is tested as its sources are, but for tests that replace a method."""

import pytest

from mini_infer.core import compiled

replaces_methods = pytest.mark.skipif(compiled.in_use(), reason="a compiled class keeps its methods: make interpreted")
