"""The real torch_npu on CPU: CANN replaced by a stub, kernels by those of the CPU (see README)."""
