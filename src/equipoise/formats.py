"""The number formats: what each can hold.

Enters: a name as the user writes it. Leaves: a :class:`Format`. Where: before everything else; no torch.
Source: IEEE 754-2019 (binary32, binary16); bfloat16 as binary32 cut to 16 bits; OCP 8-bit floating point
specification 1.0 (E4M3 has no infinity and one NaN; E5M2 follows IEEE 754).

With ``m`` stored mantissa bits, smallest normal exponent ``emin`` and largest exponent ``emax``:
largest = (2 - 2^-m) 2^emax (E4M3 gives one code to NaN: (2 - 2^(1-m)) 2^8 = 448), smallest normal = 2^emin,
smallest subnormal = 2^(emin - m), epsilon = 2^-m (the distance from 1 to the next number).
"""

from dataclasses import dataclass

from .errors import FormatError, did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One number format."""

    name: str
    """The name in policies, plans and ``--json``."""
    bits: int
    """Bits in memory."""
    mantissa_bits: int
    """Stored mantissa bits (the leading one isn't stored)."""
    min_exponent: int
    """Exponent of the smallest normal number."""
    largest: float
    """Largest finite number."""
    torch_name: str
    """Attribute of ``torch`` that holds the dtype."""

    @property
    def epsilon(self) -> float:
        """Distance from 1 to the next number."""
        return 2.0**-self.mantissa_bits

    @property
    def smallest_normal(self) -> float:
        """Smallest positive number with full precision."""
        return 2.0**self.min_exponent

    @property
    def smallest_subnormal(self) -> float:
        """Smallest positive number."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    @property
    def is_half(self) -> bool:
        """Whether a tensor takes two bytes a number."""
        return self.bits == 16


FP32 = Format(
    name="fp32",
    bits=32,
    mantissa_bits=23,
    min_exponent=-126,
    largest=(2 - 2.0**-23) * 2.0**127,
    torch_name="float32",
)
BF16 = Format(
    name="bf16",
    bits=16,
    mantissa_bits=7,
    min_exponent=-126,
    largest=(2 - 2.0**-7) * 2.0**127,
    torch_name="bfloat16",
)
FP16 = Format(name="fp16", bits=16, mantissa_bits=10, min_exponent=-14, largest=65504.0, torch_name="float16")
FP8_E4M3 = Format(
    name="fp8-e4m3", bits=8, mantissa_bits=3, min_exponent=-6, largest=448.0, torch_name="float8_e4m3fn"
)
FP8_E5M2 = Format(
    name="fp8-e5m2", bits=8, mantissa_bits=2, min_exponent=-14, largest=57344.0, torch_name="float8_e5m2"
)

FORMATS: dict[str, Format] = {f.name: f for f in (FP32, BF16, FP16, FP8_E4M3, FP8_E5M2)}
"""All formats by name; what a device can do with each is the probe's answer, not this table's."""

TRAINABLE = ("fp32", "bf16", "fp16")
"""Formats that a policy may give to a layer today."""

_MIXED = {
    "fp32": "fp32",
    "float32": "fp32",
    "torch.float32": "fp32",
    "32": "fp32",
    "32-true": "fp32",
    "no": "fp32",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "torch.bfloat16": "bf16",
    "bf16-mixed": "bf16",
    "fp16": "fp16",
    "float16": "fp16",
    "half": "fp16",
    "torch.float16": "fp16",
    "16": "fp16",
    "16-mixed": "fp16",
    "fp16-mixed": "fp16",
}
_NARROW_WEIGHTS = {"bf16-true", "16-true", "fp16-true"}


def format_named(text: object) -> Format:
    """The format that a user means by ``text``: a name, another library's name, or a torch dtype.

    Raises:
        FormatError: the name is unknown, asks for narrow weights, or can't be given to a layer.
    """
    key = str(text).strip().lower()
    if key in _NARROW_WEIGHTS:
        raise FormatError(
            f"precision {text!r} asks for narrow weights; a format's name here means mixed precision with "
            f"FP32 master weights. Use {'bf16' if key.startswith('bf') else 'fp16'!r}."
        )
    name = _MIXED.get(key)
    if name is None:
        if key in FORMATS:
            raise FormatError(
                f"format {key!r} is known but can't be trained in yet; allowed: {', '.join(TRAINABLE)}"
            )
        hint = did_you_mean(key, _MIXED)
        raise FormatError(f"unknown format {text!r}; allowed: {', '.join(TRAINABLE)}{hint}")
    return FORMATS[name]
