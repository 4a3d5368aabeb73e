"""On-policy distillation: teachers score the tokens that the policy has sampled."""
