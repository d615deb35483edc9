"""ShrinkPolicy: which rows are not worth their memory. Pure numbers; leaves the removal to the table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class ShrinkPolicy:
    """Each `shrink` is a day: shows and clicks are multiplied by `show_click_decay_rate`, and the unseen
    days of a row (0 after a push) grow by 1. Then a row goes whose score,

        nonclk_coeff * (show - click) + click_coeff * click,

    is below `delete_threshold`, or which was unseen for more than `delete_after_unseen_days`. Names and
    defaults are those of Paddle's ctr accessor.
    """

    show_click_decay_rate: float = 0.98
    nonclk_coeff: float = 0.1
    click_coeff: float = 1.0
    delete_threshold: float = 0.8
    delete_after_unseen_days: float = 30.0

    def numbers(self) -> NDArray[np.float32]:
        """In the order in which the kernel takes them."""
        coefficients = self.show_click_decay_rate, self.nonclk_coeff, self.click_coeff
        return np.array([*coefficients, self.delete_threshold, self.delete_after_unseen_days], np.float32)
