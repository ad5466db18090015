"""Machines as the probe once read them: so that tests assume no kind of CPU."""

from equipoise.records import FormatVerdict, Machine


def machine(**verdicts: str) -> Machine:
    """A CPU with these verdicts; formats that aren't named are ``not-worth-it``."""
    formats = {}
    for name in ("fp32", "bf16", "fp16"):
        verdict = verdicts.get(name, "use" if name == "fp32" else "not-worth-it")
        formats[name] = FormatVerdict(format=name, verdict=verdict, reason="a recorded reading", claimed=True)
    readings = [
        {
            "op": "gemm",
            "shape": "256x256x256",
            "direction": "forward",
            "format": f,
            "threads": 2,
            "median_s": s,
            "low_s": s,
            "high_s": s,
            "rounds": 5,
        }
        for f, s in (("fp32", 2e-4), ("bf16", 5e-5))
    ]
    return Machine(fingerprint="recorded", device="cpu", name="recorded", formats=formats, readings=readings)
