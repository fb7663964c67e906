"""The command's tools besides planning: run a model, calibrate and examine this machine."""
