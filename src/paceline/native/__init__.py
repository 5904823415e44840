"""The C++ library of the CPU kernels, the lookup drafters and the block drafters."""
