"""The `cuda` device: workers' GPU memory, copied by the GPUs' copy engines through the driver API.

gpus finds GPUs; opens each when a worker first names it device one GPU: its context, its memory lane, its copies memory
maps what workers share of it: IPC handles, chunks of virtual memory stream one stream and its chunks in flight rows how
one direction's copies are made: row by row, or in runs trials records driver calls that this process may not survive
pinning the arena, registered with CUDA piece by piece driver the driver API: calls by name, the hot ones by pointer
"""
