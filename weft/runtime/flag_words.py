"""WaiterWords assigns the words of a schedule's flags: one word for each step that waits for a flag.

A CUDA graph replays the same constants, so a flag cannot grow from call to call. A signal raises the word of each step
that waits for the flag, and the step lowers its own word once it has passed. The checker proves that no signal is lost by that
(weft.core.schedule, "Flags").
"""

from __future__ import annotations

from weft.core.schedule import Flag, Schedule, waits


class WaiterWords:
    """WaiterWords holds the words of a schedule's flags.

    slot: the word on the flag's rank, by (flag, lane, position of the waiting step). The words of one step are adjacent, and
        gates on previous calls come last.
    slots: all words of each flag.
    words: the number of words of the rank that has most.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.slot: dict[tuple[Flag, str, int], int] = {}
        self.slots: dict[Flag, tuple[int, ...]] = dict.fromkeys(schedule.flags, ())
        self._signals = schedule.signals_per_call
        used = [0] * len(schedule.ranks)
        for rank, lane, position, step in schedule:
            for wait in sorted(waits(step), key=lambda wait: wait.on_previous_call):
                key = (wait.flag, lane.name, position)
                if key not in self.slot:
                    self.slot[key] = used[rank]
                    self.slots[wait.flag] += (used[rank],)
                    used[rank] += 1
        self.words = max(used, default=0)

    def raised(self, flag: Flag) -> bool:
        """Return whether any step signals a flag."""
        return self._signals[flag] > 0
