"""The samples of a step, from the ranks that sample to the ranks that train."""
