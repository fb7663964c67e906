"""Values that every other room reads: problems, machines, schedules, spans. The standard library alone."""
