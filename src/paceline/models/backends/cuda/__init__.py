"""The CUDA kernels, one file per idea. Only CUDA code imports them: triton is not installed everywhere."""
