"""Independent computation beside collectives: `concurrent`, copy-engine collectives, DDP and FSDP hooks, SM controls."""
