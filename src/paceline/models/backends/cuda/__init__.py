"""The CUDA kernels, one file for each idea. Only CUDA code imports them: triton is not installed everywhere."""
