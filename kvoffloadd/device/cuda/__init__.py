"""The `cuda` device: workers' GPU memory, copied by the GPUs' copy engines through the driver API.

gpus      which GPUs there are; each is made usable when a worker first names it
device    one GPU: its context, its memory lane, its copies
memory    what workers share of it: IPC handles, chunks of virtual memory
stream    one stream and its chunks in flight
rows      which way one direction's copies are made: row by row, or in runs
trials    what this process may not survive, written down before
pinning   the arena, registered with CUDA piece by piece
driver    the driver API: calls by name, the hot ones by pointer
"""
