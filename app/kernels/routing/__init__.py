"""Router kernels: top-k experts, and the split of fp32 into bf16 parts for tensor cores."""
