"""What a run tells of packets that it recorded."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Recording:
    """What was recorded of one link. ``failure`` is one sentence, or empty."""

    link: str
    file: str
    packets: int = 0
    beyond: int = 0  # seen, and not in the file: it was full, or could not be written
    lost: int = 0  # not even seen
    failure: str = ""

    @property
    def text(self) -> str:
        """One line for people."""
        parts = [f"{self.packets:,} packets in {self.file}"]
        if self.beyond:
            parts.append(f"{self.beyond:,} more are not in it")
        if self.lost:
            parts.append(f"{self.lost:,} were lost before they could be recorded")
        return f"Capture of {self.link}: {', '.join(parts)}."
