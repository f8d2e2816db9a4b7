"""The backbone as CUDA graphs: what is captured, what a replay relies on, and the buffers of a size."""
