"""Types of options with units, whose errors name the option: 200mbit, 100us, 24GB.

Short, as `shared.plan.units` reads them."""

import argparse
from collections.abc import Callable

from lightning_decentral.shared.plan import units


def _quantity(read: Callable[[str], float]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


RATE, SPAN, SIZE = map(_quantity, (units.bytes_per_second, units.seconds, units.size_bytes))
