"""Plans which samples share a row of a micro-batch, and which ranks have it."""
