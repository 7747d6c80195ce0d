"""The `cuda` device: workers' GPU memory, copied by the GPUs' copy engines through the driver API.

gpus      finds the GPUs; opens each when a worker first names it
device    one GPU: its context, its memory lane, its copies
memory    maps what workers share of it: IPC handles, chunks of virtual memory
stream    one stream and its chunks in flight
rows      makes the copies of one direction: row by row, or in runs
trials    records driver calls that this process may not survive
pinning   registers the arena with CUDA, piece by piece
driver    the driver API: calls by name, the hot ones by pointer
"""
