"""Rounding of measurements."""


def round_(value, digits: int = 6) -> float:
    """A measurement as a float of 6 significant digits: recorded files stay small, and live equals recorded."""
    return float(f"{float(value):.{digits}g}")
