"""What a folder is to become, checked before anything is read, and without torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from mini_infer.core.errors import ConfigError

if TYPE_CHECKING:
    from mini_infer.quantization.formats import Scheme


class Method(str, Enum):
    rtn = "rtn"  # round to nearest
    gptq = "gptq"
    awq = "awq"
    smoothquant = "smoothquant"


METHODS = {
    "w8a8": (Method.smoothquant, Method.rtn),
    **dict.fromkeys(("w8a16", "mixed", "fp8", "fp8_block"), (Method.rtn,)),
    "w4a16": (Method.gptq, Method.awq, Method.rtn),
}
GROUPS = (32, 64, 128)


@dataclass(frozen=True)
class Recipe:
    """
    Attributes:
        scheme: a name in METHODS, which are those of SCHEMES.
        group: columns that share a scale, for w4a16.
        symmetric: without zeros, for w4a16.
        act_order: GPTQ takes the columns with the largest inputs first.
        alpha: SmoothQuant's migration strength, 0 (all of the difficulty stays with activations) to 1; None: the one
            that errs least, for each input.
        kept: linear layers whose names end in, or contain, one of these stay in the model's dtype.
        samples, length: calibration sequences, and tokens of each.
    """

    scheme: str
    method: Method
    group: int = 128
    symmetric: bool = True
    act_order: bool = True
    alpha: float | None = None
    kept: tuple[str, ...] = ()
    samples: int = 128
    length: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        if self.scheme not in METHODS:
            raise ConfigError(f"--scheme must be one of {', '.join(METHODS)}; got {self.scheme}")
        allowed = METHODS[self.scheme]
        if self.method not in allowed:
            names = " or ".join(method.value for method in allowed)
            others = ", ".join(name for name, methods in METHODS.items() if self.method in methods)
            raise ConfigError(
                f"--scheme {self.scheme} --method {self.method.value} do not go together: {self.scheme} is made by "
                f"{names}, and {self.method.value} makes {others}"
            )
        if self.scheme == "w4a16" and self.group not in GROUPS:
            raise ConfigError(f"--group must be one of {', '.join(map(str, GROUPS))}; got {self.group}")
        if self.alpha is not None and not 0 <= self.alpha <= 1:
            raise ConfigError(f"--alpha must be from 0 to 1; got {self.alpha}")
        if self.samples < 1 or self.length < 2:
            raise ConfigError(
                f"--samples must be at least 1 and --length at least 2; got {self.samples}, {self.length}"
            )

    @property
    def formats(self) -> Scheme:
        from mini_infer.quantization.formats import SCHEMES

        return SCHEMES[self.scheme].grouped(self.group, self.symmetric)

    @property
    def needs_text(self) -> bool:
        return self.method is not Method.rtn or self.formats.outliers > 0

    def keeps(self, name: str) -> bool:
        return any(part in name for part in self.kept)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "method": self.method.value, "kept": list(self.kept)}
