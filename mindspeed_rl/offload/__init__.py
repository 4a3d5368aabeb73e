"""Memory that leaves a device and comes back, with every view of it staying valid."""
