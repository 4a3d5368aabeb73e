"""Training on megatron-core: the only package that imports megatron."""
