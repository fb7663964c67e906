"""This module reads variables of the environment without the frames of os.environ."""

from __future__ import annotations

import os
from collections.abc import Callable

variable: Callable[[bytes], bytes | None] = os.environ._data.get  # type: ignore[attr-defined]
"""Returns a variable of the environment by its name, or None. It sees what os.environ has, also after changes."""
