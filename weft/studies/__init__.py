"""Published evaluations, simulated: T3, FiCCO, DLRM and ISO. Nothing imports this room but the command."""
