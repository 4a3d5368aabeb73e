"""One file for each verb of the RL step, and one that builds the parts."""
