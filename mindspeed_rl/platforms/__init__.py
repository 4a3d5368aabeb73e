"""Device platforms: the only room that names an accelerator."""
