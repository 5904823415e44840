"""The CUDA kernels, one file per idea. Only `models.triton_kernels` imports them: triton is not everywhere."""
