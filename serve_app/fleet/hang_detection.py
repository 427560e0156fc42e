"""How long an engine has been silent of its own accord.

On a busy host an engine is late because it got no core, and its reader because it got none itself.
Neither is a hang: only time in which both could run counts.
"""

from __future__ import annotations

from pathlib import Path


def core_waits(pid: int) -> dict[int, float]:
    """Seconds that each thread of a process has been ready to run and waited for a core.

    Empty where the kernel does not tell, or when the process is gone.
    """
    waits = {}
    for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            waits[int(file.parent.name)] = int(file.read_text().split()[1]) / 1e9
        except (OSError, IndexError):  # the thread has ended
            continue
    return waits


class HangDetector:
    """Is told of each report, and of the time between looks."""

    def __init__(self, look_s: float, waits: dict[int, float]) -> None:
        """look_s: a look that comes later than this tells of the watcher, not of the engine."""
        self.counted_s = 0.0
        self._look_s = look_s
        self._waits = waits

    def heard(self) -> None:
        """The engine reported."""
        self.counted_s = 0.0

    def look(self, elapsed_s: float, waits: dict[int, float]) -> None:
        """elapsed_s: since the last look. waits: as `core_waits` gives them, now.

        The kernel counts a wait when it is over, so it may be told later than it was.
        """
        waited_s = max((s - self._waits.get(thread, s) for thread, s in waits.items()), default=0.0)
        self._waits = waits
        self.counted_s = max(0.0, self.counted_s + min(elapsed_s, self._look_s) - waited_s)
