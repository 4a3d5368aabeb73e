"""Plain types, rank arithmetic, versions and patching, which every other room may import."""
