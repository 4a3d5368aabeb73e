"""Device platforms: the only place that names an accelerator."""
