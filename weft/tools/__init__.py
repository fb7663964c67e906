"""What the command does beside planning: run a model, calibrate, characterize and examine this machine."""
