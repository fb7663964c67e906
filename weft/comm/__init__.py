"""Manages the ranks of one process group: how they agree, share memory, and detect a lost rank."""
