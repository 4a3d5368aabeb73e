"""Which rank of an engine has which experts."""
