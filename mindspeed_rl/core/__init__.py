"""What every room may import: plain types, rank arithmetic, versions and patching."""
