"""Products in eight bits: torchao's layers on our kernels, a frozen base for adapters, and the option `fp8`."""
