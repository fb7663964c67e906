"""Published evaluations, simulated: T3, FiCCO and DLRM. Nothing imports this room but the command."""
