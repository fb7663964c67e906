"""What tests read off the pages that weft writes."""

from __future__ import annotations

import json
from typing import Any


def charts_of(text: str) -> dict[str, Any]:
    """The charts of a page by name; each has a place there."""
    start = text.index('id="charts">') + len('id="charts">')
    charts: dict[str, Any] = json.loads(text[start : text.index("</script>", start)])
    assert all(f'id="{name}"' in text for name in charts)
    return charts
