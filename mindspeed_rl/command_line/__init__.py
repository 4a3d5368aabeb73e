"""From a command line to the configuration of a run."""
