"""Which part of which tensor a rank holds, of a trainer, an engine or a file."""
