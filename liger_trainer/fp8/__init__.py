"""FP8 training: torchao's layers on our kernels, a frozen FP8 base for adapters, and the option `fp8`."""
