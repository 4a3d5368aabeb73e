"""The switch between training and rollout on shared devices."""
