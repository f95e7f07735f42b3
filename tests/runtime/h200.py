"""For whom Triton compiles in scripts that have no GPU."""

from __future__ import annotations

from triton.backends.compiler import GPUTarget


class H200:
    """A driver of Triton's, as far as compiling asks for it: a launch would fail."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)
