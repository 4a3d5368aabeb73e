"""The samples of a step between the ranks that sample and the ranks that train."""
