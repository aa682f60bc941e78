"""The help texts of Python itself (`pydoc_data.topics`, about 460 KB of English). A sanity scale, no benchmark.

They differ between versions of Python, and so do the losses; in places they repeat each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from pydoc_data.topics import topics

from lightning_decentral.recipes.text import Text


class Pydoc(Text):
    """From the standard library; options are those of `Text`."""

    def texts(self) -> Sequence[str]:
        """One for each topic."""
        return [topics[name] for name in sorted(topics)]
