"""One check of a machine with one GPU or one NPU, from packages to learning; no rank needs it."""
