"""Our clients in the simulator."""
