"""What the command does beside planning: run a model, calibrate and examine this machine."""
