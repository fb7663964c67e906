"""The ranks of one process group: how they agree, the memory they share, and how a lost rank is noticed."""
